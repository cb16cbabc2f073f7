"""Plan the trainings: one step of each stage's own code is measured, and the whole stage is counted.

A step has texts of full length: the peak is that of the worst step. The whole stage is counted with texts of the mean
length: see DataSize.
"""

from functools import partial
from typing import Any, NamedTuple

from stages.planning import shapes, steps
from stages.planning.data_size import MEAN_LENGTH_SHARE, DataSize
from stages.planning.dry_run import StepCost
from stages.planning.sampling_memory import Rollout, rollout_rows
from stages.planning.stage_plan import Hardware, StagePlan
from stages.planning.step_meter import BuildStep, StepMeter, TrainedModel
from stages.training.disk_plan import checkpoint_interval, count_saves, training_bytes
from stages.training.memory_estimate import PlanRow
from stages.training.trainer import KEEP_CHECKPOINTS

PRODUCTS_PER_PARAMETER = 2  # floating-point operations of a forward pass for each parameter and token
FOREACH_OPTIMIZERS = ("adam", "adamw")  # torch's step over all tensors at once has a copy of them in memory


class Work(NamedTuple):
    """What a training does: its rows in total, the tokens of each at most, and the share of them on average.

    batch: rows of an optimizer step. saves: checkpoints that are written, at most: by time, one may follow each step.
    """

    rows: int
    row_tokens: int
    length_share: float
    batch: int
    saves: int
    keeps_best: bool = True
    keep_checkpoints: int = KEEP_CHECKPOINTS


def plan_sft(meter: StepMeter, settings: Any, hardware: Hardware, tokens: int | None) -> StagePlan:
    """Plan supervised fine-tuning; tokens: of the text, None if not known."""
    length, batch = settings.sequence_length_tokens, settings.batch_sequences
    if settings.max_steps is None and tokens is None:
        raise ValueError("sft.max_steps is null, and how much text there is is not known: give a dump, --pairs or "
                         "sft.max_steps")
    optimizer_steps = settings.max_steps or max(1, int(tokens / length * settings.epochs / batch))
    work = Work(optimizer_steps * batch, length, 1.0, batch,
                _count_saves(settings, optimizer_steps),
                settings.patience_evaluations is not None)
    return _plan_training("sft", steps.lm_step, meter, settings, hardware, work, settings.microbatch_sequences,
                          f"{optimizer_steps:,} steps of {batch} x {length} tokens")


def plan_lm_rows(stage: str, meter: StepMeter, settings: Any, hardware: Hardware, blocks: int) -> StagePlan:
    """Plan the fine-tuning on so many blocks of expert iteration."""
    work = Work(blocks, settings.sequence_length_tokens, 1.0, settings.batch_sequences,
                _count_saves(settings, blocks / settings.batch_sequences), False)
    return _plan_training(stage, steps.lm_step, meter, settings, hardware, work, settings.microbatch_sequences, "")


def plan_scratch(meter: StepMeter, settings: Any, hardware: Hardware, tokens: int | None,
                 save_every_minutes: float | None) -> StagePlan:
    """Plan the training of a base from scratch; tokens: of the site's text, None if not known.

    settings: the section base.scratch. save_every_minutes: of the section base.
    """
    step_tokens = settings.batch_sequences * settings.sequence_length_tokens
    all_tokens = settings.max_tokens if tokens is None else min(settings.max_tokens, settings.epochs * tokens)
    optimizer_steps = max(1, int(all_tokens / step_tokens))
    work = Work(optimizer_steps * settings.batch_sequences, settings.sequence_length_tokens, 1.0,
                settings.batch_sequences, _count_saves(settings, optimizer_steps, save_every_minutes), False)
    return _plan_training("base", steps.lm_step, meter, settings, hardware, work, settings.batch_sequences,
                          f"at most {optimizer_steps:,} steps of {step_tokens:,} tokens, from random weights")


def plan_pairwise(stage: str, meter: StepMeter, settings: Any, hardware: Hardware, size: DataSize) -> StagePlan:
    """Plan a reward model, a judge or DPO."""
    pairs = size.reward_pairs
    count = int(min(settings.train_pairs, pairs or settings.train_pairs) * settings.epochs)
    max_steps = getattr(settings, "max_steps", None)
    count = max_steps * settings.batch_pairs if max_steps else count * getattr(settings, "members", 1)
    length = 2 * settings.max_length_tokens
    share = size.pair_tokens(settings.max_length_tokens, settings.batching) / length
    work = Work(count, length, share, settings.batch_pairs,
                _count_saves(settings, count / settings.batch_pairs))
    build = steps.dpo_step if stage == "dpo" else steps.reward_step
    known = "" if pairs else "at most "
    return _plan_training(stage, build, meter, settings, hardware, work, settings.microbatch_pairs,
                          f"{known}{count:,} pairs; {size.describe_lengths()}")


def plan_ilql(meter: StepMeter, settings: Any, hardware: Hardware, pairs: int | None) -> StagePlan:
    """Plan ILQL; pairs: of the reward split, about as many as answers."""
    if settings.max_steps is None and pairs is None:
        raise ValueError("ilql.max_steps is null, and how many answers there are is not known: give --pairs or "
                         "ilql.max_steps")
    count = settings.max_steps * settings.batch_answers if settings.max_steps else int(pairs * settings.epochs)
    work = Work(count, settings.max_length_tokens, MEAN_LENGTH_SHARE, settings.batch_answers,
                _count_saves(settings, count / settings.batch_answers))
    return _plan_training("ilql", steps.ilql_step, meter, settings, hardware, work, settings.microbatch_answers,
                          f"{count:,} answers of {MEAN_LENGTH_SHARE:.0%} of {settings.max_length_tokens} tokens")


def plan_policy_gradient(stage: str, meter: StepMeter, settings: Any, hardware: Hardware, reward: Any,
                         size: DataSize) -> StagePlan:
    """Plan PPO, RLOO or GRPO with the reward model beside the policy; reward: that model's section."""
    group, value_model = getattr(settings, "responses_per_prompt", 1), getattr(settings, "value_model", None)
    response, length = settings.max_response_tokens, settings.max_prompt_tokens + settings.max_response_tokens
    samples = settings.iterations * settings.rollout_prompts * group
    prompt_mean, response_mean = size.sample_tokens(settings.max_prompt_tokens, response)
    share = (prompt_mean + response_mean) / length
    build = partial(steps.policy_gradient_step, value_model=value_model, reward_lora=reward.lora,
                    members=reward.members)
    rollout = Rollout(-(-settings.rollout_prompts // hardware.devices) * group, length, settings.precision,
                      merges_adapter=settings.tune == "lora" and settings.sharding == "none")
    work = Work(samples * settings.epochs, length, share, settings.minibatch_prompts * group,
                settings.iterations // checkpoint_interval(settings.save_every_iterations,
                                                           settings.save_every_minutes),
                True, settings.keep_checkpoints)
    plan = _plan_training(
        stage, build, meter, settings, hardware, work, settings.microbatch_prompts * group,
        f"{samples:,} responses; {size.describe_lengths()}; a decoding step reads all weights once",
        rollout)
    models = 3 + (reward.members if steps.reads_reward_model(settings) else 0) + (
        value_model in ("adapter", "model"))  # rollout, old and reference log-probabilities; rewards; values
    base_parameters = shapes.count_parameters(shapes.build_causal(meter.config, shapes.weights_dtype("bf16")))[0]
    tokens = int(samples * length * share)
    computed = int(samples * (prompt_mean / group + response_mean))  # a prompt once
    forward = PRODUCTS_PER_PARAMETER * base_parameters * computed * models
    read_bytes = settings.iterations * response * MEAN_LENGTH_SHARE * (
        _weights_bytes(plan) + rollout_rows(meter.config, rollout)[0].bytes / 2)
    return plan._replace(tokens=tokens, flops=plan.flops + forward, seconds=plan.seconds + hardware.compute_seconds(
        forward, settings.precision) + hardware.read_seconds(read_bytes))


def _count_saves(settings: Any, optimizer_steps: float, save_every_minutes: float | None = None) -> int:
    """Return the number of checkpoints, at most; save_every_minutes: where the section has none itself."""
    every_minutes = getattr(settings, "save_every_minutes", save_every_minutes)
    return count_saves(0, 1, 1, optimizer_steps, checkpoint_interval(settings.save_every_steps, every_minutes))


def _plan_training(stage: str, build: BuildStep, meter: StepMeter, settings: Any, hardware: Hardware, work: Work,
                   microbatch: int, assumption: str, rollout: Rollout | None = None) -> StagePlan:
    rows = hardware.own_rows(microbatch, work.batch)
    cost = meter.measure(stage, build, settings, rows)
    optimizer = getattr(settings, "optimizer", "adamw")
    model = meter.describe(stage, build, settings, optimizer, hardware.devices)
    phases = [_step_rows(settings, cost, model), _optimizer_rows(optimizer, model)]
    if rollout:
        phases.append(rollout_rows(meter.config, rollout))
    phases.sort(key=lambda phase: -sum(row.bytes for row in phase))
    flops = cost.flops / rows * work.rows * work.length_share
    disk = training_bytes(model.trained, optimizer=optimizer, saves=work.saves,
                          keep_checkpoints=work.keep_checkpoints, keeps_best=work.keeps_best)
    return StagePlan(
        stage, model.parameters, sum(p.numel() for p in model.trained), [*model.rows, *phases[0]],
        int(work.rows * work.row_tokens * work.length_share), flops,
        hardware.compute_seconds(flops, settings.precision), disk, assumption,
        tuple(tuple(phase) for phase in phases[1:] if sum(row.bytes for row in phase)))


def _step_rows(settings: Any, cost: StepCost, model: TrainedModel) -> list[PlanRow]:
    """List what a step needs beside the weights. Activations contain the logits: they are computed a part at a time."""
    recomputed = getattr(settings, "gradient_checkpointing", False)
    rows = [PlanRow("activations, logits", cost.peak_bytes, "recomputed by layer" if recomputed else "all stored")]
    if settings.precision == "mixed":
        rows.append(PlanRow("bf16 copies", sum(row.bytes for row in model.rows[:2]) // 2, "of weights, at most"))
    if model.dequantised_bytes:
        rows.append(PlanRow("dequantised matrix", model.dequantised_bytes, "bfloat16"))
    return rows


def _optimizer_rows(optimizer: str, model: TrainedModel) -> list[PlanRow]:
    """List what the optimizer's step needs beside its state."""
    size = sum(p.nbytes for p in model.trained) if optimizer in FOREACH_OPTIMIZERS else 0
    return [PlanRow("optimizer step", size, "a copy of what is trained")]


def _weights_bytes(plan: StagePlan) -> int:
    """Return the bytes of the policy's weights."""
    return sum(row.bytes for row in plan.memory if row.name in ("frozen base", "trained parameters"))
