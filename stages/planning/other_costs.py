"""Plan the stages that train nothing: the base, merges, evaluation and best-of-n; and expert iteration's rounds."""

from typing import Any

import torch
from transformers import PretrainedConfig

from stages.modeling.packed.token_logprobs import FORWARD_TOKENS, logits_chunk_tokens
from stages.planning import shapes, steps
from stages.planning.data_size import MEAN_LENGTH_SHARE, DataSize
from stages.planning.sampling_memory import Rollout, rollout_rows
from stages.planning.stage_plan import Hardware, StagePlan
from stages.planning.step_meter import StepMeter
from stages.planning.training_costs import PRODUCTS_PER_PARAMETER, plan_lm_rows
from stages.training.memory_estimate import PlanRow

MLP_TENSORS = 4  # of the MLP's width, in memory at once without gradients
SFT_ANSWERS = 4  # answers of base, SFT (sampled and greedy) and best policy to each prompt of an evaluation


def plan_download(config: PretrainedConfig) -> StagePlan:
    """Plan the stage base for a model that is there already: it is copied."""
    count = _parameters(config)
    return StagePlan("base", count, 0, [], 0, 0, 0, 2 * count, "16-bit weights; the time is the network's")


def plan_merge(stage: str, config: PretrainedConfig, settings: Any, scorer: bool = False) -> StagePlan:
    """Plan a merge: weights are merged tensor by tensor; its checks load the models, one at a time."""
    count = _parameters(config, scorer)
    size = count * shapes.weights_dtype(settings.check_precision).itemsize
    return StagePlan(stage, count, 0, [PlanRow("frozen base", size, settings.check_precision)], 0, 0, 0,
                     count * shapes.weights_dtype(settings.dtype).itemsize,
                     f"a model in {settings.check_precision} in the checks, one at a time; minutes of reading and "
                     f"writing")


def plan_evaluate(config: PretrainedConfig, settings: Any, hardware: Hardware, size: DataSize, policies: int = 1
                  ) -> StagePlan:
    """Plan an evaluation: all models in its precision, one at a time; policies: beside base and SFT."""
    precision = settings.precision
    dtype = shapes.weights_dtype(precision)
    count, length = _parameters(config), settings.max_prompt_tokens + settings.max_response_tokens
    rollout = Rollout(settings.batch_prompts, length, _states_precision(precision))
    memory = [PlanRow("frozen base", shapes.stored_bytes(config, precision), f"{precision}, one model at a time"),
              *rollout_rows(config, rollout), _forward_row(config, dtype)]
    sweeps = len(settings.temperatures) * settings.temperature_prompts
    answers = (settings.prompts * (policies + SFT_ANSWERS + 2 * max(settings.best_of, default=0))
               + sweeps * (policies + 1))
    tokens = int(answers * sum(size.sample_tokens(settings.max_prompt_tokens, settings.max_response_tokens)))
    pairs = min(settings.max_pairs, size.evaluation_pairs or settings.max_pairs)
    pair_tokens = int(pairs * size.pair_tokens(length, "question"))
    flops = PRODUCTS_PER_PARAMETER * count * (3 * tokens + 2 * pair_tokens)  # sampled, scored twice; pairs twice
    seconds = hardware._replace(devices=1).compute_seconds(flops, precision) + _decode_seconds(
        config, memory, answers, settings.batch_prompts, settings.max_response_tokens, hardware)
    return StagePlan("evaluate", count, 0, memory, tokens + pair_tokens, flops, seconds, 0,
                     f"{answers:,} answers and {pairs:,} pairs, on one card, at its bf16 rate"
                     + (": fp32 without TF32 is slower" if precision == "fp32" else ""))


def plan_best_of_n(config: PretrainedConfig, settings: Any, hardware: Hardware, questions: int | None,
                   members: int) -> StagePlan:
    """Plan best-of-n: the SFT model beside the reward models; questions: of the rl split, None if not known."""
    prompts = settings.prompts or questions
    memory = _sampling_memory(config, settings, hardware, members)
    samples = (prompts or 0) * settings.n
    tokens, flops, seconds = _sampling_work(config, settings, hardware, members, samples, memory)
    known = f"{samples:,} responses" if prompts else "how many prompts there are is not known: give --pairs"
    return StagePlan("best_of_n", _parameters(config), 0, memory, tokens, flops, seconds if prompts else None, 0, known)


def plan_expert_iteration(meter: StepMeter, settings: Any, hardware: Hardware, questions: int | None,
                          members: int) -> StagePlan:
    """Plan expert iteration: rounds of sampling, and of fine-tuning on one response to each prompt."""
    prompts = (settings.round_prompts or questions or 0) * settings.rounds
    memory = _sampling_memory(meter.config, settings, hardware, members)
    tokens, flops, seconds = _sampling_work(
        meter.config, settings, hardware, members, prompts * settings.n, memory)
    length = (settings.max_prompt_tokens + settings.max_response_tokens) * MEAN_LENGTH_SHARE
    blocks = max(1, int(prompts * settings.epochs * length / settings.sequence_length_tokens))
    tuning = plan_lm_rows("expert_iteration", meter, settings, hardware, blocks)
    known = f"{prompts:,} prompts in {settings.rounds} rounds" if prompts else (
        "how many prompts there are is not known: give --pairs")
    larger, smaller = sorted([tuning.memory, memory], key=lambda rows: -sum(row.bytes for row in rows))
    return tuning._replace(
        memory=larger, other_times=(tuple(smaller),), tokens=tuning.tokens + tokens, flops=tuning.flops + flops,
        seconds=tuning.seconds + seconds if prompts else None, assumption=known)


def _sampling_memory(config: PretrainedConfig, settings: Any, hardware: Hardware, members: int) -> list[PlanRow]:
    rows = -(-settings.batch_prompts // hardware.devices) * settings.n
    length = settings.max_prompt_tokens + settings.max_response_tokens
    stored = shapes.stored_bytes(config, settings.precision)
    memory = [PlanRow("frozen base", stored, settings.precision)]
    if steps.reads_reward_model(settings):
        memory.append(PlanRow("reward model", members * stored, "at most"))
    return [*memory, *rollout_rows(config, Rollout(rows, length, _states_precision(settings.precision))),
            _forward_row(config, shapes.weights_dtype(settings.precision))]


def _sampling_work(config: PretrainedConfig, settings: Any, hardware: Hardware, members: int, samples: int,
                   memory: list[PlanRow]) -> tuple[int, float, float]:
    """Return tokens, operations and seconds of sampling and scoring so many responses."""
    length = settings.max_prompt_tokens + settings.max_response_tokens
    tokens = int(samples * length * MEAN_LENGTH_SHARE)
    flops = PRODUCTS_PER_PARAMETER * _parameters(config) * tokens * (1 + members)
    return tokens, flops, hardware.compute_seconds(flops, settings.precision) + _decode_seconds(
        config, memory, -(-samples // hardware.devices), settings.batch_prompts * settings.n,
        settings.max_response_tokens, hardware)


def _decode_seconds(config: PretrainedConfig, memory: list[PlanRow], answers: int, batch: int, response: int,
                    hardware: Hardware) -> float:
    """Return the seconds in which a card reads weights, and half of all keys and values, at every decoding step."""
    weights, kv_bytes = memory[0].bytes, next(row.bytes for row in memory if row.name == "keys and values")
    decoding_steps = -(-answers // batch) * response
    return hardware.read_seconds(decoding_steps * (weights + kv_bytes / 2))


def _forward_row(config: PretrainedConfig, dtype: torch.dtype) -> PlanRow:
    """Return the memory of a forward pass without gradients: the MLP's tensors, or the logits at once if larger."""
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    head = shapes.build_causal(config, dtype).get_output_embeddings()
    logits = 4 * logits_chunk_tokens(head, shapes.META) * config.vocab_size
    return PlanRow("forward pass", max(MLP_TENSORS * dtype.itemsize * FORWARD_TOKENS * width, logits),
                   f"{FORWARD_TOKENS} tokens without gradients")


def _parameters(config: PretrainedConfig, scorer: bool = False) -> int:
    model = (shapes.build_classifier if scorer else shapes.build_causal)(config, torch.bfloat16)
    return shapes.count_parameters(model)[0]


def _states_precision(precision: str) -> str:
    """Return the precision of hidden states, keys and values: without an adapter, quantised weights leave bf16."""
    return "bf16" if precision in shapes.QUANTISED else precision
