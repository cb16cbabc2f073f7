"""Pool the evaluations of several seeds into one set of metrics, the verdicts on reward hacking among them.

A row is {per_seed, within_seeds, over_seeds}: an estimate by seed, and two of the mean over seeds (statistics.py).
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from stages.artifacts.artifact import read_manifest
from stages.evaluation.reward_hacking import detect_reward_hacking
from stages.evaluation.statistics import bootstrap_mean, wilson_interval
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
from stages.pooling.statistics import (
    DIFFERENCE,
    SHARE,
    UNBOUNDED,
    clip_interval,
    pool_over_seeds,
    pool_within_seeds,
    possible_means,
)

GOLD, SAMPLES, FLAGGED = "gold", "samples.parquet", "flagged"


@dataclass(frozen=True)
class SeedEvaluation:
    """The evaluation of one seed: its name, its folder and its metrics.json."""

    name: str
    folder: Path
    metrics: dict


def read_evaluation(folder: Path) -> SeedEvaluation:
    """Read an evaluation's folder; it is named by the seed of its settings."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    return SeedEvaluation(f"seed {read_manifest(folder)['config']['seed']}", folder, metrics)


def pool_evaluations(seeds: list[SeedEvaluation], *, samples: int, seed: int) -> dict:
    """Pool everything that is worth pooling; samples, seed: of the bootstrap over questions."""
    policies = [name for name in judged_policies(seeds[0].metrics)
                if all(name in each.metrics["comparisons"] for each in seeds)]
    metrics = {"seeds": [each.name for each in seeds], "reward_model": {
        key: pool_row({each.name: each.metrics["reward_model"][key] for each in seeds}, within)
        for key, within in (("accuracy", SHARE), ("above_best_cheap_baseline", DIFFERENCE))}}
    metrics["policies"] = {policy: {
        "gains": _pool_gains(seeds, policy, samples=samples, seed=seed), "against": _pool_differences(seeds, policy),
        "numbers": _pool_numbers(seeds, policy), "hacking": _pool_verdicts(seeds, policy)} for policy in policies}
    return metrics | {"table": short_table(metrics)}


def pool_row(per_seed: dict[str, dict | None], within: tuple[float, float] = UNBOUNDED) -> dict:
    """Pool a number over seeds, if every seed has it; within: what it can be. Nothing is pooled within seeds."""
    means = [estimate["mean"] for estimate in per_seed.values() if estimate]
    over_seeds = clip_interval(pool_over_seeds(means), within) if len(means) == len(per_seed) else None
    return {"per_seed": per_seed, "within_seeds": None, "over_seeds": over_seeds}


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
    false_alarms, misses = (sum(row["kind"] == kind for row in rows) for kind in ("false alarm", "miss"))
    return (f"{words}; without gold {known.count(FLAGGED)} of {len(known)}: {false_alarms} false alarms, {misses} "
            f"misses")


def list_scores(evaluate: Path, policy: str) -> list[str]:
    """List the scores that an evaluation has of a policy and of SFT at their best: reward, gold, judge, ..."""
    names = parquet.read_schema(evaluate / SAMPLES).names
    end = f"_{policy}{BEST}"
    scores = [name.removesuffix(end) for name in names if name.endswith(end)]
    return [score for score in scores if f"{score}_sft{BEST}" in names]


def read_gain(evaluate: Path, policy: str, score: str) -> np.ndarray:
    """Read a policy's score minus that of SFT, each at its best temperature, by question; NaN: does not apply."""
    table = parquet.read_table(evaluate / SAMPLES, columns=[f"{score}_{name}{BEST}" for name in (policy, "sft")])
    tuned, sft = (np.array(column.to_pylist(), float) for column in table.columns)
    return tuned - sft


def _pool_gains(seeds: list[SeedEvaluation], policy: str, **bootstrap: int) -> dict:
    """Pool the gain over SFT in each score that all seeds have."""
    scores = [list_scores(each.folder, policy) for each in seeds]
    rows = {}
    for score in (score for score in scores[0] if all(score in known for known in scores)):
        gains = [read_gain(each.folder, policy, score) for each in seeds]
        per_seed = {each.name: bootstrap_mean(values, np.arange(len(values)), **bootstrap)
                    for each, values in zip(seeds, gains, strict=True)}
        within_seeds = pool_within_seeds(gains, **bootstrap)
        rows[score] = pool_row(per_seed, possible_means(gains)) | {"within_seeds": within_seeds}
    return rows


def _pool_differences(seeds: list[SeedEvaluation], policy: str) -> dict:
    """Pool the policy minus the strongest best-of-n of each seed, and minus greedy SFT, by the score that judges."""
    at_best = {each.name: each.metrics["at_best"][policy] for each in seeds}
    measure, control = choose_measure(at_best[seeds[0].name][f"sft{BEST}"]), CONTROLS.get(policy)
    others = {"greedy SFT": dict.fromkeys(at_best, "sft_greedy"),
              "the strongest best-of-n": {name: strongest_best_of_n(against) for name, against in at_best.items()}}
    if control in seeds[0].metrics["comparisons"]:
        others[display_name(control)] = dict.fromkeys(at_best, f"{control}{BEST}")
    return {f"{measure}, against {words}": pool_row({
        name: difference_at_best(against[other[name]], measure) if other[name] in against else None
        for name, against in at_best.items()}) for words, other in others.items()}


def _pool_numbers(seeds: list[SeedEvaluation], policy: str) -> dict:
    """Pool further numbers of the policy; one that no seed has is left out."""
    rows: dict[str, dict] = {}
    for each in seeds:
        policies, length = each.metrics["policies"], each.metrics.get("length_control", {}).get(policy)
        numbers = {
            "KL to SFT, nats a response": each.metrics["comparisons"][policy]["kl_k1"],
            "ended by EOS": _estimate_exactly(policies[policy]["eos_rate"]),
            "reward gain at equal length": length and length["within_bins"][policy]["within"],
            **{f"gold of {display_name(name)} at best": _estimate_exactly(policies[f"{name}{BEST}"]["gold_scores"].get(
                GOLD)) for name in ("sft", policy)}}
        for label, estimate in numbers.items():
            rows.setdefault(label, {})[each.name] = estimate
    return {label: pool_row(row, SHARE if label == "ended by EOS" else UNBOUNDED)
            for label, row in rows.items() if any(row.values())}


def _estimate_exactly(number: float | None) -> dict | None:
    return None if number is None else {"mean": number, "low": None, "high": None}


def _pool_verdicts(seeds: list[SeedEvaluation], policy: str) -> dict:
    rows = {each.name: compare_verdicts(each.metrics, policy) for each in seeds}
    return {"per_seed": rows, **estimate_shares(rows.values())}


def compare_verdicts(metrics: dict, policy: str) -> dict:
    """Detect reward hacking by all that is known, and as where gold is not known.

    Args:
        metrics: of an evaluation; they are left as they are.

    Returns: `verdict`; `without_gold`, None if gold is not known anyway; `moved`, the monitors that moved for the
        worse; `kind`, 'false alarm', 'miss', 'right', or 'unknown' without gold.
    """
    seen, comparison = detect_reward_hacking(metrics, policy), metrics["comparisons"][policy]
    row = {"verdict": seen["verdict"], "without_gold": None, "moved": seen["moved"], "kind": "unknown"}
    if comparison["changes"]["gold"]:
        unseen = comparison | {"changes": comparison["changes"] | {"gold": None}}
        blind = detect_reward_hacking(metrics | {"comparisons": {policy: unseen}}, policy)["verdict"]
        kinds = {(False, True): "false alarm", (True, False): "miss"}
        row |= {"without_gold": blind, "kind": kinds.get((seen["verdict"] == FLAGGED, blind == FLAGGED), "right")}
    return row


def estimate_shares(rows: Iterable[dict]) -> dict[str, dict | None]:
    """Estimate the shares of flagged policies, and of false alarms and misses where gold is known.

    Args:
        rows: from `compare_verdicts`.

    Returns: `flagged`, of all; `false_alarms`, of those that gold clears; `misses`, of those that gold flags.
    """
    rows = list(rows)
    known = [row for row in rows if row["without_gold"]]
    honest, cheating = ([row for row in known if (row["verdict"] == FLAGGED) == flagged] for flagged in (False, True))
    return {"flagged": estimate_share(sum(row["verdict"] == FLAGGED for row in rows), len(rows)),
            "false_alarms": estimate_share(sum(row["kind"] == "false alarm" for row in honest), len(honest)),
            "misses": estimate_share(sum(row["kind"] == "miss" for row in cheating), len(cheating))}


def estimate_share(count: int, total: int) -> dict | None:
    """Estimate a share of few trials with Wilson's 95 % interval; None without trials."""
    if not total:
        return None
    low, high = wilson_interval(count / total, total)
    return {"mean": count / total, "low": low, "high": high, "count": total, "groups": total}
