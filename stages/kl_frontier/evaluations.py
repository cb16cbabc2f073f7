"""Read finished evaluations of the same policies: gains over SFT, KL, and the training of each policy.

Shapes: M questions, those of all seeds one after the other.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from stages.artifacts.artifact import digest, read_manifest
from stages.artifacts.manifest import list_input_sources
from stages.evaluation.summary import BEST_OF_N

MEASURES = ("gold", "judge", "reward")  # the first that is known is the truth, or what comes nearest to it
NOT_SHOWN = ("sft", "base")
TABLE = "per_question.parquet"


@dataclass(frozen=True)
class Evaluations:
    """Evaluations of the same policies, one a seed.

    seeds: names. questions: (site, qid) of each, by seed. gains: by measure and policy [M], minus SFT's; NaN where a
    score does not apply. kl: by policy [M], nats a response; of best-of-n by formula. sft: SFT's mean by measure.
    metrics: the metrics.json of each seed.
    """

    seeds: list[str]
    questions: list[list[tuple]]
    gains: dict[str, dict[str, np.ndarray]]
    kl: dict[str, np.ndarray]
    sft: dict[str, float]
    metrics: list[dict]


def read_evaluations(folders: list[Path]) -> Evaluations:
    """Read evaluations; ValueError, in one line, for one of an older version or of other policies than the first."""
    seeds = _name_seeds(folders)
    metrics = [json.loads((folder / "metrics.json").read_text(encoding="utf-8")) for folder in folders]
    tables = [_read_scores(folder, own) for folder, own in zip(folders, metrics, strict=True)]
    policies = [[name for name in table if name not in NOT_SHOWN] for table in tables]
    measures = [[name for name in MEASURES if name in table["sft"] and table["sft"][name].notna().any()]
                for table in tables]
    temperatures = [[own["policies"]["sft"]["temperature"]] for own in metrics]
    for what, (first, *others) in (("policies", policies), ("scores", measures), ("temperature", temperatures)):
        for seed, other in zip(seeds[1:], others, strict=True):
            if differing := ", ".join(map(str, sorted(set(first) ^ set(other)))):
                raise ValueError(f"--evaluate: {seeds[0]} and {seed} have other {what} ({differing}): seeds are pooled "
                                 f"over the same ones")

    def join(policy: str, score: str) -> np.ndarray:
        return np.concatenate([table[policy][score].to_numpy(float) for table in tables])

    return Evaluations(
        seeds, [list(zip(table["sft"]["site"], table["sft"]["qid"], strict=True)) for table in tables],
        {measure: {name: join(name, measure) - join("sft", measure) for name in policies[0]}
         for measure in measures[0]},
        {name: join(name, "kl_k1") for name in policies[0]},
        {measure: float(np.mean([table["sft"][measure].mean() for table in tables])) for measure in measures[0]},
        metrics)


def _read_scores(folder: Path, metrics: dict) -> dict[str, pd.DataFrame]:
    """Read the scores of each policy, a row a question, with the KL of best-of-n by formula."""
    if not (folder / TABLE).is_file():
        raise ValueError(f"{folder} has no {TABLE}: it was made by an older version. Make it again with --force")
    scores = dict(iter(pd.read_parquet(folder / TABLE).groupby("policy", sort=False)))
    return scores | {name: rows.assign(kl_k1=metrics["policies"][name]["kl_formula"])
                     for name, rows in scores.items() if BEST_OF_N.fullmatch(name)}


def _name_seeds(folders: list[Path]) -> list[str]:
    """Name each evaluation by the seed of its settings or, where these are the same, by its folder."""
    seeds = [str(read_manifest(folder)["config"].get("seed")) for folder in folders]
    return seeds if len(set(seeds)) == len(seeds) else [str(folder) for folder in folders]


def find_trainings(folders: Iterable[Path], evaluations: Iterable[Path]) -> list[dict[str, Path]]:
    """Return the folder of each model's training, by policy and for 'sft' and 'reward', of each evaluation.

    Models are matched by digest, through a merge to its last adapter; one whose training is not given is absent.

    Args:
        folders: trainings and merges, in any order.
    """
    by_digest = {digest(folder): folder for folder in folders}

    def find(source: dict) -> Path | None:
        folder = by_digest.get(source.get("sha256"))
        manifest = read_manifest(folder) if folder else {}
        if manifest.get("stage") != "merge":
            return folder
        sources = list_input_sources(manifest["inputs"])
        return find([source for name, source in sources.items() if name.startswith("adapter")][-1])

    inputs = [list_input_sources(read_manifest(folder)["inputs"]) for folder in evaluations]
    return [{name.removeprefix("policy."): folder for name, source in sources.items() if (folder := find(source))}
            for sources in inputs]
