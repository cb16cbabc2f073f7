"""Several runs of one recipe, seed by seed and together: what must hold on the bundled site.

    snakemake --cores all ppo
    snakemake --cores all ppo --config seed=1 name=demo-seed-1
    python -m benchmarks.quality.seeds results/demo results/demo-seed-1 --json seeds.json

Differences are paired (PPO minus SFT on the same held-out prompt); together, questions of all runs are resampled.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as parquet

from stages.evaluation.statistics import bootstrap_mean

GAINS = ("reward", "gold", "correct")


def figures(run: Path) -> dict:
    """One run's numbers: reward model, gains of PPO over SFT, what they cost."""
    metrics = json.loads((run / "evaluate" / "metrics.json").read_text(encoding="utf-8"))
    judged, compared = metrics["reward_model"], metrics["ppo_against_sft"]
    return {
        "reward accuracy": judged["accuracy"],
        "best cheap baseline": judged["baselines"][judged["best_cheap_baseline"]],
        "both have code": judged["both_have_code"],
        "SFT log-probability": judged["baselines"]["SFT log-probability"],
        "oracle": judged["oracle"],
        "oracle, both have code": judged["oracle_both_have_code"],
        **{f"{name}, PPO - SFT": bootstrap_mean(gain, np.arange(len(gain)), samples=2000, seed=0)
           for name, gain in gains(run).items()},
        "KL, nats a response": compared["kl_k1"],
        "ended by EOS": metrics["policies"]["ppo"]["eos_rate"],
    }


def gains(run: Path) -> dict[str, np.ndarray]:
    """PPO minus SFT for every held-out prompt, by name."""
    table = parquet.read_table(run / "evaluate" / "samples.parquet")
    numbers = {name: np.array(table[name].to_pylist(), float) for name in table.column_names if name.startswith(GAINS)}
    return {name: numbers[f"{name}_ppo"] - numbers[f"{name}_sft"] for name in GAINS if f"{name}_ppo" in numbers}


def together(runs: list[Path]) -> dict:
    """Gains of all runs pooled, a question of a run being one group."""
    pooled: dict[str, list] = {}
    for run in runs:
        for name, gain in gains(run).items():
            pooled.setdefault(name, []).append(gain)
    return {f"{name}, PPO - SFT": bootstrap_mean(np.concatenate(parts), np.arange(sum(map(len, parts))), samples=2000, seed=0)
            for name, parts in pooled.items()}


def shown(number) -> str:
    """A mean with its interval."""
    if not isinstance(number, dict):
        return f"{number:.3f}"
    return f"{number['mean']:.3f} [{number['low']:.3f}, {number['high']:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="results/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    arguments = parser.parse_args()
    found = {str(run): figures(run) for run in arguments.runs} | {"together": together(arguments.runs)}
    for name, numbers in found.items():
        print(name)
        for label, number in numbers.items():
            print(f"  {label:24s} {shown(number)}")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
