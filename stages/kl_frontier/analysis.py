"""Read evaluations of the same policies, and compute the frontier: points, fits, gains at equal KL, differences.

Gains are minus SFT's at the same question. The truth is gold, else the judge's score, else nothing is known of it, and
the learnt reward stands in its place. Shapes: M questions, those of all seeds one after the other.
"""

import json
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from stages.artifacts.artifact import read_manifest
from stages.evaluation.summary import BEST_OF_N, samples_per_answer
from stages.kl_frontier import fits
from stages.pooling.pool import compare_verdicts, estimate_shares
from stages.pooling.statistics import QuestionPool, widen

BEST_OF_N_FAMILY = "best_of_n"
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


class FrontierAnalysis:
    """Evaluations of the same policies.

    Args:
        policies: those to compare by name, each with `family`, the policies of one algorithm, `label` and `mark`.
        family_labels: by family.
        samples, seed: of the bootstrap.
    """

    def __init__(self, evaluations: Evaluations, policies: dict[str, dict], family_labels: dict[str, str], *,
                 samples: int, seed: int):
        self.evaluations, self.family_labels = evaluations, family_labels
        self.measures = list(evaluations.gains)
        self.measure = self.measures[0]
        self.pool = QuestionPool(evaluations.questions, samples=samples, seed=seed)
        self.policies = {name: policy | self._estimate_point(name) for name, policy in policies.items()}
        self.distances = {name: policy["sqrt_kl"] for name, policy in self.policies.items() if policy["kl"]}
        self.families = self._sort_families()
        self.best = self._choose_best()

    def compute(self) -> dict:
        """Compute every number, as plain JSON values."""
        first = self.evaluations.metrics[0]
        return {
            "measure": self.measure, "temperature": first["policies"]["sft"]["temperature"],
            "judge_accuracy": (first.get("judge") or {}).get("accuracy"), "seeds": self.evaluations.seeds,
            "questions": len({question for of_seed in self.evaluations.questions for question in of_seed}),
            "sft": self.evaluations.sft, "families": self.family_labels, "policies": self.policies,
            "fits": {family: {measure: self._fit(family, measure) for measure in self.measures}
                     for family in self.families},
            "optimum": _average_curves([metrics.get("attainable") for metrics in self.evaluations.metrics]),
            "equal_kl": self._compare_at_equal_kl(), "best": self.best, "best_differences": self._compare_best(),
            "hacking": self._pool_verdicts()}

    def seed_means(self, name: str) -> dict[str, list[float | None]]:
        """Return a policy's mean KL and gains in each seed."""
        return {"kl_nats": self.pool.seed_means(self.evaluations.kl[name]), **{
            f"{measure}_minus_sft": self.pool.seed_means(gains[name])
            for measure, gains in self.evaluations.gains.items()}}

    def _estimate_point(self, name: str) -> dict:
        kl, is_bound = self.evaluations.kl[name], bool(BEST_OF_N.fullmatch(name))
        estimate = {"mean": float(kl[0]), "low": None, "high": None} if is_bound else self.pool.estimate(kl)
        return {"kl": estimate, "sqrt_kl": max(estimate["mean"], 0.0) ** 0.5 if estimate else None,
                "kl_is_bound": is_bound,
                "gains": {measure: self._estimate(measure, {name: 1.0}) for measure in self.measures},
                "samples_per_answer": samples_per_answer(name)}

    def _estimate(self, measure: str, weights: dict[str, float]) -> dict | None:
        """Estimate a weighted sum of policies' gains at the same questions."""
        gains = self.evaluations.gains[measure]
        return self.pool.estimate(sum(
            (weight * gains[name] for name, weight in weights.items()), np.zeros(len(self.pool.groups))))

    def _sort_families(self) -> dict[str, list[str]]:
        """Return the policies of each family that have a KL, by rising KL."""
        families: dict[str, list[str]] = {policy["family"]: [] for policy in self.policies.values()}
        for name in sorted(self.distances, key=self.distances.get):
            families[self.policies[name]["family"]].append(name)
        return {family: names for family, names in families.items() if names}

    def _choose_best(self) -> dict[str, str]:
        """Choose the policy of the highest truth of each family: by the questions that it is then compared on."""
        truth = {name: gain["mean"] for name in self.distances if (gain := self.policies[name]["gains"][self.measure])}
        known = {family: [name for name in names if name in truth] for family, names in self.families.items()}
        best = {family: max(names, key=truth.get) for family, names in known.items() if names}
        return dict(sorted(best.items(), key=lambda item: -truth[item[1]]))

    def _fit(self, family: str, measure: str) -> dict | None:
        """Fit a family's points; None where two parameters are not determined. Distances are taken as measured."""
        form = "best_of_n" if family == BEST_OF_N_FAMILY else "rl"
        names = [name for name in self.families[family]
                 if self.distances[name] > 0 and self.policies[name]["gains"][measure]]
        distances = np.array([self.distances[name] for name in names])
        if not fits.is_determined(form, distances):
            return None
        means = [self.policies[name]["gains"][measure]["mean"] for name in names]
        columns = np.stack([self.evaluations.gains[measure][name] for name in names])
        by_question = {name: self.pool.estimate_statistic(statistic, columns)
                       for name, statistic in fits.statistics_of_means(form, distances).items()}
        return {"form": form, "points": len(names), "largest_sqrt_kl": float(distances.max()),
                **fits.fit(form, distances, means), **by_question}

    def _compare_at_equal_kl(self) -> list[dict]:
        """Compare each trained policy with each curve of another family at the policy's KL; no row outside its range.

        Paired by question; KLs are taken as measured.
        """
        rows = []
        for name, distance in self.distances.items():
            for family, members in self.families.items():
                if self.policies[name]["family"] in (family, BEST_OF_N_FAMILY):
                    continue
                weights = fits.interpolation_weights({each: self.distances[each] for each in members}, distance)
                if weights is not None:
                    against = {each: -weight for each, weight in weights.items()}
                    rows.append({"policy": name, "against": family, "kl": self.policies[name]["kl"]["mean"]} | {
                        measure: {"interpolated": self._estimate(measure, weights),
                                  "difference": self._estimate(measure, {name: 1.0} | against)}
                        for measure in self.measures})
        return rows

    def _compare_best(self) -> list[dict]:
        """Estimate the paired difference of every two of the best, with intervals that hold all at once."""
        pairs = list(combinations(self.best.values(), 2))
        return [{"policy": one, "against": other,
                 "difference": widen(self._estimate(self.measure, {one: 1.0, other: -1.0}), len(pairs))}
                for one, other in pairs]

    def _pool_verdicts(self) -> dict:
        """Return each trained policy's verdict on reward hacking in each seed, and the shares of all of them."""
        by_seed = dict(zip(self.evaluations.seeds, self.evaluations.metrics, strict=True))
        verdicts = {name: {seed: compare_verdicts(metrics, name) for seed, metrics in by_seed.items()}
                    for name in self.policies if name in self.evaluations.metrics[0]["comparisons"]}
        return {"verdicts": verdicts, **estimate_shares(row for rows in verdicts.values() for row in rows.values())}


def _average_curves(attainable: list[dict | None]) -> dict | None:
    """Average the seeds' curves of the optimal reward (best_of_n.tilt_curve); None unless each seed has one.

    Returns: `samples`, the fewest a prompt of any seed; `curve`, (KL, gain) for falling beta.
    """
    if not all(attainable):
        return None
    curves = [[(row["kl"], row["gain"]) for row in seed["curve"]] for seed in attainable]
    return {"samples": min(seed["samples"] for seed in attainable), "curve": np.mean(curves, axis=0).tolist()}
