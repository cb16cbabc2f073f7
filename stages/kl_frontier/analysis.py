"""Compute all numbers of the frontier from evaluations: points, fits, gains at equal KL, and paired comparisons.

Gains are minus SFT's at the same question. The truth is gold, else the judge's score, else nothing is known of it, and
the learnt reward stands in its place. Shapes: S seeds, N questions of a seed.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from stages.evaluation.summary import change_direction
from stages.kl_frontier import fits
from stages.kl_frontier.equal_kl import interpolation_weights
from stages.kl_frontier.evaluations import MEASURES, Evaluation
from stages.kl_frontier.pooling import Pool, widen
from stages.pooling.hacking import estimate_shares

BEST_OF_N = "best_of_n"  # the family of best-of-n


@dataclass(frozen=True)
class PolicyName:
    """How a policy is called: its name in the evaluations, and for people; mark: what differs within its family.

    family: the policies of one algorithm, by the name of its section or BEST_OF_N.
    """

    name: str
    family: str
    family_label: str
    label: str
    mark: str


class FrontierAnalysis:
    """Evaluations of the same policies, one a seed; `policies` are those to compare, by name."""

    def __init__(self, evaluations: list[Evaluation], policies: Iterable[PolicyName], pool: Pool):
        self.evaluations, self.pool = evaluations, pool
        self.policies = {policy.name: policy for policy in policies}
        self.measures = [measure for measure in MEASURES if measure in evaluations[0].gains]
        self.measure = self.measures[0]
        self.kl = {name: self._estimate_kl(name) for name in self.policies}
        self.distances = {name: max(kl["mean"], 0.0) ** 0.5 for name, kl in self.kl.items() if kl}
        self.gains = {measure: {name: self._estimate(measure, {name: 1.0}) for name in self.policies}
                      for measure in self.measures}

    def compute(self) -> dict:
        """Compute every number, as plain JSON values."""
        fitted = {family: {measure: self._fit(family, measure) for measure in self.measures}
                  for family in self.families()}
        best = self._best_of_families()
        return {
            "measure": self.measure, "temperature": self.evaluations[0].temperature,
            "judge_accuracy": self.evaluations[0].judge_accuracy,
            "seeds": [evaluation.label for evaluation in self.evaluations],
            "questions": len({question for evaluation in self.evaluations for question in evaluation.questions}),
            "sft": {measure: float(np.mean([evaluation.sft[measure] for evaluation in self.evaluations]))
                    for measure in self.measures},
            "families": {policy.family: policy.family_label for policy in self.policies.values()},
            "policies": {name: self._point(policy) for name, policy in self.policies.items()},
            "fits": fitted, "equal_kl": self._compare_at_equal_kl(), "best": best,
            "best_differences": self._compare_best(list(best.values())), "declines": self._find_declines(),
            "hacking": self._pool_verdicts()}

    def families(self) -> dict[str, list[str]]:
        """Return the policies of each family that have a KL, by rising KL."""
        families: dict[str, list[str]] = {}
        for name in sorted(self.distances, key=self.distances.get):
            families.setdefault(self.policies[name].family, []).append(name)
        return {family: families[family] for family in dict.fromkeys(
            policy.family for policy in self.policies.values()) if family in families}

    def seed_rows(self) -> list[dict]:
        """List the mean KL and gains of each policy in each seed."""
        return [{"seed": evaluation.label, "policy": name, "kl_nats": _mean(self._kl_of(evaluation, name)),
                 **{measure: _mean(evaluation.gains[measure][name]) for measure in self.measures}}
                for evaluation in self.evaluations for name in self.policies]

    def _point(self, policy: PolicyName) -> dict:
        return {"family": policy.family, "label": policy.label, "mark": policy.mark, "kl": self.kl[policy.name],
                "sqrt_kl": self.distances.get(policy.name),
                "kl_is_bound": policy.name in self.evaluations[0].kl_bounds,
                "gains": {measure: self.gains[measure][policy.name] for measure in self.measures}}

    def _kl_of(self, evaluation: Evaluation, name: str) -> np.ndarray:
        bound = evaluation.kl_bounds.get(name)
        return evaluation.kl[name] if bound is None else np.full(len(evaluation.questions), bound)

    def _estimate_kl(self, name: str) -> dict | None:
        if name in self.evaluations[0].kl_bounds:
            return {"mean": self.evaluations[0].kl_bounds[name], "low": None, "high": None}
        return self.pool.estimate([evaluation.kl[name] for evaluation in self.evaluations])

    def _estimate(self, measure: str, weights: dict[str, float]) -> dict | None:
        """Estimate a weighted sum of policies' gains at the same questions."""
        return self.pool.estimate([sum(weight * evaluation.gains[measure][name] for name, weight in weights.items())
                                   + np.zeros(len(evaluation.questions)) for evaluation in self.evaluations])

    def _fit(self, family: str, measure: str) -> dict | None:
        """Fit a family's points; None where two parameters are not determined. Distances are taken as measured."""
        form = "best_of_n" if family == BEST_OF_N else "rl"
        names = [name for name in self.families()[family] if self.distances[name] > 0 and self.gains[measure][name]]
        distances = np.array([self.distances[name] for name in names])
        if not fits.is_determined(form, distances):
            return None
        columns = [np.stack([evaluation.gains[measure][name] for name in names]) for evaluation in self.evaluations]
        solution = fits.solution_matrix(form, distances)
        whole = fits.fit(form, distances, [self.gains[measure][name]["mean"] for name in names])
        statistics = {
            "a_by_question": lambda means: (solution @ means)[0], "b_by_question": lambda means: (solution @ means)[1],
            "peak_sqrt_kl": lambda means: fits.peak_distance(form, *(solution @ means)),
            "peak_gain": lambda means: fits.peak_gain(form, *(solution @ means)),
            "peak_exists": lambda means: np.isfinite(fits.peak_distance(form, *(solution @ means))) * 1.0}
        estimates = {name: self.pool.estimate_statistic(statistic, columns) for name, statistic in statistics.items()}
        return {"form": form, "points": len(names), "largest_sqrt_kl": float(distances.max()), **whole, **estimates}

    def _compare_at_equal_kl(self) -> list[dict]:
        """Compare each trained policy with each curve of another family at the policy's KL; no row outside its range.

        Paired by question; KLs are taken as measured.
        """
        rows = []
        for name in self.distances:
            for family, members in self.families().items():
                if self.policies[name].family in (family, BEST_OF_N):
                    continue
                weights = interpolation_weights({each: self.distances[each] for each in members}, self.distances[name])
                if weights is not None:
                    against = {each: -weight for each, weight in weights.items()}
                    rows.append({"policy": name, "against": family, "kl": self.kl[name]["mean"]} | {
                        measure: {"interpolated": self._estimate(measure, weights),
                                  "difference": self._estimate(measure, {name: 1.0} | against)}
                        for measure in self.measures})
        return rows

    def _best_of_families(self) -> dict[str, str]:
        """Choose the policy of the highest truth of each family: by the questions that it is then compared on."""
        gains = self.gains[self.measure]
        known = {family: [name for name in names if gains[name]] for family, names in self.families().items()}
        best = {family: max(names, key=lambda name: gains[name]["mean"]) for family, names in known.items() if names}
        return dict(sorted(best.items(), key=lambda item: -gains[item[1]]["mean"]))

    def _compare_best(self, best: list[str]) -> list[dict]:
        """Estimate the paired difference of every two of these policies, with intervals that hold all at once."""
        pairs = list(combinations(best, 2))
        return [{"policy": one, "against": other,
                 "difference": widen(self._estimate(self.measure, {one: 1.0, other: -1.0}), len(pairs))}
                for one, other in pairs]

    def _pool_verdicts(self) -> dict:
        """Return each trained policy's verdict on reward hacking in each seed, and the shares of all of them."""
        verdicts = {name: {evaluation.label: evaluation.hacking[name] for evaluation in self.evaluations}
                    for name in self.policies if name in self.evaluations[0].hacking}
        return {"verdicts": verdicts, **estimate_shares(row for rows in verdicts.values() for row in rows.values())}

    def _find_declines(self) -> dict[str, dict]:
        """Compare each family's policy of the largest KL with that of the highest truth, in truth and in reward.

        The latter is chosen among the family's policies, and the intervals are widened for that.
        """
        declines, best = {}, self._best_of_families()
        for family, names in self.families().items():
            if family in best and len(names) > 1:
                change = {names[-1]: 1.0, best[family]: -1.0} if names[-1] != best[family] else None
                declines[family] = {"from": best[family], "to": names[-1]} | {
                    measure: widen(self._estimate(measure, change), len(names) - 1) if change else None
                    for measure in self.measures}
        return declines


def split_by_direction(estimates: dict[str, dict | None]) -> dict[int, list[str]]:
    """Sort names by what the interval of their difference says: 1 above 0, -1 below, 0 cannot be told apart."""
    directions: dict[int, list[str]] = {1: [], 0: [], -1: []}
    for name, estimate in estimates.items():
        directions[change_direction(estimate)].append(name)
    return directions


def _mean(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))
