"""Gold at the peak against the number of preference pairs: the second experiment of Gao et al. 2022, on a finished run.

    snakemake --cores all ppo
    python -m benchmarks.quality.reward_data_size results/demo --out results/data-size
    python -m benchmarks.quality.reward_data_size results/demo --out results/data-size --pairs 500 1000 --ppo

For each number of pairs a reward model is trained as the run's recipe says, on the first pairs of the reward split
(each set holds the smaller ones; as many epochs, so fewer steps). Then the best of n = 1, 2, ... 64 of SFT's answers is
taken by it, which shows gold against KL (stages.evaluate_reward). With --ppo, PPO is trained against each, too, and is
one more point. Writes gold.png and figures.json to --out; the peak is the n with the highest mean gold. Finished stages
are not repeated. "all" is what the recipe has. The recipe must name a gold scorer (evaluate.gold).
"""

import argparse
import json
from dataclasses import dataclass
from itertools import cycle
from math import sqrt
from pathlib import Path

import yaml

from benchmarks.quality.hacking import stage
from stages.artifacts.artifact import read_manifest
from stages.evaluation.summary import format_estimate
from stages.render.markdown_tables import format_table
from stages.reporting.figures import DASHES, draw_pictures

SIZES = ("500", "1000", "2000", "4000", "all")
BEST_OF = [2, 4, 8, 16, 32, 64]
PROMPTS = 128


@dataclass(frozen=True)
class GoldCurves:
    """Gold against sqrt(KL) by number of pairs, each with a star at its peak; squares: PPO."""

    title: str
    rows: dict[str, dict]

    def draw(self, axes, colours) -> None:
        """Draw the curves on Matplotlib axes."""
        for (size, row), colour, dash in zip(self.rows.items(), cycle(colours), cycle(DASHES), strict=False):
            points = [(sqrt(point["kl"]), point["gold"]["mean"]) for point in row["curve"]]
            axes.plot(*zip(*points, strict=True), "o", linestyle=dash, color=colour, markersize=4,
                      label=f"{size} pairs")
            axes.plot(sqrt(row["peak"]["kl"]), row["peak"]["gold"]["mean"], "*", color=colour, markersize=16)
            if row["ppo"]:
                axes.plot(sqrt(max(0.0, row["ppo"]["kl_k1"]["mean"])), row["ppo"]["gold"]["mean"], "s", color=colour)
        axes.set_xlabel("square root of the KL to SFT, nats; stars: peaks; squares: PPO")
        axes.set_ylabel("gold")
        axes.legend()


def measure_size(run: Path, folder: Path, size: str, prompts: int, with_ppo: bool) -> dict:
    """Train a reward model on `size` pairs in `folder`, and measure best-of-n, and PPO if wanted, with it."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = change_recipe(yaml.safe_load((run / "recipe.yaml").read_text(encoding="utf-8")), size, prompts)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False), encoding="utf-8")
    sft, pairs = run / "sft-merged", run / "pairs"
    base = sft if recipe["reward"].get("start_from", "sft") == "sft" else run / "base"
    trained = stage("reward", folder, "reward", base=base, pairs=pairs)
    reward = stage("merge", folder, "reward-merged", base=base, adapter=trained, pairs=pairs)
    policy = {}
    if with_ppo:
        critic = trained if recipe["ppo"].get("value_model") == "adapter" else reward
        ppo = stage("ppo", folder, "ppo", policy=sft, reward=critic, pairs=pairs)
        policy["policy"] = stage("merge", folder, "ppo-merged", base=sft, adapter=ppo, pairs=pairs)
    judged = stage("evaluate_reward", folder, "evaluate-reward", reward=reward, pairs=pairs, sft=sft, **policy)
    metrics = json.loads((judged / "metrics.json").read_text(encoding="utf-8"))
    if not metrics["gold_curve"]:
        raise SystemExit(f"{run}: no gold score is known of its questions (evaluate.gold): there is no peak to find")
    return {"pairs": int(read_manifest(trained)["metrics"]["pairs"]),
            "accuracy": metrics["reward_model"]["accuracy"], "curve": metrics["gold_curve"],
            "peak": find_peak(metrics["gold_curve"]), "ppo": metrics["policy"]}


def change_recipe(recipe: dict, size: str, prompts: int) -> dict:
    """Change the number of pairs, the n of best-of-n and the prompts; PPO takes the reward model as it is."""
    if size != "all":
        recipe["reward"]["train_pairs"] = int(size)
    recipe["evaluate"] |= {"best_of": BEST_OF, "prompts": prompts}
    recipe["ppo"]["require_reward"] = "none"
    return recipe


def find_peak(curve: list[dict]) -> dict:
    """Return the point of a curve with the highest mean gold."""
    return max(curve, key=lambda point: point["gold"]["mean"])


def format_rows(rows: dict[str, dict]) -> str:
    """Format one Markdown row a number of pairs."""
    return format_table(
        ["pairs", "trained on", "accuracy", "gold of one sample", "gold at the peak", "its n", "its KL, nats",
         f"gold at n = {BEST_OF[-1]}", "best that gold finds"],
        [(size, f"{row['pairs']:,}", format_estimate(row["accuracy"]), f"{row['curve'][0]['gold']['mean']:.3f}",
          format_estimate(row["peak"]["gold"]), row["peak"]["n"], f"{row['peak']['kl']:.2f}",
          format_estimate(row["curve"][-1]["gold"]), f"{row['curve'][-1]['best_gold']['mean']:.3f}")
         for size, row in rows.items()])


def parse_size(text: str) -> str:
    """Parse a number of pairs, or 'all'."""
    if text != "all" and not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of pairs nor 'all'")
    return text


def main(words: list[str] | None = None) -> None:
    """Measure each number of pairs, print the table, and write figures.json and gold.png."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="results/NAME: its base, SFT model and pairs")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--pairs", nargs="+", type=parse_size, default=list(SIZES), help=f"default: {' '.join(SIZES)}")
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"held-out questions (default: {PROMPTS})")
    parser.add_argument("--ppo", action="store_true", help="also train PPO against each reward model")
    arguments = parser.parse_args(words)
    rows = {size: measure_size(arguments.run, arguments.out / size, size, arguments.prompts, arguments.ppo)
            for size in arguments.pairs}
    print(format_rows(rows))
    (arguments.out / "figures.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    (arguments.out / "gold.png").write_bytes(
        draw_pictures(GoldCurves("Gold of best-of-n by number of preference pairs", rows)).light)


if __name__ == "__main__":
    main()
