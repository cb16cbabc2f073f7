"""Plan the memory of a PPO run: estimate it from models, optimizer and buffers, and run each phase once in its largest
shapes, so that it fails now or not at all.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import NamedTuple

import torch
from torch import nn

from stages.distributed import group
from stages.distributed.sharding import local
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.modeling.packed.token_logprobs import logits_chunk_tokens
from stages.render.units import format_bytes
from stages.reward_modeling.scorer import Scorer
from stages.rewards.classifier import ClassifierScorer
from stages.rewards.reward_functions import RewardFunction
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer, backward_with_oom_retry
from stages.rl.trajectory import RolloutScores, Trajectory, score_rollout
from stages.training import memory, optimizers
from stages.training.memory import PhaseCost


class PlanRow(NamedTuple):
    """One line of the memory plan."""

    name: str
    bytes: int
    note: str


def estimate_memory(
    policy: torch.nn.Module, others: Mapping[str, torch.nn.Module], *, optimizer: str, optimizer_bytes: int,
    largest: Mapping[str, int], costs: Mapping[str, PhaseCost],
) -> list[PlanRow]:
    """List the memory of a run, in bytes.

    Args:
        policy: the trained model and its frozen base.
        others: further models by name; tensors shared with an earlier model count once.
        largest: peak bytes of temporary buffers by name.
        costs: what `measure_phases` measured; no optimizer steps in it, so its state comes on top of those peaks.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    frozen = [t for t in iter_tensors(policy) if not t.requires_grad]
    rows = [
        PlanRow("frozen base", distinct_bytes(frozen), _dtypes(frozen)),
        PlanRow("trained parameters", distinct_bytes(trained), _dtypes(trained)),
        PlanRow("gradients", distinct_bytes(trained), ""),
        PlanRow("optimizer state", optimizer_bytes, optimizer),
    ]
    counted = [*frozen, *trained]
    for name, model in others.items():
        tensors = list(iter_tensors(model))
        rows.append(PlanRow(name, distinct_bytes([*counted, *tensors]) - distinct_bytes(counted), _dtypes(tensors)))
        counted += tensors
    rows += [PlanRow(name, size, "at most") for name, size in largest.items()]
    for name, cost in costs.items():
        note = f"measured, {cost.seconds:.1f} s; without optimizer state"
        rows.append(PlanRow(f"peak of {name}", cost.peak_bytes, note))
    return rows


def format_plan(rows: list[PlanRow]) -> list[str]:
    """Format a memory plan as aligned lines."""
    width = max(len(row.name) for row in rows)
    return [f"{row.name:<{width}}  {format_bytes(row.bytes):>10}  {row.note}".rstrip() for row in rows]


def iter_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield every tensor that a module stores: parameters, buffers, and bitsandbytes' quantisation state."""
    for part in module.modules():
        yield from part.buffers(recurse=False)
        for parameter in part.parameters(recurse=False):
            yield parameter
            yield from _quantisation_tensors(part, parameter)


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the tensors in this process; those at one address (tied weights, a shared base) count once."""
    parts = [local(tensor) for tensor in tensors]
    return sum({(t.data_ptr() or id(t), t.nbytes): t.nbytes for t in parts}.values())  # on meta, all are at address 0


def kv_cache_bytes(config, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Compute the bytes of the keys and values of `rows` sequences of `tokens` tokens."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * rows * tokens * dtype.itemsize


def _quantisation_tensors(module: torch.nn.Module, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """int8: a scale per row, on the weight and later on the layer. nf4: scales per block, quantised or not."""
    tensors = [getattr(parameter, "SCB", None), getattr(getattr(module, "state", None), "SCB", None)]
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        tensors += [state.absmax, state.code, state.offset]
        state = state.state2
    yield from (tensor for tensor in tensors if torch.is_tensor(tensor))


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    """Name the number formats, the one with most bytes first."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = getattr(tensor, "quant_type", str(tensor.dtype).removeprefix("torch."))
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return ", ".join(sorted(sizes, key=sizes.get, reverse=True))


def plan_memory(
    trainer: PolicyGradientTrainer, optimizer_name: str, longest: list[list[int]],
    reward_functions: Sequence[RewardFunction],
) -> list[str]:
    """Run every phase on the longest prompts with responses of full length; return the memory plan as lines.

    No weight changes. A microbatch that does not fit is made smaller, for the run that follows too.
    """
    policy = trainer.policy
    base = policy.causal_model
    costs = _dry_run(trainer, longest)
    head, dtype = base.get_output_embeddings(), next(base.parameters()).dtype
    tokens = max(map(len, longest)) + trainer.sampling.max_response_tokens
    rows = estimate_memory(
        policy,
        {name: model for function in reward_functions for name, model in _models(function).items()},
        optimizer=optimizer_name,
        optimizer_bytes=optimizers.optimizer_state_bytes(
            optimizer_name, map(local, policy.trainable_parameters().values())),
        costs=costs,
        largest={
            "keys and values": kv_cache_bytes(base.config, len(longest), tokens, dtype),
            "logits at once": 4 * logits_chunk_tokens(head, policy.model.device) * head.out_features,
        },
    )
    return ["memory plan, at the longest prompts", *format_plan(rows)]


def longest_rollout(prompts: list[list[int]], count: int) -> list[list[int]]:
    """Return the `count` longest prompts; where there are fewer, some of them again, as in the site's rollouts."""
    return list(islice(cycle(sorted(prompts, key=len, reverse=True)), count))


def classifier_models(reward_functions: Sequence[RewardFunction], tokenizer) -> dict[str, tuple]:
    """Map the names of the reward functions that are sequence classifiers to (tokenizer, model)."""
    return {name: (getattr(function.score, "tokenizer", tokenizer), model)
            for function in reward_functions for name, model in _models(function).items()}


def _dry_run(trainer: PolicyGradientTrainer, longest: list[list[int]]) -> dict[str, memory.PhaseCost]:
    """Run the phases on as many rows as are in memory at once: all for sampling, else those of one forward pass in each
    process, and of two microbatches, the second of which finds gradients in memory.
    """
    policy, response = trainer.policy, trainer.sampling.max_response_tokens
    full = [prompt + [0] * (response - 1) for prompt in longest]

    def forward():
        rollout = _of_full_length(longest[: trainer.forward_prompts * group.world_size()], response)
        trainer.reward_shaper(rollout, update_statistics=False)
        score_rollout(policy, rollout, trainer.forward_prompts)

    def update():
        settings = trainer.update_settings
        count = min(settings.minibatch_prompts, 2 * settings.microbatch_prompts * group.world_size())
        rollout = _of_full_length(longest[:count], response)
        zeros = torch.zeros(count, response, device=policy.model.device)
        trajectory = Trajectory.from_scores(rollout, RolloutScores(zeros, zeros, zeros, zeros + 1), zeros, zeros)
        _, size = backward_with_oom_retry(policy, trajectory, torch.arange(count), settings)
        trainer.update_settings = replace(settings, microbatch_prompts=size)

    costs = memory.measure_phases({
        "rollout": lambda: sample(policy.model, full, max_new_tokens=1, temperature=1.0, stop_ids=(),
                                  generator=torch.Generator(), precision=policy.precision),
        "forward": forward,
        "update": update,
    })
    trainer.optimizer.zero_grad(set_to_none=True)
    return costs


def _of_full_length(prompts: list[list[int]], response_tokens: int) -> Rollout:
    return Rollout(prompts, [[0] * response_tokens for _ in prompts], [True] * len(prompts))


def _models(function: RewardFunction) -> dict[str, nn.Module]:
    """Return the model of a reward function by name; none for a plain function."""
    return {function.name: function.score.model} if isinstance(function.score, Scorer | ClassifierScorer) else {}
