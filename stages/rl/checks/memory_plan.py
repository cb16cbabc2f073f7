"""Plan the memory of a PPO run: run each phase once in its largest shapes, so that it fails now or not at all."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import torch
from torch import nn

from stages.distributed import group
from stages.distributed.sharding import local
from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.modeling.packed.token_logprobs import logits_chunk_tokens
from stages.reward_modeling.scorer import Scorer
from stages.rewards.classifier import ClassifierScorer
from stages.rewards.reward_functions import RewardFunction
from stages.rl.policy_gradient_trainer import PolicyGradientTrainer, backward_with_oom_retry
from stages.rl.trajectory import RolloutScores, Trajectory, score_rollout
from stages.training import memory, memory_estimate, optimizers


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
    rows = memory_estimate.estimate_memory(
        policy,
        {name: model for function in reward_functions for name, model in _models(function).items()},
        optimizer=optimizer_name,
        optimizer_bytes=optimizers.optimizer_state_bytes(
            optimizer_name, map(local, policy.trainable_parameters().values())),
        costs=costs,
        largest={
            "keys and values": memory_estimate.kv_cache_bytes(base.config, len(longest), tokens, dtype),
            "logits at once": 4 * logits_chunk_tokens(head, policy.model.device) * head.out_features,
        },
    )
    return ["memory plan, at the longest prompts", *memory_estimate.format_plan(rows)]


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
        _, size = backward_with_oom_retry(policy, trainer.optimizer, trajectory, torch.arange(count), settings)
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
