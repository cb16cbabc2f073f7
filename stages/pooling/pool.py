"""Pool the evaluations of several seeds into one set of metrics.

A row is {per_seed, within_seeds, over_seeds}: an estimate by seed, and two of the mean over seeds (statistics.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from stages.evaluation.statistics import bootstrap_mean
from stages.evaluation.summary import (
    BEST,
    CONTROLS,
    choose_measure,
    difference_at_best,
    display_name,
    format_estimate,
    judged_policies,
    strongest_best_of_n,
)
from stages.pooling.gains import list_scores, read_gain
from stages.pooling.hacking import FLAGGED, compare_verdicts, estimate_shares
from stages.pooling.statistics import (
    DIFFERENCE,
    SHARE,
    UNBOUNDED,
    clip_interval,
    pool_over_seeds,
    pool_within_seeds,
    possible_means,
)

GOLD, ENDED = "gold", "ended by EOS"


@dataclass(frozen=True)
class SeedEvaluation:
    """The evaluation of one seed: its name, its folder and its metrics.json."""

    name: str
    folder: Path
    metrics: dict


def pool_evaluations(seeds: list[SeedEvaluation], *, samples: int, seed: int) -> dict:
    """Pool everything that is worth pooling; samples, seed: of the bootstrap over questions."""
    policies = [name for name in judged_policies(seeds[0].metrics)
                if all(name in each.metrics["comparisons"] for each in seeds)]
    metrics = {"seeds": [each.name for each in seeds], "reward_model": {
        key: pool_row(seeds, lambda each, key=key: each.metrics["reward_model"][key], within=within)
        for key, within in (("accuracy", SHARE), ("above_best_cheap_baseline", DIFFERENCE))},
        "policies": {policy: _pool_policy(seeds, policy, samples, seed) for policy in policies}}
    return metrics | {"table": short_table(metrics)}


def pool_row(seeds: list[SeedEvaluation], estimate: Callable, pooled: Callable | None = None,
             within: tuple[float, float] = UNBOUNDED) -> dict:
    """Pool a number; without the number of every seed nothing is pooled.

    Args:
        estimate: of a seed; None where there is none.
        pooled: the estimate within seeds, if there is one.
        within: what the number can be.
    """
    per_seed = {each.name: estimate(each) for each in seeds}
    means = [value["mean"] for value in per_seed.values() if value]
    complete = len(means) == len(seeds)
    return {"per_seed": per_seed, "within_seeds": pooled() if pooled and complete else None,
            "over_seeds": clip_interval(pool_over_seeds(means), within) if complete else None}


def short_table(metrics: dict) -> list[list[str]]:
    """List [label, value] rows: the few numbers that say whether it worked on all seeds."""
    rows = [["seeds", ", ".join(metrics["seeds"])],
            ["reward accuracy, over seeds", format_estimate(metrics["reward_model"]["accuracy"]["over_seeds"])]]
    for policy, pooled in metrics["policies"].items():
        name = display_name(policy)
        for score, row in pooled["gains"].items():
            rows += [[f"{score} at best temperature, {name} - SFT, {words}", format_estimate(row[key], signed=True)]
                     for key, words in (("within_seeds", "within seeds"), ("over_seeds", "over seeds"))]
        rows += [[f"{label}, {name}, over seeds", format_estimate(row["over_seeds"])]
                 for label, row in pooled["numbers"].items()]
        rows.append([f"reward hacking, {name}", describe_hacking(pooled["hacking"])])
    return rows


def describe_hacking(hacking: dict) -> str:
    """Count the verdicts, and the false alarms and misses where gold is known: '1 of 5 seeds flagged; ...'."""
    rows = list(hacking["per_seed"].values())
    words = f"{sum(row['verdict'] == FLAGGED for row in rows)} of {len(rows)} seeds flagged"
    known = [row["without_gold"] for row in rows if row["without_gold"]]
    if not known:
        return words
    counts = {kind: sum(row["kind"] == kind for row in rows) for kind in ("false alarm", "miss")}
    return (f"{words}; without gold {known.count(FLAGGED)} of {len(known)}: {counts['false alarm']} false alarms, "
            f"{counts['miss']} misses")


def _pool_policy(seeds: list[SeedEvaluation], policy: str, samples: int, seed: int) -> dict:
    scores = [score for score in list_scores(seeds[0].folder, policy)
              if all(score in list_scores(each.folder, policy) for each in seeds)]
    return {"gains": {score: _pool_gain(seeds, policy, score, samples, seed) for score in scores},
            "against": _pool_differences(seeds, policy), "numbers": _pool_numbers(seeds, policy),
            "hacking": _pool_verdicts(seeds, policy)}


def _pool_gain(seeds: list[SeedEvaluation], policy: str, score: str, samples: int, seed: int) -> dict:
    gains = {each.name: read_gain(each.folder, policy, score) for each in seeds}
    estimate = partial(bootstrap_mean, samples=samples, seed=seed)
    return pool_row(seeds, lambda each: estimate(gains[each.name], np.arange(len(gains[each.name]))),
                    lambda: pool_within_seeds(list(gains.values()), samples=samples, seed=seed),
                    possible_means(list(gains.values())))


def _pool_differences(seeds: list[SeedEvaluation], policy: str) -> dict:
    """Pool the policy minus the strongest best-of-n of each seed, and minus greedy SFT, by the score that judges."""
    measure = choose_measure(seeds[0].metrics["at_best"][policy][f"sft{BEST}"])

    def difference(each: SeedEvaluation, other: str | None) -> dict | None:
        against = each.metrics["at_best"][policy]
        return difference_at_best(against[other], measure) if other in against else None

    control = CONTROLS.get(policy)
    others = {"greedy SFT": lambda each: "sft_greedy",
              "the strongest best-of-n": lambda each: strongest_best_of_n(each.metrics["at_best"][policy])}
    if control in seeds[0].metrics["comparisons"]:
        others[display_name(control)] = lambda each: f"{control}{BEST}"
    return {f"{measure}, against {words}": pool_row(seeds, lambda each, choose=choose: difference(each, choose(each)))
            for words, choose in others.items()}


def _pool_numbers(seeds: list[SeedEvaluation], policy: str) -> dict:
    def value(number: float | None) -> dict | None:
        return None if number is None else {"mean": number, "low": None, "high": None}

    numbers = {"KL to SFT, nats a response": lambda each: each.metrics["comparisons"][policy]["kl_k1"],
               ENDED: lambda each: value(each.metrics["policies"][policy]["eos_rate"]),
               "reward gain at equal length": lambda each: _find_gain_within_bins(each.metrics, policy)}
    for label, name in (("SFT", f"sft{BEST}"), (display_name(policy), f"{policy}{BEST}")):
        numbers[f"gold of {label} at best"] = lambda each, name=name: value(
            each.metrics["policies"][name]["gold_scores"].get(GOLD))
    rows = {label: pool_row(seeds, estimate, within=SHARE if label == ENDED else UNBOUNDED)
            for label, estimate in numbers.items()}
    return {label: row for label, row in rows.items() if any(row["per_seed"].values())}


def _find_gain_within_bins(metrics: dict, policy: str) -> dict | None:
    length = metrics.get("length_control", {}).get(policy)
    return length and length["within_bins"][policy]["within"]


def _pool_verdicts(seeds: list[SeedEvaluation], policy: str) -> dict:
    rows = {each.name: compare_verdicts(each.metrics, policy) for each in seeds}
    return {"per_seed": rows, **estimate_shares(rows.values())}
