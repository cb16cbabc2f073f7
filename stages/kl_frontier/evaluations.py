"""Read finished evaluations: the gain of each policy over SFT at each question, and its KL. Shapes: N questions."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from stages.pooling.hacking import compare_verdicts

MEASURES = ("gold", "judge", "reward")  # the first that is known is the truth, or what comes nearest to it
NOT_SHOWN = ("sft", "base")
TABLE = "per_question.parquet"


@dataclass(frozen=True)
class Evaluation:
    """One evaluation, of one seed.

    questions: (site, qid) of each. gains: by measure and policy [N], minus SFT's; NaN where a score does not apply.
    kl: of the policies that have one by question [N], nats a response. kl_bounds: of best-of-n, by formula.
    sft: SFT's mean by measure. temperature: that all policies were sampled at. judge_accuracy: an estimate or None.
    hacking: verdicts on the trained policies (pooling.hacking.compare_verdicts).
    """

    label: str
    questions: list[tuple]
    gains: dict[str, dict[str, np.ndarray]]
    kl: dict[str, np.ndarray]
    kl_bounds: dict[str, float]
    sft: dict[str, float]
    temperature: float
    judge_accuracy: dict | None
    hacking: dict[str, dict] = field(default_factory=dict)

    @property
    def policies(self) -> list[str]:
        """List the policies other than SFT and the base."""
        return [*self.kl, *self.kl_bounds]


def read_evaluation(folder: Path, label: str) -> Evaluation:
    """Read an evaluation's folder; ValueError, in one line, for one of an older version."""
    if not (folder / TABLE).is_file():
        raise ValueError(f"{folder} has no {TABLE}: it was made by an older version. Make it again with --force")
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    table = pd.read_parquet(folder / TABLE)
    by_policy = {name: rows.reset_index(drop=True) for name, rows in table.groupby("policy", sort=False)}
    sft = by_policy["sft"]
    shown = [name for name in by_policy if name not in NOT_SHOWN]
    bounds = {name: metrics["policies"][name]["kl_formula"] for name in shown if name.startswith("best_of_")}
    measures = [name for name in MEASURES if name in table and sft[name].notna().any()]
    return Evaluation(
        label, list(zip(sft["site"], sft["qid"], strict=True)),
        {measure: {name: (by_policy[name][measure] - sft[measure]).to_numpy(float) for name in shown}
         for measure in measures},
        {name: by_policy[name]["kl_k1"].to_numpy(float) for name in shown if name not in bounds}, bounds,
        {measure: float(sft[measure].mean()) for measure in measures}, metrics["policies"]["sft"]["temperature"],
        (metrics.get("judge") or {}).get("accuracy"),
        {name: compare_verdicts(metrics, name) for name in metrics["comparisons"]})


def check_same_policies(evaluations: Iterable[Evaluation]) -> None:
    """Raise ValueError, in one line, unless all evaluations have the same policies, measures and temperature."""
    first, *others = evaluations
    for other in others:
        for what, ours, theirs in (
                ("policies", first.policies, other.policies), ("scores", list(first.gains), list(other.gains)),
                ("temperature", [first.temperature], [other.temperature])):
            if set(ours) != set(theirs):
                differing = ", ".join(map(str, sorted(set(ours) ^ set(theirs))))
                raise ValueError(f"--evaluate: {first.label} and {other.label} have other {what} ({differing}): "
                                 f"seeds are pooled over the same ones")
