"""Compare: write one self-contained page that shows runs side by side, or print their curves.

    python -m stages.compare results/demo results/demo-seed-1 --out compare.html
    python -m stages.compare results/demo results/demo-seed-1 --csv > curves.csv

Shows the settings that differ, the headline table and all numbers with their intervals, learning curves overlaid, and
which artifacts are equal by their digests. Runs may be unfinished. Reads manifests, metrics and histories; loads no
model. --csv prints every number that a training logged: run, stage, step, metric, value. `python -m stages.inspect
--diff A B` prints what differs between two runs. Not a stage: it makes no artifact.
"""

import argparse
import json
import sys
from pathlib import Path

from stages.command_line.option_parser import OptionParser
from stages.command_line.tool import print_text
from stages.recipe.recipe import Recipe, list_defaults
from stages.recipe.sections.evaluate import Report
from stages.render.terminal import escape_controls
from stages.reporting.comparison import ComparedRun, Numbers, render_comparison
from stages.reporting.curves import COLUMNS, format_csv, list_points
from stages.runs.run_facts import Run, common_settings, compare_headlines, is_evaluation, list_headlines, read_run
from stages.runtime.files import write_text
from stages.runtime.series import read_history

MAX_RUNS = 8  # a figure shows no more lines apart


def read_runs(folders: list[Path]) -> tuple[list[ComparedRun], Numbers]:
    """Read the runs and the numbers to show; ValueError, in one line, for what is no run or cannot be read."""
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ValueError(f"give 2 to {MAX_RUNS} runs to compare, not {len(folders)}")
    names = [folder.resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    if len(set(labels)) < len(labels):
        raise ValueError("a run is given twice")
    runs = [read_run(folder) for folder in folders]
    facts = list(map(_read_facts, labels, runs, common_settings(runs)))
    return facts, compare_headlines(list(map(list_headlines, runs)))


def _read_facts(label: str, run: Run, settings: dict) -> ComparedRun:
    return ComparedRun(
        label, str(run.folder), settings, {name: record.manifest for name, record in run.artifacts.items()},
        _read_evaluation(run), {name: read_history(record.folder) for name, record in run.artifacts.items()})


def _read_evaluation(run: Run) -> dict | None:
    """Read the metrics of PPO's evaluation or, without it, of another; None without any, or of an older version."""
    names = sorted(filter(is_evaluation, run.artifacts))  # evaluate, evaluate-dpo, ...
    if not names:
        return None
    path = run.artifacts[names[0]].folder / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8"))
    if "at_best" in metrics:
        return metrics
    print(f"compare: {path} was made by an older version, and its table is left out", file=sys.stderr)
    return None


def list_meanings() -> dict[str, str]:
    """Return what each setting of the recipe means, by 'section.name'."""
    recipe = vars(Recipe())
    return {f"{section}.{name}": doc for section in recipe if hasattr(recipe[section], "__dataclass_fields__")
            for name, _, doc in list_defaults(section)}


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser(prog="python -m stages.compare", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of runs, such as results/demo")
    result = parser.add_mutually_exclusive_group(required=True)
    result.add_argument("--out", type=Path, metavar="FILE.html", help="the page to write")
    result.add_argument("--csv", action="store_true", help="print all curves as CSV, and write no page")
    return parser


def main(words: list[str] | None = None) -> int:
    """Write the page; return 1, with one line on stderr, for a user's mistake."""
    arguments = build_parser().parse_args(words)
    try:
        if arguments.out and arguments.out.suffix != ".html":
            raise ValueError(f"--out {arguments.out}: give a name that ends in .html")
        runs, numbers = read_runs(arguments.runs)
        if arguments.csv:
            points = ((run.label, *point) for run in runs for point in list_points(run.histories))
            print_text(format_csv(("run", *COLUMNS), points).rstrip("\n"))
            return 0
        page = render_comparison(runs, numbers, list_meanings(), Report().figure_width_inches)
        write_text(arguments.out, page)
    except (ValueError, OSError) as error:
        print(f"compare: error: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    print(f"compare: {len(arguments.runs)} runs are in {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
