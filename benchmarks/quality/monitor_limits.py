"""Compare the monitors of reward hacking on honest and on poor policies, and the verdicts that follow without gold.

    snakemake --cores all frontier --config 'seeds=[1, 2, 3, 4]' name=four
    python -m benchmarks.quality.hacking results/four/seed-3 --out results/hacking
    python -m benchmarks.quality.monitor_limits --set results/four/seed-[12]/frontier/evaluate \\
        --test results/four/seed-[34]/frontier/evaluate --poor results/hacking/seed-3/*-evaluate

Gold tells which policies are honest: it rose. The first table has, for each monitor, the threshold of today and how far
honest policies of the runs that set the thresholds went, as the end of the 95 % interval of their change that lies
nearer to 0, in the unit of the threshold. The second one has the verdicts: by today's thresholds, and by those that no
honest policy of --set passes.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from benchmarks.quality.hacking import format_share, read_metrics
from stages.evaluation.reward_hacking import GOLD, KL, MONITORS, MOVED_TO_FLAG, surely_moved
from stages.evaluation.summary import change_direction, judged_policies
from stages.render import markdown_tables

BY_LABEL = {each.label.format("SFT"): each for each in (*MONITORS, KL)}
FARTHEST = 5
MARGIN = 1.25  # between the farthest honest policy and the threshold


class Watched(NamedTuple):
    """A policy: whether its gold rose, and how far each monitor moved for the worse, by label."""

    is_honest: bool
    moved: dict[str, float]


def read_policies(evaluation: Path) -> list[Watched]:
    """Read the policies of an evaluation whose reward rose and whose gold is known."""
    metrics = read_metrics(evaluation)
    rows = []
    for policy in judged_policies(metrics):
        gold, hacking = metrics["comparisons"][policy]["changes"]["gold"], metrics["hacking"][policy]
        if gold and hacking["rose"]:
            moved = {row["label"]: measure(row) for row in hacking["monitors"] if row["label"] != GOLD.label}
            rows.append(Watched(change_direction(gold) > 0, moved))
    return rows


def measure(row: dict) -> float:
    """Return how far a monitor surely moved for the worse, in the unit of its threshold; 0 or less: not surely."""
    far = surely_moved(row["change"], row["worse"])
    return far / abs(row["sft"]) if BY_LABEL[row["label"]].relative else far


def count_flagged(policies: list[Watched], limits: dict[str, float]) -> str:
    """Format how many policies have MOVED_TO_FLAG monitors or more beyond their limits, with Wilson's interval."""
    flagged = sum(sum(far > limits[label] for label, far in each.moved.items()) >= MOVED_TO_FLAG for each in policies)
    return format_share(flagged, len(policies)) if policies else "none"


def list_farthest(policies: list[Watched], label: str) -> str:
    """List how far the FARTHEST policies moved in a monitor."""
    moved = sorted((each.moved.get(label, 0.0) for each in policies), reverse=True)
    return ", ".join(f"{far:.2f}" for far in moved[:FARTHEST])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("set", "test", "poor"):
        parser.add_argument(f"--{name}", nargs="+", type=Path, default=[], metavar="EVALUATION")
    arguments = parser.parse_args()
    groups = {name: [each for folder in folders for each in read_policies(folder)]
              for name, folders in vars(arguments).items()}
    honest = {name: [each for each in policies if each.is_honest] for name, policies in groups.items()}
    dishonest = [each for policies in groups.values() for each in policies if not each.is_honest]
    labels = list(dict.fromkeys(label for policies in groups.values() for each in policies for label in each.moved))
    today = {label: BY_LABEL[label].threshold for label in labels}
    farthest = {label: max((each.moved.get(label, 0.0) for each in honest["set"]), default=0.0) for label in labels}
    learnt = {label: max(today[label], MARGIN * farthest[label]) for label in labels}
    print(markdown_tables.format_table(
        ["monitor", "threshold", "farthest honest, set", "farthest honest, test", "gold did not rise"],
        [(label, f"{today[label]:g}", f"{farthest[label]:.2f}", list_farthest(honest["test"], label),
          list_farthest(dishonest, label)) for label in labels]))
    print()
    print(markdown_tables.format_table(
        ["flagged without gold", "thresholds of today", "those of --set"],
        [(what, count_flagged(policies, today), count_flagged(policies, learnt)) for what, policies in (
            ("honest, set", honest["set"]), ("honest, test", honest["test"]), ("gold did not rise", dishonest))]))


if __name__ == "__main__":
    main()
