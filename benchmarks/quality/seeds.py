"""Compare several runs of one recipe on the bundled site, which differ by their seed, and pool them.

    snakemake --cores all ppo
    snakemake --cores all ppo --config seed=1 name=demo-seed-1
    python -m benchmarks.quality.seeds results/demo results/demo-seed-1 --json seeds.json

Prints a Markdown table. Differences are paired, on the same held-out question, of PPO and SFT each at its best
temperature. Of the two pooled intervals, that within seeds resamples the questions of each run, that over seeds is
Student's, of the runs' means.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from data.demo import gold
from stages.evaluation.statistics import bootstrap_mean
from stages.evaluation.summary import BEST_OF_N
from stages.pooling.pool import read_gain
from stages.pooling.statistics import pool_over_seeds, pool_within_seeds
from stages.render import markdown_tables
from stages.runtime.series import read_history
from stages.stackexchange.pairs.table import read_pairs

GAINS = {"gold": "gold", "reward": "learnt reward", "contested_correct": "facts with a popular mistake right",
         "complete": "all wanted traits"}
LAST_ITERATIONS = 10


def run_figures(run: Path) -> dict:
    """Read one run's figures: reward model, PPO against what is cheaper, and its cost in KL."""
    metrics = json.loads((run / "evaluate" / "metrics.json").read_text(encoding="utf-8"))
    pairs, policies, against = metrics["reward_model"], metrics["policies"], metrics["at_best"]["ppo"]
    attainable = metrics["attainable"]["policies"]["ppo"]
    best_of_n = [name for name in against if BEST_OF_N.fullmatch(name)]
    return {
        "reward accuracy": pairs["accuracy"],
        "reward accuracy, right over the popular mistake": right_over_mistake(run),
        "reward model, calibration error": pairs["calibration"]["expected_error"],
        "SFT log-probability, accuracy": pairs["baselines"]["SFT log-probability"],
        **{f"gold, {name}": policies[name]["gold_scores"]["gold"]
           for name in ("sft", "sft_best", "ppo", "ppo_best", *best_of_n)},
        "temperature, SFT and PPO at best": [policies[name]["temperature"] for name in ("sft_best", "ppo_best")],
        **{f"{label}, PPO - SFT": bootstrap(paired_gain(run, name)) for name, label in GAINS.items()},
        **{f"gold, PPO - {name}": against[name]["gold"]["gold"] for name in best_of_n},
        "share of the attainable objective, PPO": attainable["share"],
        "share of the extrapolated optimum, PPO": attainable.get("share_extrapolated"),  # not of an older evaluation
        **{f"code and explanation where both are wanted, {name}": both_traits(run, name.lower())
           for name in ("SFT", "PPO")},
        "unwanted traits, PPO": policies["ppo_best"]["gold_scores"]["unwanted"],
        "KL of the optimum, nats a response": attainable["optimum"]["kl"],
        "KL, nats a response": metrics["comparisons"]["ppo"]["kl_k1"],
        "ended by EOS": policies["ppo"]["eos_rate"],
        "verdict": metrics["hacking"]["ppo"]["verdict"],
        **training_figures(run),
    }


def right_over_mistake(run: Path) -> dict:
    """Estimate the reward model's accuracy on held-out pairs of a right answer and one with the popular mistake."""
    rows = list(read_pairs(run / "pairs", "evaluation"))
    scores = parquet.read_table(run / "evaluate" / "per_pair.parquet").to_pylist()
    if [row["qid"] for row in rows] != [row["qid"] for row in scores]:
        raise SystemExit(f"{run}: the evaluation left out pairs (max_pairs, or texts over the length limit)")
    good, bad = (gold.score([row["question"] for row in rows], [row[name] for row in rows])
                 for name in ("response_j", "response_k"))
    right = [score["reward_j"] > score["reward_k"] for i, score in enumerate(scores)
             if good["contested_correct"][i] is not None and good["correct"][i] == 1 and bad["mistaken"][i]]
    return bootstrap(np.array(right, float))


def both_traits(run: Path, policy: str) -> dict:
    """Estimate how often a policy's answer has code and an explanation, among held-out questions that want both."""
    complete = f"complete_{policy}"
    rows = parquet.read_table(run / "evaluate" / "samples.parquet", columns=["question", complete]).to_pylist()
    return bootstrap(np.array([row[complete] for row in rows if len(gold.wanted_traits(row["question"])) == 2], float))


def paired_gain(run: Path, score: str) -> np.ndarray:
    """Compute PPO minus SFT, each at its best temperature, for every held-out question that has the score."""
    gain = read_gain(run / "evaluate", "ppo", score)
    return gain[~np.isnan(gain)]


def training_figures(run: Path) -> dict:
    """Average what the critic explains over the last iterations, and the clip fraction over all; find the highest KL.
    """
    history = read_history(run / "ppo")
    rows = [row for row in history if "clip_fraction" in row]
    explained = [row["explained_variance"] for row in rows[-LAST_ITERATIONS:]]
    return {"explained variance, at the end": float(np.mean(explained)),
            "clip fraction": float(np.mean([row["clip_fraction"] for row in rows])),
            "highest KL of an evaluation": max(row["validation_kl"] for row in history if "validation_kl" in row)}


def pool_gains(runs: list[Path]) -> dict:
    """Estimate the mean gains of all runs, with both intervals."""
    figures = {}
    for name, label in GAINS.items():
        gains = [paired_gain(run, name) for run in runs]
        over = pool_over_seeds([gain.mean() for gain in gains])
        figures |= {f"{label}, PPO - SFT": pool_within_seeds(gains, samples=2000, seed=0),
                    f"{label}, PPO - SFT, over seeds": over if over["low"] is not None else None}
    return figures


def bootstrap(values: np.ndarray) -> dict:
    """Estimate the mean with its 95 % interval."""
    return bootstrap_mean(values, np.arange(len(values)), samples=2000, seed=0)


def format_figure(figure) -> str:
    """Format a mean with its interval, a list of numbers, a number or a word; empty for None."""
    if isinstance(figure, dict):
        return f"{figure['mean']:.3f} [{figure['low']:.3f}, {figure['high']:.3f}]"
    if isinstance(figure, list):
        return ", ".join(f"{number:g}" for number in figure)
    return f"{figure:.3f}" if isinstance(figure, float) else figure or ""


def format_table(results: dict[str, dict]) -> str:
    """Format one Markdown column a run."""
    labels = list(dict.fromkeys(label for figures in results.values() for label in figures))
    return markdown_tables.format_table(["", *results], [
        (label, *(format_figure(figures.get(label)) for figures in results.values())) for label in labels])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="results/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    results = {run.name: run_figures(run) for run in arguments.runs} | {"together": pool_gains(arguments.runs)}
    print(format_table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
