"""Compare several runs of one recipe, which differ by their seed, and pool them.

    snakemake --cores all ppo
    snakemake --cores all ppo --config seed=1 name=demo-seed-1
    python -m benchmarks.quality.seeds results/demo results/demo-seed-1 --json seeds.json

Differences are paired (PPO minus SFT on the same held-out prompt). The pooled interval resamples the questions of all
runs.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from stages.evaluation.statistics import bootstrap_mean

GAINS = ("reward", "gold", "correct")


def run_figures(run: Path) -> dict:
    """Read one run's figures: reward model, gains of PPO over SFT, and their cost in KL."""
    metrics = json.loads((run / "evaluate" / "metrics.json").read_text(encoding="utf-8"))
    pairs, compared = metrics["reward_model"], metrics["comparisons"]["ppo"]
    return {
        "reward accuracy": pairs["accuracy"],
        "best cheap baseline": pairs["baselines"][pairs["best_cheap_baseline"]],
        "both have code": pairs["both_have_code"],
        "SFT log-probability": pairs["baselines"]["SFT log-probability"],
        "oracle": pairs["oracle"],
        "oracle, both have code": pairs["oracle_both_have_code"],
        **{f"{name}, PPO - SFT": bootstrap_mean(gain, np.arange(len(gain)), samples=2000, seed=0)
           for name, gain in paired_gains(run).items()},
        "KL, nats a response": compared["kl_k1"],
        "ended by EOS": metrics["policies"]["ppo"]["eos_rate"],
    }


def paired_gains(run: Path) -> dict[str, np.ndarray]:
    """Compute PPO minus SFT for every held-out prompt, by score."""
    table = parquet.read_table(run / "evaluate" / "samples.parquet")
    numbers = {name: np.array(table[name].to_pylist(), float) for name in table.column_names if name.startswith(GAINS)}
    return {name: numbers[f"{name}_ppo"] - numbers[f"{name}_sft"] for name in GAINS if f"{name}_ppo" in numbers}


def pool_gains(runs: list[Path]) -> dict:
    """Estimate the mean gains over all runs; a question of one run is a group."""
    pooled: dict[str, list] = {}
    for run in runs:
        for name, gain in paired_gains(run).items():
            pooled.setdefault(name, []).append(gain)
    together = {name: np.concatenate(parts) for name, parts in pooled.items()}
    return {f"{name}, PPO - SFT": bootstrap_mean(gain, np.arange(len(gain)), samples=2000, seed=0)
            for name, gain in together.items()}


def format_figure(number) -> str:
    """Format a mean with its interval, or a plain number."""
    if not isinstance(number, dict):
        return f"{number:.3f}"
    return f"{number['mean']:.3f} [{number['low']:.3f}, {number['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="results/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    results = {str(run): run_figures(run) for run in arguments.runs} | {"together": pool_gains(arguments.runs)}
    for name, numbers in results.items():
        print(name)
        for label, number in numbers.items():
            print(f"  {label:24s} {format_figure(number)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
