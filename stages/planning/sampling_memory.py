"""Memory of sampling: keys and values, and logits."""

from typing import NamedTuple

from transformers import PretrainedConfig

from stages.planning import shapes
from stages.training.memory_estimate import PlanRow, kv_cache_bytes

SAMPLER_LOGITS = 3  # copies of the fp32 logits of all rows in sampling: divided, softmax, sorted or drawn from


class Rollout(NamedTuple):
    """Rows that are sampled at once on one card, and the tokens of each at most, prompt and response."""

    rows: int
    row_tokens: int
    precision: str
    merges_adapter: bool = False


def rollout_rows(config: PretrainedConfig, rollout: Rollout) -> list[PlanRow]:
    """List the memory of sampling: keys and values first."""
    dtype = shapes.states_dtype(rollout.precision)
    kv_bytes = kv_cache_bytes(config, rollout.rows, rollout.row_tokens, dtype)
    rows = [PlanRow("keys and values", kv_bytes,
                    f"{rollout.rows} rows of {rollout.row_tokens} tokens, {str(dtype).removeprefix('torch.')}"),
            PlanRow("logits", SAMPLER_LOGITS * 4 * rollout.rows * config.vocab_size, "of one token a row")]
    if rollout.merges_adapter and rollout.precision == "fp32":  # other precisions are not merged (adapters.py)
        matrices = shapes.layer_bytes(config, dtype)
        rows.append(PlanRow("merged weights", matrices, "at most"))
    return rows
