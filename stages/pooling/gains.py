"""Read what a policy gains over SFT from evaluations, by held-out question."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from stages.evaluation.summary import BEST

SAMPLES = "samples.parquet"


def list_scores(evaluate: Path, policy: str) -> list[str]:
    """List the scores that an evaluation has of a policy and of SFT at their best: reward, gold, judge, ..."""
    names = parquet.read_schema(evaluate / SAMPLES).names
    ends = [f"_{writer}{BEST}" for writer in (policy, "sft")]
    scores = [name.removesuffix(ends[0]) for name in names if name.endswith(ends[0])]
    return [score for score in scores if f"{score}{ends[1]}" in names]


def read_gain(evaluate: Path, policy: str, score: str) -> np.ndarray:
    """Read a policy's score minus that of SFT, each at its best temperature, by question; NaN: does not apply."""
    table = parquet.read_table(evaluate / SAMPLES, columns=[f"{score}_{name}{BEST}" for name in (policy, "sft")])
    tuned, sft = (np.array(column.to_pylist(), float) for column in table.columns)
    return tuned - sft
