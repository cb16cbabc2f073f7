"""Plan each stage: build its models on the meta device, run one step of its own code, and count.

A step has texts of full length: the peak is that of the worst step. The whole stage is counted with texts of
MEAN_LENGTH_SHARE of the limit.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from stages.finetuning.lm_loss import summed_lm_loss
from stages.finetuning.packing import PackedRow
from stages.modeling import lora
from stages.modeling.packed.token_logprobs import FORWARD_TOKENS, logits_chunk_tokens
from stages.planning import shapes
from stages.planning.dry_run import META, StepCost, dry_run
from stages.planning.stage_plan import (
    Hardware,
    StagePlan,
    dequantised_bytes,
    gradient_bytes,
    preset_gradients,
    stored_memory,
)
from stages.reward_modeling.dataset import Example
from stages.reward_modeling.loss import PairwiseLoss
from stages.reward_modeling.scoring_file import Scoring
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import MinibatchSize, UpdateSettings, policy_gradient_loss
from stages.rl.trajectory import Trajectory
from stages.training.disk_plan import count_saves, training_bytes
from stages.training.memory_estimate import PlanRow, kv_cache_bytes
from stages.training.trainer import KEEP_CHECKPOINTS

MEAN_LENGTH_SHARE = 0.5  # of the limit of a text; an assumption
PRODUCTS_PER_PARAMETER = 2  # floating-point operations of a forward pass for each parameter and token
MLP_TENSORS = 4  # of the MLP's width, in memory at once without gradients
SAMPLER_LOGITS = 3  # copies of the fp32 logits of all rows in sampling: divided, softmax, sorted or drawn from


def plan_download(config: PretrainedConfig, hardware: Hardware) -> StagePlan:
    """Plan the stage base for a model that is there already: it is copied."""
    model = shapes.build_causal(config, torch.bfloat16)
    count, _ = shapes.count_parameters(model)
    return StagePlan("base", count, 0, [], 0, 0, 0, 2 * count, "16-bit weights; the time is the network's")


def plan_sft(config: PretrainedConfig, settings: Any, hardware: Hardware, blocks: int | None) -> StagePlan:
    """Plan supervised fine-tuning; blocks: of the text, None if it is not known."""
    model = shapes.build_causal(config, shapes.weights_dtype(settings.precision))
    model = _adapt(model, settings)
    length = settings.sequence_length_tokens
    rows = [PackedRow(np.zeros(length, int), np.arange(length) > 0)] * settings.microbatch_sequences
    cost = _measure(model, settings, lambda: summed_lm_loss(model, rows, settings.precision).backward(),
                    settings.batch_sequences > settings.microbatch_sequences)
    if settings.max_steps is None and blocks is None:
        raise ValueError("sft.max_steps is null, and how much text there is is not known: give a dump, --pairs or "
                         "sft.max_steps")
    steps = settings.max_steps or int(blocks * settings.epochs / settings.batch_sequences)
    flops = cost.flops / settings.microbatch_sequences * settings.batch_sequences * steps
    disk = _disk(model, "adamw", count_saves(0, 1, 1, steps, settings.save_every_steps),
                 settings.patience_evaluations is not None)
    return StagePlan(
        "sft", *shapes.count_parameters(model), _training_memory(model, {}, settings, "adamw", cost, hardware),
        steps * settings.batch_sequences * length, flops, hardware.compute_seconds(flops), disk,
        f"{steps:,} steps of {settings.batch_sequences} x {length} tokens")


def plan_reward(config: PretrainedConfig, settings: Any, hardware: Hardware, pairs: int | None) -> StagePlan:
    """Plan a reward model; pairs: of the reward split, None if not known."""
    model = _adapt(shapes.build_classifier(config, shapes.weights_dtype(settings.precision)), settings, scorer=True)
    answer = settings.max_length_tokens - 1
    example = Example((), [0], [[0] * answer] * 2, [(0, 1)], [1])
    loss, scoring = PairwiseLoss(**_select(PairwiseLoss, settings)), Scoring(**_select(Scoring, settings))
    cost = _measure(
        model, settings, lambda: loss.summed_loss(
            model, [example] * settings.microbatch_pairs, scoring, settings.precision).backward(),
        settings.batch_pairs > settings.microbatch_pairs)
    count = int(min(settings.train_pairs, pairs or settings.train_pairs) * settings.epochs * settings.members)
    flops = cost.flops / settings.microbatch_pairs * count * MEAN_LENGTH_SHARE
    disk = _disk(model, settings.optimizer,
                 count_saves(count, settings.batch_pairs, 1, None, settings.save_every_steps), True)
    return StagePlan(
        "reward", *shapes.count_parameters(model),
        _training_memory(model, {}, settings, settings.optimizer, cost, hardware),
        int(count * 2 * settings.max_length_tokens * MEAN_LENGTH_SHARE), flops, hardware.compute_seconds(flops), disk,
        f"{count:,} pairs; texts of {MEAN_LENGTH_SHARE:.0%} of {settings.max_length_tokens} tokens on average")


def plan_ppo(config: PretrainedConfig, settings: Any, reward_lora: Any, hardware: Hardware) -> StagePlan:
    """Plan PPO with the merged reward model beside the policy."""
    policy, others = _build_policy(config, settings, reward_lora)
    rows, response = settings.microbatch_prompts, settings.max_response_tokens
    length = settings.max_prompt_tokens + response
    update = UpdateSettings(**_select(UpdateSettings, settings))
    trajectory, size = _full_trajectory(rows, settings.max_prompt_tokens, response), MinibatchSize(1, rows)
    cost = _measure(policy, settings, lambda: policy_gradient_loss(
        policy, trajectory, torch.arange(rows), size, update)[0].backward(),
        settings.minibatch_prompts > rows, checkpointing_here=False)
    base = policy.causal_model
    own_rows = -(-settings.rollout_prompts // hardware.devices)
    kv_bytes = kv_cache_bytes(base.config, own_rows, length, next(base.parameters()).dtype)
    sampling_bytes = SAMPLER_LOGITS * 4 * own_rows * base.config.vocab_size + _merged_bytes(policy, settings)
    disk = _disk(policy, settings.optimizer, settings.iterations // settings.save_every_iterations, True,
                 settings.keep_checkpoints)
    counts = shapes.count_parameters(policy)
    parameters = shapes.count_parameters(base)[0]
    memory = _training_memory(policy, others, settings, settings.optimizer, cost, hardware,
                              rollout=[PlanRow("keys and values", kv_bytes, f"{own_rows} rows of {length} tokens"),
                                       PlanRow("sampling", sampling_bytes, "logits, merged adapter")])
    samples = settings.iterations * settings.rollout_prompts
    tokens = int(samples * length * MEAN_LENGTH_SHARE)
    forward = PRODUCTS_PER_PARAMETER * parameters * tokens * (3 + len(others))  # rollout, old, reference; reward
    flops = forward + cost.flops / rows * samples * settings.epochs * MEAN_LENGTH_SHARE
    decode_bytes = settings.iterations * response * (memory[0].bytes + kv_bytes / 2)
    seconds = hardware.compute_seconds(flops) + hardware.read_seconds(decode_bytes)
    return StagePlan("ppo", *counts, memory, tokens, flops, seconds, disk,
                     f"{samples:,} responses; prompts and responses of {MEAN_LENGTH_SHARE:.0%} of their limits; a "
                     f"decoding step reads all weights once")


def plan_merge(stage: str, config: PretrainedConfig, settings: Any, scorer: bool) -> StagePlan:
    """Plan a merge: the model in fp32, once before it is saved and once reloaded, one at a time."""
    model = (shapes.build_classifier if scorer else shapes.build_causal)(config, torch.float32)
    count, _ = shapes.count_parameters(model)
    bytes_each = 4 if settings.dtype == "fp32" else 2
    return StagePlan(stage, count, 0, [PlanRow("frozen base", 4 * count, "float32")], 0, 0, 0, bytes_each * count)


def plan_evaluate(config: PretrainedConfig, settings: Any, hardware: Hardware, policies: int) -> StagePlan:
    """Plan an evaluation: all models in fp32, one at a time; policies: trained ones, beside base and SFT."""
    model = shapes.build_causal(config, torch.float32)
    count, _ = shapes.count_parameters(model)
    length = settings.max_prompt_tokens + settings.max_response_tokens
    kv_bytes = kv_cache_bytes(config, settings.batch_prompts, length, torch.float32)
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    chunk = logits_chunk_tokens(model.get_output_embeddings(), META)
    memory = [PlanRow("frozen base", 4 * count, "float32, one model at a time"),
              PlanRow("keys and values", kv_bytes, f"{settings.batch_prompts} rows of {length} tokens"),
              PlanRow("logits at once", 4 * max(chunk, SAMPLER_LOGITS * settings.batch_prompts) * config.vocab_size,
                      "at most"),
              PlanRow("forward pass", MLP_TENSORS * 4 * FORWARD_TOKENS * width,
                      f"{FORWARD_TOKENS} tokens without gradients")]
    sweeps = len(settings.temperatures) * settings.temperature_prompts
    answers = settings.prompts * (policies + 4 + 2 * max(settings.best_of, default=0)) + sweeps * (policies + 1)
    tokens = int(answers * length * MEAN_LENGTH_SHARE)
    pair_tokens = int(settings.max_pairs * 2 * length * MEAN_LENGTH_SHARE)
    flops = PRODUCTS_PER_PARAMETER * count * (3 * tokens + 2 * pair_tokens)  # sampled, scored twice; pairs twice
    steps = -(-answers // settings.batch_prompts) * settings.max_response_tokens
    seconds = hardware._replace(devices=1).compute_seconds(flops) + hardware.read_seconds(
        steps * (4 * count + kv_bytes / 2))
    return StagePlan("evaluate", count, 0, memory, tokens + pair_tokens, flops, seconds, 0,
                     "on one card, at the card's bf16 rate: fp32 without TF32 is slower")


def _adapt(model, settings: Any, scorer: bool = False):
    """Return the model with what is trained requiring gradients."""
    if settings.tune == "full":
        return model.requires_grad_(True)
    model = lora.add_lora(model, precision="bf16", scorer=scorer, **vars(settings.lora))
    shapes.cast_unquantised(model, settings.precision)
    return model


def _build_policy(config: PretrainedConfig, settings: Any, reward_lora: Any) -> tuple[Policy, Mapping]:
    """Build the policy with its critic, and the models beside it by name."""
    dtype = shapes.weights_dtype(settings.precision)
    model = _adapt(shapes.build_causal(config, dtype), settings)
    critic = getattr(settings, "value_model", None)
    policy = Policy(model, settings.temperature, settings.precision,
                    gradient_checkpointing=settings.gradient_checkpointing, critic=critic is not None)
    if critic == "adapter":
        raise ValueError("the plan does not know value_model 'adapter' yet: plan with 'head'; its adapter is small")
    if critic == "model":
        policy.value_model = shapes.build_classifier(config, dtype).requires_grad_(True)
        policy.value_shares_policy = False
        policy.value_model.score.requires_grad_(False)
    return policy, {"reward model": shapes.build_classifier(config, dtype)}


def _full_trajectory(rows: int, prompt: int, response: int) -> Trajectory:
    statistics = [torch.zeros(rows, response, device=META) for _ in range(5)]
    logprobs, ref_logprobs, values, advantages, returns = statistics
    return Trajectory(logprobs, ref_logprobs, values, torch.ones(rows, response), [[0] * prompt] * rows,
                      [[0] * response] * rows, advantages, returns)


def _measure(model, settings: Any, step, has_gradients: bool, checkpointing_here: bool = True) -> StepCost:
    """Run a step of training on the meta device; its peak is without gradients that are there before."""
    if checkpointing_here:
        model.train()
        if settings.gradient_checkpointing:
            lora.unwrap_peft(model).activation_checkpointing_enable(
                activation_checkpointing_kwargs={"use_reentrant": False})
    if has_gradients:
        preset_gradients(model)
    cost = dry_run(step)
    if has_gradients:
        return cost
    return cost._replace(peak_bytes=max(0, cost.peak_bytes - gradient_bytes(model)))


def _training_memory(model, others: Mapping, settings: Any, optimizer: str, cost: StepCost, hardware: Hardware,
                     rollout: list[PlanRow] = ()) -> list[PlanRow]:
    """List the parts; of the step's activations and the rollout's caches, the smaller does not count to the peak."""
    dequantised = dequantised_bytes(model, settings.precision)
    recomputed = "recomputed by layer" if settings.gradient_checkpointing else "all stored"
    step = [PlanRow("activations, logits", cost.peak_bytes, recomputed),
            *([PlanRow("dequantised matrix", dequantised, "bfloat16")] if dequantised else [])]
    stored = stored_memory(model, others, precision=settings.precision, optimizer=optimizer,
                           sharded_over=hardware.devices if settings.sharding == "fsdp" else 1)
    larger, smaller = sorted([step, list(rollout)], key=lambda rows: -sum(row.bytes for row in rows))
    hidden = ", ".join(f"{row.name} {row.bytes / (1 << 30):.1f} GiB" for row in smaller)
    if hidden:
        larger[-1] = larger[-1]._replace(note=f"{larger[-1].note}; at other times: {hidden}")
    return stored + larger


def _merged_bytes(policy: Policy, settings: Any) -> int:
    """Return the bytes of the weights that sampling merges the adapter into: in fp32 only."""
    if settings.precision != "fp32" or settings.sharding == "fsdp":
        return 0
    return sum(layer.get_base_layer().weight.nbytes for layer in lora.adapted_layers(policy.model))


def _disk(model, optimizer: str, saves: int, keeps_best: bool, keep_checkpoints: int = KEEP_CHECKPOINTS) -> int:
    trained = [p for p in model.parameters() if p.requires_grad]
    return training_bytes(trained, optimizer=optimizer, saves=saves, keep_checkpoints=keep_checkpoints,
                          keeps_best=keeps_best)


def _select(kind: type, settings: Any) -> dict:
    """Return the settings that the dataclass `kind` has fields for."""
    return {field.name: getattr(settings, field.name) for field in fields(kind) if hasattr(settings, field.name)}
