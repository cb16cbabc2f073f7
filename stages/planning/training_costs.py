"""Plan the trainings: a step by the formulas of steps.py, and the whole stage by how much there is to do.

A step has texts of full length: the peak is that of the worst step. The whole stage is counted with texts of the mean
length: see DataSize.
"""

import math
from typing import Any, NamedTuple

from stages.planning.data_size import MEAN_LENGTH_SHARE
from stages.planning.shapes import QUANTISED, Shape
from stages.planning.stage_plan import (
    PlanRow,
    Run,
    StagePlan,
    Tensors,
    disk_bytes,
    list_trained,
    list_weights,
    reads_reward_model,
    rollout_rows,
    shard,
)
from stages.planning.steps import FULL, LORA, Batch, StepCost, Training, step_cost

KEEP_CHECKPOINTS = 2  # of training/trainer.py
FOREACH_OPTIMIZERS = ("adam", "adamw")  # torch's step over all tensors at once has a copy of them in memory


class Work(NamedTuple):
    """What a training does: its rows in total, the tokens of each at most, and the share of them on average.

    batch: rows of an optimizer step. saves: checkpoints that are written, at most.
    """

    rows: int
    row_tokens: int
    length_share: float
    batch: int
    saves: int
    keeps_best: bool = True
    keep_checkpoints: int = KEEP_CHECKPOINTS


def plan_sft(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan supervised fine-tuning."""
    length, batch, tokens = settings.sequence_length_tokens, settings.batch_sequences, run.size.finetune_tokens
    if settings.max_steps is None and tokens is None:
        raise ValueError("sft.max_steps is null, and how much text there is is not known: give a dump, --pairs or "
                         "sft.max_steps")
    steps = settings.max_steps or max(1, int(tokens / length * settings.epochs / batch))
    work = Work(steps * batch, length, 1.0, batch, count_saves(settings, steps),
                settings.patience_evaluations is not None)
    return plan_blocks(stage, run, settings, work, settings.microbatch_sequences,
                       f"{steps:,} steps of {batch} x {length} tokens")


def plan_base(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan the base: its training from scratch, or the copy of a model that is there already."""
    if settings.model != "scratch":
        count = run.shape.count_parameters()
        return StagePlan(stage, count, 0, [], 0, 0, 0, 2 * count, "16-bit weights; the time is the network's")
    scratch, tokens = settings.scratch, run.size.finetune_tokens
    step_tokens = scratch.batch_sequences * scratch.sequence_length_tokens
    all_tokens = scratch.max_tokens if tokens is None else min(scratch.max_tokens, scratch.epochs * tokens)
    steps = max(1, int(all_tokens / step_tokens))
    work = Work(steps * scratch.batch_sequences, scratch.sequence_length_tokens, 1.0, scratch.batch_sequences,
                math.ceil(steps / (1 if settings.save_every_minutes else scratch.save_every_steps)), False)
    return plan_blocks(stage, run, scratch, work, scratch.batch_sequences,
                       f"at most {steps:,} steps of {step_tokens:,} tokens, from random weights")


def plan_blocks(stage: str, run: Run, settings: Any, work: Work, microbatch: int, assumption: str) -> StagePlan:
    """Plan language modelling on packed blocks: sft, expert_iteration, and a base from scratch."""
    rows, training = run.hardware.own_rows(microbatch, work.batch), Training.read(settings)
    batch = Batch.build(rows * work.row_tokens, work.row_tokens, rows, rows * (work.row_tokens - 1))
    return _plan_training(stage, run, training, settings, work, rows, step_cost(run.shape, training, batch), assumption)


def plan_pairwise(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan a reward model, a judge or DPO."""
    size, run = run.size, run._replace(shape=run.shape.cut(getattr(settings, "layers", None)))
    is_scorer, max_steps, length = stage != "dpo", getattr(settings, "max_steps", None), settings.max_length_tokens
    count = int(min(settings.train_pairs, size.reward_pairs or settings.train_pairs) * settings.epochs)
    count = max_steps * settings.batch_pairs if max_steps else count * getattr(settings, "members", 1)
    share = size.pair_tokens(length, settings.batching) / (2 * length)
    work = Work(count, 2 * length, share, settings.batch_pairs, count_saves(settings, count / settings.batch_pairs))
    rows, training = run.hardware.own_rows(settings.microbatch_pairs, settings.batch_pairs), Training.read(settings)
    cost = step_cost(run.shape, training, pair_batch(settings, rows, is_scorer))
    return _plan_training(stage, run, training, settings, work, rows, cost,
                          f"{'' if size.reward_pairs else 'at most '}{count:,} pairs; {size.describe_lengths()}",
                          is_scorer=is_scorer)


def pair_batch(settings: Any, rows: int, is_scorer: bool) -> Batch:
    """Return so many pairs of full length, with next to no question that their answers could share."""
    answers = 2 * rows * (settings.max_length_tokens - 1)
    has_logits = not is_scorer or bool(settings.language_model_weight)
    reads_all = has_logits or settings.pooling != "last"
    return Batch.build(rows + answers, settings.max_length_tokens, 2 * rows, answers * has_logits,
                       answers if reads_all else 2 * rows, shares_prompts=True)


def plan_ilql(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan ILQL; the reward split has about as many answers as pairs."""
    shape, pairs = run.shape, run.size.reward_pairs
    if settings.max_steps is None and pairs is None:
        raise ValueError("ilql.max_steps is null, and how many answers there are is not known: give --pairs or "
                         "ilql.max_steps")
    count = settings.max_steps * settings.batch_answers if settings.max_steps else int(pairs * settings.epochs)
    length, heads, wide = settings.max_length_tokens, 2 if settings.two_q_heads else 1, 2 * shape.width
    work = Work(count, length, MEAN_LENGTH_SHARE, settings.batch_answers,
                count_saves(settings, count / settings.batch_answers))
    rows, training = run.hardware.own_rows(settings.microbatch_answers, settings.batch_answers), Training.read(settings)
    batch = Batch.build(rows * length, length, rows, rows * (length - 1))
    cost = step_cost(shape, training, batch).with_q_heads(shape, batch, heads)
    q_heads = [Tensors(heads, wide, shape.width), Tensors(heads, shape.vocabulary, wide),
               Tensors(heads, 1, wide + shape.vocabulary)]
    own = [*q_heads, Tensors(1, wide, shape.width), Tensors(1, 1, 2 * wide + 1)]
    return _plan_training(stage, run, training, settings, work, rows, cost,
                          f"{count:,} answers of {MEAN_LENGTH_SHARE:.0%} of {length} tokens", own=own,
                          frozen_bytes=sum(tensors.bytes for tensors in q_heads))  # their targets


def plan_policy_gradient(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan PPO, RLOO or GRPO with the reward model beside the policy."""
    shape, hardware, size, reward, _ = run
    group, value_model = getattr(settings, "responses_per_prompt", 1), getattr(settings, "value_model", None)
    response, length = settings.max_response_tokens, settings.max_prompt_tokens + settings.max_response_tokens
    samples = settings.iterations * settings.rollout_prompts * group
    prompt_mean, response_mean = size.sample_tokens(settings.max_prompt_tokens, response)
    share = (prompt_mean + response_mean) / length
    work = Work(samples * settings.epochs, length, share, settings.minibatch_prompts * group,
                settings.iterations // (1 if settings.save_every_minutes else settings.save_every_iterations), True,
                settings.keep_checkpoints)
    rows, training = hardware.own_rows(settings.microbatch_prompts * group, work.batch), Training.read(settings)
    own, others, frozen_bytes = _list_models(shape, settings, reward, value_model)
    rollout = rollout_rows(shape, -(-settings.rollout_prompts // hardware.devices) * group, length, settings.precision,
                           True, settings.tune == LORA and settings.sharding == "none")
    plan = _plan_training(
        stage, run, training, settings, work, rows,
        policy_gradient_cost(shape, settings, rows, value_model, reward),
        f"{samples:,} responses; {size.describe_lengths()}; a decoding step reads all weights once", own=own,
        others=others, rollout=rollout, frozen_copy=settings.tune == FULL, frozen_bytes=frozen_bytes)
    scorers = (reward.members if reads_reward_model(settings) else 0) + (value_model in ("adapter", "model"))
    # Rollout, old and reference log-probabilities; rewards, values.
    computed = 3 * shape.count_parameters() + scorers * shape.cut(reward.layers).count_parameters()
    forward = 2 * computed * int(samples * (prompt_mean / group + response_mean))
    weights = sum(row.bytes for row in plan.memory if row.name in ("frozen base", "trained parameters"))
    read_bytes = settings.iterations * response * MEAN_LENGTH_SHARE * (weights + rollout[0].bytes * share)
    seconds = hardware.compute_seconds(forward, settings.precision) + hardware.read_seconds(read_bytes)
    return plan._replace(tokens=int(samples * length * share), flops=plan.flops + forward,
                         seconds=plan.seconds + seconds)


def policy_gradient_cost(shape: Shape, settings: Any, rows: int, value_model: str | None, reward: Any) -> StepCost:
    """Return the cost of an update on so many responses, their critic's included."""
    group = getattr(settings, "responses_per_prompt", 1)
    # Dropout is off, so that old, new and reference log-probabilities come from the same function.
    prompts, responses = rows // group * settings.max_prompt_tokens, rows * settings.max_response_tokens
    row_tokens = settings.max_prompt_tokens + settings.max_response_tokens
    batch = Batch.build(prompts + responses, row_tokens, rows, responses, shares_prompts=group > 1)
    cost = step_cost(shape, Training.read(settings)._replace(dropout=0.0), batch)
    if value_model not in ("adapter", "model"):
        return cost
    critic = _read_critic(settings, value_model, reward)
    return cost.followed_by(step_cost(shape, critic, batch._replace(logit_tokens=0)), 8 * shape.width * batch.tokens)


def _read_critic(settings: Any, value_model: str, reward: Any) -> Training:
    """Return the training of a critic that starts from the reward model, which has no dropout."""
    training = Training.read(settings, reward.lora)
    tune = LORA if value_model == "adapter" else FULL
    return training._replace(tune=tune, rank=reward.lora.r, targets=tuple(reward.lora.target_modules), dropout=0.0)


def _list_models(shape: Shape, settings: Any, reward: Any, value_model: str | None
                 ) -> tuple[list[Tensors], list[PlanRow], int]:
    """Return the critic's trained tensors, the reward models, and the bytes of those that share the policy's base."""
    own = [Tensors(1, 1, shape.width + 1)] if value_model else []
    adapter = Tensors(1, 1, shape.count_adapter(reward.lora.r, tuple(reward.lora.target_modules)))
    if value_model == "adapter":
        own.append(adapter)
    if value_model == "model":
        whole = Training(FULL, settings.precision)
        own += [tensors for tensors in list_trained(shape, whole, True) if tensors != Tensors(1, 1, shape.width)]
    if not reads_reward_model(settings):
        return own, [], 0
    if value_model == "adapter":
        return own, [], reward.members * adapter.bytes
    size = reward.members * shape.stored_bytes(settings.precision, True)
    return own, [PlanRow("reward model", size, settings.precision)], 0


def count_saves(settings: Any, steps: float) -> int:
    """Return the number of checkpoints, at most: by time, one may follow each step."""
    return math.ceil(steps / (1 if settings.save_every_minutes else settings.save_every_steps))


def _plan_training(stage: str, run: Run, training: Training, settings: Any, work: Work, rows: int, cost: StepCost,
                   assumption: str, *, is_scorer: bool = False, own: list[Tensors] = (),
                   others: list[PlanRow] = (), rollout: list[PlanRow] = (), frozen_copy: bool = False,
                   frozen_bytes: int = 0) -> StagePlan:
    """Plan a training; own: tensors beside the model's that are trained. others: models beside it.

    frozen_bytes: of further tensors that are not trained.
    """
    shape, hardware, optimizer = run.shape, run.hardware, getattr(settings, "optimizer", "adamw")
    trained = [*list_trained(shape, training, is_scorer), *own]
    weights = [*list_weights(shape, training, trained, optimizer, is_scorer, frozen_copy), *others]
    weights[0] = weights[0]._replace(bytes=weights[0].bytes + frozen_bytes)
    if getattr(settings, "sharding", "none") == "fsdp" and hardware.devices > 1:
        weights = shard(weights, shape, training, hardware.devices)
    update = PlanRow("optimizer step", weights[1].bytes if optimizer in FOREACH_OPTIMIZERS else 0,
                     "a copy of what is trained")
    phases = sorted([_list_step(training, cost, shape, weights), [update], list(rollout)],
                    key=lambda phase: -sum(row.bytes for row in phase))
    parameters = shape.count_parameters(is_scorer) + sum(tensors.count for tensors in own)
    parameters += shape.count_parameters() if frozen_copy else 0
    parameters += sum(tensors.count for tensors in trained[:len(trained) - len(own)]) if training.tune == LORA else 0
    flops = cost.flops / rows * work.rows * work.length_share
    return StagePlan(
        stage, parameters, sum(tensors.count for tensors in trained), [*weights, *phases[0]],
        int(work.rows * work.row_tokens * work.length_share), flops,
        hardware.compute_seconds(flops, settings.precision),
        disk_bytes(trained, optimizer, work.saves, work.keep_checkpoints, work.keeps_best), assumption,
        tuple(tuple(phase) for phase in phases[1:] if sum(row.bytes for row in phase)))


def _list_step(training: Training, cost: StepCost, shape: Shape, weights: list[PlanRow]) -> list[PlanRow]:
    """List what a step needs beside the weights. Activations contain the logits: they are computed a part at a time."""
    rows = [PlanRow("activations, logits", cost.peak_bytes,
                    "recomputed by layer" if training.recomputes else "all stored")]
    if training.precision == "mixed":
        rows.append(PlanRow("bf16 copies", sum(row.bytes for row in weights[:2]) // 2, "of weights, at most"))
    if training.precision in QUANTISED:
        largest = max(matrix.count for matrix in shape.matrices)
        rows.append(PlanRow("dequantised matrix", 2 * largest, "bfloat16"))
    return rows
