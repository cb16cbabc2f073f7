"""Plan the stages that train nothing: the base, merges, evaluation and best-of-n; and expert iteration's rounds."""

from typing import Any

from stages.planning import training_costs
from stages.planning.data_size import MEAN_LENGTH_SHARE
from stages.planning.hardware import Hardware
from stages.planning.stage_plan import Memory, Run, StagePlan, reads_reward_model, rollout_memory
from stages.planning.steps import Batch, forward_bytes

ITEM_BYTES = {"fp32": 4, "bf16": 2}
FORWARD_TOKENS = 8192  # in one forward pass (modeling/packed/forward.py)
MERGE_TEXTS, MERGE_TEXT_TOKENS = 64, 2048  # that a merge is evaluated on, and their limit (stages/merge.py)
SAMPLED_AT_ONCE, SAMPLES_PER_QUESTION = 16, 2.5  # two, and for a quarter as many held-out questions (sampled_pairs.py)
SFT_ANSWERS = 4  # answers of base, SFT (sampled and greedy) and best policy to each prompt of an evaluation


def plan_stage(name: str, run: Run, settings: Any) -> StagePlan:
    """Plan a stage by its name; settings: its section of the recipe."""
    if name.endswith("-merged"):
        return plan_merge(name, run, settings)
    planners = {"base": training_costs.plan_base, "sft": training_costs.plan_sft, "dpo": training_costs.plan_pairwise,
                "ilql": training_costs.plan_ilql, "reward": plan_reward, "judge": plan_reward,
                "best_of_n": plan_best_of_n, "expert_iteration": plan_expert_iteration, "evaluate": plan_evaluate}
    return planners.get(name, training_costs.plan_policy_gradient)(name, run, settings)


def plan_reward(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan a reward model or a judge: its training, and the samples that are drawn before it."""
    plan, shape, hardware = training_costs.plan_pairwise(stage, run, settings), run.shape, run.hardware
    if not settings.sampled_questions:
        return plan
    precision, response = settings.precision, settings.max_sampled_tokens
    memory = {"frozen base": shape.stored_bytes(precision),
              **rollout_memory(shape, SAMPLED_AT_ONCE, settings.max_length_tokens, precision)}
    answers = int(SAMPLES_PER_QUESTION * settings.sampled_questions)
    tokens = int(answers * sum(run.size.sample_tokens(settings.max_length_tokens, response)))
    flops = 2 * shape.count_parameters() * tokens
    seconds = hardware.compute_seconds(flops, precision) + _decode_seconds(
        memory, -(-answers // hardware.devices), SAMPLED_AT_ONCE, response, hardware)
    return plan.after(memory, tokens, flops, seconds)._replace(
        assumption=f"{plan.assumption}; at most {answers:,} samples")


def plan_merge(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan a merge: weights are merged tensor by tensor; its checks load the models, one at a time, and evaluate the
    adapter and the merged model.
    """
    is_reward = stage.startswith(("reward", "judge"))
    count = run.shape.cut(run.reward.layers if is_reward else None).count_parameters(scorer=is_reward)
    size = count * ITEM_BYTES[settings.check_precision]
    text_tokens = (run.size.pair_tokens(MERGE_TEXT_TOKENS, "question") if is_reward else
                   sum(run.size.sample_tokens(MERGE_TEXT_TOKENS, MERGE_TEXT_TOKENS)))
    tokens = int(2 * MERGE_TEXTS * text_tokens)
    flops = 2 * count * tokens
    seconds = run.hardware._replace(devices=1).compute_seconds(flops, settings.check_precision)
    return StagePlan(stage, count, 0, {"frozen base": size}, tokens, flops, seconds,
                     count * ITEM_BYTES[settings.dtype], f"a model in {settings.check_precision} in the checks, one at "
                     f"a time; reading and writing come on top")


def plan_evaluate(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan an evaluation on one card: all models in its precision, one at a time."""
    shape, hardware, size, _, policies = run._replace(hardware=run.hardware._replace(devices=1))
    precision, length = settings.precision, settings.max_prompt_tokens + settings.max_response_tokens
    memory = _sampling_memory(run, settings, settings.batch_prompts)
    sweeps = len(settings.temperatures) * settings.temperature_prompts
    answers = (settings.prompts * (policies + SFT_ANSWERS + 2 * max(settings.best_of, default=0))
               + sweeps * (policies + 1))
    answer_tokens = sum(size.sample_tokens(settings.max_prompt_tokens, settings.max_response_tokens))
    tokens = int(answers * answer_tokens)
    pairs = min(settings.max_pairs, size.evaluation_pairs or settings.max_pairs)
    pair_tokens = int(pairs * size.pair_tokens(length, "question"))
    scorer = shape.cut(run.reward.layers).count_parameters()
    # Answers: sampled, and scored by two models. Pairs: scored by one, and their likelihood under SFT.
    flops = 2 * shape.count_parameters() * (tokens + pair_tokens) + 2 * scorer * (2 * tokens + pair_tokens)
    seconds = hardware.compute_seconds(flops, precision) + _decode_seconds(
        memory, answers, settings.batch_prompts, settings.max_response_tokens, hardware, answer_tokens / length)
    return StagePlan(stage, shape.count_parameters(), 0, memory, tokens + pair_tokens, flops, seconds, 0,
                     f"{answers:,} answers and {pairs:,} pairs, on one card, at its bf16 rate"
                     + (": fp32 without TF32 is slower" if precision == "fp32" else ""))


def plan_best_of_n(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan best-of-n: the SFT model beside the reward models."""
    prompts = settings.prompts or run.size.rl_questions or 0
    memory, tokens, flops, seconds = _plan_sampling(run, settings, prompts * settings.n)
    return _if_known(prompts, StagePlan(stage, run.shape.count_parameters(), 0, memory, tokens, flops, seconds, 0,
                                        f"{prompts * settings.n:,} responses"))


def plan_expert_iteration(stage: str, run: Run, settings: Any) -> StagePlan:
    """Plan expert iteration: rounds of sampling, and of fine-tuning on one response to each prompt, or all draws."""
    prompts = (settings.round_prompts or run.size.rl_questions or 0) * settings.rounds
    length = (settings.max_prompt_tokens + settings.max_response_tokens) * MEAN_LENGTH_SHARE
    documents = prompts * (settings.keep_draws or 1)
    blocks = max(1, int(documents * settings.epochs * length / settings.sequence_length_tokens))
    saves = training_costs.count_saves(settings, blocks / settings.batch_sequences)
    tuning = training_costs.plan_blocks(stage, run, settings, blocks, settings.microbatch_sequences, saves,
                                        f"{prompts:,} prompts in {settings.rounds} rounds")
    return _if_known(prompts, tuning.after(*_plan_sampling(run, settings, prompts * settings.n)))


def _if_known(prompts: int, plan: StagePlan) -> StagePlan:
    """Return the plan of a stage on so many prompts, without seconds if their number is not known."""
    return plan if prompts else plan._replace(
        seconds=None, assumption="how many prompts there are is not known: give --pairs")


def _plan_sampling(run: Run, settings: Any, samples: int) -> tuple[Memory, int, float, float]:
    """Return the memory, tokens, operations and seconds of sampling so many responses, n to a prompt, and scoring them.
    """
    hardware, members, n = run.hardware, run.reward.members, settings.n
    rows = -(-settings.batch_prompts // hardware.devices) * n
    memory = _sampling_memory(run, settings, rows, members if reads_reward_model(settings) else 0)
    tokens = int(samples * (settings.max_prompt_tokens + settings.max_response_tokens) * MEAN_LENGTH_SHARE)
    flops = 2 * run.shape.count_parameters() * tokens * (1 + members)
    seconds = hardware.compute_seconds(flops, settings.precision) + _decode_seconds(
        memory, -(-samples // hardware.devices), settings.batch_prompts * n, settings.max_response_tokens, hardware)
    return memory, tokens, flops, seconds


def _sampling_memory(run: Run, settings: Any, rows: int, scorers: int = 0) -> Memory:
    """Return the memory of sampling so many responses at once, beside the reward models that score them."""
    shape, precision, stored = run.shape, settings.precision, run.shape.stored_bytes(settings.precision)
    batch = Batch.build(FORWARD_TOKENS, FORWARD_TOKENS, 1, FORWARD_TOKENS)
    state_bytes = 4 if precision in ("fp32", "mixed") else 2
    return {"frozen base": stored, **({"reward model": scorers * stored} if scorers else {}),
            **rollout_memory(shape, rows, settings.max_prompt_tokens + settings.max_response_tokens, precision),
            "forward pass": forward_bytes(shape, state_bytes, batch)}


def _decode_seconds(memory: Memory, answers: int, batch: int, response: int, hardware: Hardware,
                    kv_share: float = MEAN_LENGTH_SHARE) -> float:
    """Return the seconds in which a card reads weights, and a share of all keys and values, at every decoding step."""
    step_bytes = memory["frozen base"] + memory["keys and values"] * kv_share
    return hardware.read_seconds(-(-answers // batch) * response * step_bytes)
