"""Plan the trainings: a step by the formulas of steps.py, and the whole stage by how much there is to do.

A step has texts of full length: the peak is that of the worst step. The whole stage is counted with texts of the mean
length: see DataSize.
"""

import math
from typing import Any, NamedTuple

from stages.planning.data_size import MEAN_LENGTH_SHARE
from stages.planning.shapes import QUANTISED, Shape
from stages.planning.stage_plan import Memory, Run, StagePlan, largest, reads_reward_model, rollout_memory
from stages.planning.steps import FP32, FULL, LORA, Batch, StepCost, Training, step_cost

KEEP_CHECKPOINTS = 2  # of training/checkpoint_plan.py
Q_HEADS = 2  # of offline_rl/model.py, whose import would load torch
FOREACH_OPTIMIZERS = ("adam", "adamw")  # torch's step over all tensors at once has a copy of them in memory


class Tensors(NamedTuple):
    """A number of trained tensors of one size, each a matrix; a vector has one row."""

    number: int
    rows: int
    columns: int
    item_bytes: int = FP32

    @property
    def count(self) -> int:
        """Return the number of parameters."""
        return self.number * self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Return the bytes of the weights."""
        return self.count * self.item_bytes

    def state_bytes(self, optimizer: str) -> int:
        """Return the bytes of the optimizer's state: two numbers a parameter; of adafactor, one a row and column."""
        if optimizer == "adafactor" and self.rows > 1:
            return FP32 * self.number * (self.rows + self.columns)
        return 2 * self.count if optimizer.endswith("8bit") else 2 * self.bytes


class Work(NamedTuple):
    """What a training does: its rows in total and of a forward pass, and the tokens of each at most.

    saves: checkpoints that are written, at most. length_share: of a row's tokens that it has on average.
    """

    rows: int
    rows_at_once: int
    row_tokens: int
    saves: int
    length_share: float = 1.0
    keeps_best: bool = True


def plan_sft(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan supervised fine-tuning."""
    length, batch, tokens = settings.sequence_length_tokens, settings.batch_sequences, run.size.finetune_tokens
    if settings.max_steps is None and tokens is None:
        raise ValueError("sft.max_steps is null, and how much text there is is not known: give a dump, --pairs or "
                         "sft.max_steps")
    steps = settings.max_steps or max(1, int(tokens / length * settings.epochs / batch))
    return plan_blocks(stage, run, settings, steps * batch, settings.microbatch_sequences, count_saves(settings, steps),
                       f"{steps:,} steps of {batch} x {length} tokens", settings.patience_evaluations is not None)


def plan_base(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan the base: its training from scratch, or the copy of a model that is there already."""
    if settings.model != "scratch":
        count = run.shape.count_parameters()
        return StagePlan(stage, count, 0, {}, 0, 0, 0, 2 * count, "16-bit weights; the time is the network's")
    scratch, batch, tokens = settings.scratch, settings.scratch.batch_sequences, run.size.finetune_tokens
    step_tokens = batch * scratch.sequence_length_tokens
    all_tokens = scratch.max_tokens if tokens is None else min(scratch.max_tokens, scratch.epochs * tokens)
    steps = max(1, int(all_tokens / step_tokens))
    saves = math.ceil(steps / (1 if settings.save_every_minutes else scratch.save_every_steps))
    return plan_blocks(stage, run, scratch, steps * batch, scratch.microbatch_sequences, saves,
                       f"at most {steps:,} steps of {step_tokens:,} tokens, from random weights")


def plan_blocks(stage: str, run: Run, settings: Any, blocks: int, rows: int, saves: int, assumption: str,
                keeps_best: bool = False) -> StagePlan:
    """Plan language modelling on packed blocks: sft, expert_iteration, and a base from scratch."""
    length = settings.sequence_length_tokens
    batch = Batch.build(rows * length, length, rows, rows * (length - 1))
    return _plan_training(stage, run, settings, Work(blocks, rows, length, saves, keeps_best=keeps_best),
                          step_cost(run.shape, Training.read(settings), batch), assumption)


def plan_pairwise(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan a reward model, a judge or DPO."""
    size, run = run.size, run._replace(shape=run.shape.cut(getattr(settings, "layers", None)))
    is_scorer, max_steps, length = stage != "dpo", getattr(settings, "max_steps", None), settings.max_length_tokens
    count = int(min(settings.train_pairs, size.reward_pairs or settings.train_pairs) * settings.epochs)
    count = max_steps * settings.batch_pairs if max_steps else count * getattr(settings, "members", 1)
    rows = settings.microbatch_pairs
    work = Work(count, rows, 2 * length, count_saves(settings, count / settings.batch_pairs),
                size.pair_tokens(length, settings.batching) / (2 * length))
    cost = step_cost(run.shape, Training.read(settings), pair_batch(settings, rows, is_scorer))
    return _plan_training(stage, run, settings, work, cost,
                          f"{'' if size.reward_pairs else 'at most '}{count:,} pairs; {size.describe_lengths()}",
                          is_scorer=is_scorer)


def pair_batch(settings: Any, rows: int, is_scorer: bool) -> Batch:
    """Return so many pairs of full length, with next to no question that their answers could share."""
    answers = 2 * rows * (settings.max_length_tokens - 1)
    has_logits = not is_scorer or bool(settings.language_model_weight)
    reads_all = has_logits or settings.pooling != "last"
    return Batch.build(rows + answers, settings.max_length_tokens, 2 * rows, answers * has_logits,
                       answers if reads_all else 2 * rows)


def plan_ilql(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan ILQL; the reward split has about as many answers as pairs.

    Its heads on the hidden states are perceptrons of twice the width, two or three of them with a vocabulary.
    """
    shape, width, pairs = run.shape, run.shape.width, run.size.reward_pairs
    if settings.max_steps is None and pairs is None:
        raise ValueError("ilql.max_steps is null, and how many answers there are is not known: give --pairs or "
                         "ilql.max_steps")
    count = settings.max_steps * settings.batch_answers if settings.max_steps else int(pairs * settings.epochs)
    length, heads = settings.max_length_tokens, Q_HEADS
    rows = settings.microbatch_answers
    batch = Batch.build(rows * length, length, rows, rows * (length - 1))
    cost, tokens = step_cost(shape, Training.read(settings), batch), batch.logit_tokens
    logits = FP32 * shape.vocabulary * (3 * tokens + 2 * width) + 47 * width * (tokens + width)
    flops = tokens * width * (heads * 16 * (width + shape.vocabulary) + 12 * width)
    q_heads = [Tensors(heads, 2 * width, width), Tensors(heads, shape.vocabulary, 2 * width),
               Tensors(heads, 1, 2 * width + shape.vocabulary)]
    return _plan_training(
        stage, run, settings,
        Work(count, rows, length, count_saves(settings, count / settings.batch_answers), MEAN_LENGTH_SHARE),
        cost._replace(logits=max(cost.logits, logits), flops=cost.flops + flops),
        f"{count:,} answers of {MEAN_LENGTH_SHARE:.0%} of {length} tokens",
        own=[*q_heads, Tensors(1, 2 * width, width), Tensors(1, 1, 4 * width + 1)],
        others={"target heads": sum(tensors.bytes for tensors in q_heads)})


def plan_policy_gradient(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan PPO, RLOO or GRPO with the reward model beside the policy."""
    shape, hardware, size, reward, _ = run
    group, value_model = settings.responses_per_prompt, getattr(settings, "value_model", None)
    response, length = settings.max_response_tokens, settings.max_prompt_tokens + settings.max_response_tokens
    samples = settings.iterations * settings.rollout_prompts * group
    prompt_mean, response_mean = size.sample_tokens(settings.max_prompt_tokens, response)
    share = (prompt_mean + response_mean) / length
    rows = settings.microbatch_prompts * group
    saves = settings.iterations // (1 if settings.save_every_minutes else settings.save_every_iterations)
    own, others = _list_models(shape, settings, reward, value_model)
    rollout = rollout_memory(shape, -(-settings.rollout_prompts // hardware.devices) * group, length,
                             settings.precision, True, settings.tune == LORA and settings.sharding == "none")
    plan = _plan_training(
        stage, run, settings, Work(samples * settings.epochs, rows, length, saves, share),
        policy_gradient_cost(shape, settings, rows, value_model, reward),
        f"{samples:,} responses; {size.describe_lengths()}; a decoding step reads all weights once",
        own=own, others=others, rollout=rollout)
    scorers = (reward.members if reads_reward_model(settings) else 0) + (value_model in ("adapter", "model"))
    # Rollout, old and reference log-probabilities; rewards, values.
    computed = 3 * shape.count_parameters() + scorers * shape.cut(reward.layers).count_parameters()
    forward = 2 * computed * int(samples * (prompt_mean / group + response_mean))
    weights = plan.memory["frozen base"] + plan.memory["trained parameters"]
    read_bytes = settings.iterations * response * MEAN_LENGTH_SHARE * (weights + rollout["keys and values"] * share)
    seconds = hardware.compute_seconds(forward, settings.precision) + hardware.read_seconds(read_bytes)
    return plan._replace(tokens=int(samples * length * share), flops=plan.flops + forward,
                         seconds=plan.seconds + seconds)


def policy_gradient_cost(shape: Shape, settings: Any, rows: int, value_model: str | None, reward: Any) -> StepCost:
    """Return the cost of an update on so many responses; a critic that is no head has its own pass after the policy's.

    A critic starts from the reward model, which has no dropout.
    """
    group = settings.responses_per_prompt
    # Dropout is off, so that old, new and reference log-probabilities come from the same function.
    prompts, responses = rows // group * settings.max_prompt_tokens, rows * settings.max_response_tokens
    row_tokens = settings.max_prompt_tokens + settings.max_response_tokens
    batch = Batch.build(prompts + responses, row_tokens, rows, responses, shares_prompts=group > 1)
    policy = step_cost(shape, Training.read(settings)._replace(dropout=0.0), batch)
    if value_model not in ("adapter", "model"):
        return policy
    tune, precision = (LORA, settings.precision) if value_model == "adapter" else (FULL, _critic_precision(settings))
    training = Training(tune, precision, reward.lora.r, targets=tuple(reward.lora.target_modules),
                        recomputes=settings.gradient_checkpointing)
    critic = step_cost(shape, training, batch._replace(logit_tokens=0))
    flops = policy.flops + critic.flops
    if settings.sharding == "none":
        return max(policy, critic, key=lambda cost: cost.peak_bytes)._replace(flops=flops)
    states = 8 * shape.width * batch.tokens  # of the policy, whose pass comes first and is in memory as well
    return policy._replace(backward=max(policy.backward, critic.peak_bytes + states), flops=flops)


def _list_models(shape: Shape, settings: Any, reward: Any, value_model: str | None
                 ) -> tuple[list[Tensors], Memory]:
    """Return the critic's trained tensors, and the reward models, which share the policy's base if the critic does."""
    own = [Tensors(1, 1, shape.width + 1)] if value_model else []
    adapter = Tensors(1, 1, shape.count_adapter(reward.lora.r, tuple(reward.lora.target_modules)))
    if value_model == "adapter":
        own.append(adapter)
    if value_model == "model":
        own += _list_trained(shape, Training(FULL, _critic_precision(settings)), True)
    if not reads_reward_model(settings):
        return own, {}
    if value_model == "adapter":
        return own, {"reward adapters": reward.members * adapter.bytes}
    return own, {"reward model": reward.members * shape.stored_bytes(settings.precision, True)}


def _critic_precision(settings: Any) -> str:
    """Return the precision of a critic of which all weights are trained: those of a bf16 policy's are in fp32."""
    return "mixed" if settings.precision == "bf16" else settings.precision


def count_saves(settings: Any, steps: float) -> int:
    """Return the number of checkpoints, at most: by time, one may follow each step."""
    return math.ceil(steps / (1 if settings.save_every_minutes else settings.save_every_steps))


def _list_trained(shape: Shape, training: Training, scorer: bool = False) -> list[Tensors]:
    """List the tensors that are trained; scorer: of a classifier, whose score head is trained, too."""
    head = [Tensors(1, 1, shape.width)] if scorer else []
    if training.tune == LORA:
        return head + [Tensors(shape.layers, *size) for matrix in training.adapted(shape)
                       for size in ((training.rank, matrix.inputs), (matrix.outputs, training.rank))]
    if training.tune != FULL:
        return head
    tables = [shape.embedding_weights] + [shape.output_weights] * bool(shape.output_weights and not scorer)
    others = shape.count_parameters() - shape.output_weights - shape.layers * shape.layer_weights - tables[0]
    sizes = [(shape.layers, matrix.outputs, matrix.inputs) for matrix in shape.matrices]
    sizes += [(1, size // shape.width, shape.width) for size in tables] + [(1, 1, others)]
    return [Tensors(*size, training.state_bytes) for size in sizes]


def _plan_training(stage: str, run: Run, settings: Any, work: Work, cost: StepCost, assumption: str, *,
                   is_scorer: bool = False, own: list[Tensors] = (), others: Memory | None = None,
                   rollout: Memory | None = None) -> StagePlan:
    """Plan a training; own: tensors beside the model's that are trained. others: models beside it.

    rollout: of a policy; one that is trained whole has a frozen copy, as the reference.
    """
    shape, hardware, training = run.shape, run.hardware, Training.read(settings)
    optimizer, has_reference = getattr(settings, "optimizer", "adamw"), bool(rollout) and training.tune == FULL
    trained = [*_list_trained(shape, training, is_scorer), *own]
    is_frozen, size = training.tune != FULL or has_reference, sum(tensors.bytes for tensors in trained)
    frozen = shape.stored_bytes(training.precision, is_scorer, training.tune == LORA) if is_frozen else 0
    state = sum(tensors.state_bytes(optimizer) for tensors in trained)
    weights = {"frozen base": frozen, "trained parameters": size, "gradients": size, "optimizer state": state,
               **(others or {})}
    if getattr(settings, "sharding", "none") == "fsdp" and hardware.devices > 1:
        weights = _shard(weights, shape, training, hardware.devices)
    copied = weights["trained parameters"] if optimizer in FOREACH_OPTIMIZERS else 0
    phase = largest(_step_memory(training, cost, shape, weights), rollout or {}, {"optimizer step": copied})
    parameters = shape.count_parameters(is_scorer) + shape.count_parameters() * has_reference
    parameters += sum(tensors.count for tensors in (trained if training.tune == LORA else own))
    flops = cost.flops / work.rows_at_once * work.rows * work.length_share
    stored = size * (1 + work.keeps_best)
    checkpoints = min(work.saves, KEEP_CHECKPOINTS + 1)
    return StagePlan(
        stage, parameters, sum(tensors.count for tensors in trained), weights | phase,
        int(work.rows * work.row_tokens * work.length_share), flops,
        hardware.compute_seconds(flops, settings.precision), checkpoints * (stored + state) + stored, assumption)


def _shard(weights: Memory, shape: Shape, training: Training, count: int) -> Memory:
    """Divide what is in the layers, adapters apart, by the number of processes; add the layers that are gathered."""
    layer_bytes = (shape.layer_weights + shape.layer_vectors) * training.state_bytes
    saved = shape.layers * layer_bytes * (count - 1) // count
    factors = {"frozen base": 1, "reward model": 1}
    if training.tune == FULL:  # gradients and state are split with the weights
        factors = {"trained parameters": 1, "gradients": 1, "reward model": 1,
                   "optimizer state": weights["optimizer state"] / weights["trained parameters"]}
    sharded = {name: size - int(saved * factors.get(name, 0)) for name, size in weights.items()}
    return sharded | {"gathered layers": 2 * layer_bytes}  # one at work, one on its way


def _step_memory(training: Training, cost: StepCost, shape: Shape, weights: Memory) -> Memory:
    """Return what a step needs beside the weights. Activations contain the logits, computed a part at a time."""
    memory = {"activations, logits": cost.peak_bytes}
    if training.precision == "mixed":  # of weights, at most
        memory["bf16 copies"] = (weights["frozen base"] + weights["trained parameters"]) // 2
    if training.precision in QUANTISED:
        memory["dequantised matrix"] = 2 * max(matrix.count for matrix in shape.matrices)
    return memory
