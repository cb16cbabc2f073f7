"""Compare: show what differs between runs, or between artifacts, as text or as one self-contained page.

    python -m stages.compare results/demo results/demo-nf4                      # or two artifacts: results/demo/ppo ...
    python -m stages.compare results/demo results/demo-seed-1 --out compare.html
    python -m stages.compare results/demo results/demo-seed-1 --csv > curves.csv

Shows the settings that differ, all numbers with their intervals, and which artifacts are equal by their digests; of
artifacts alone also the code and the inputs that differ. The page adds each run's verdict and headline table, and
learning curves overlaid; --csv prints every number that a training logged: run, stage, step, metric, value. Runs may be
unfinished. Reads manifests, metrics and histories; loads no model. Not a stage: it makes no artifact.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

from stages.artifacts.artifact import artifact_folder
from stages.artifacts.run_facts import Run, Table, compare_runs, is_evaluation, read_run
from stages.command_line.option_parser import OptionParser
from stages.command_line.start import print_text, run_tool
from stages.recipe.recipe import Recipe, list_defaults
from stages.render.terminal import escape_controls, format_columns, format_value
from stages.runtime.files import write_text
from stages.runtime.series import read_history

MAX_RUNS = 8  # a figure shows no more lines apart
CELL_CHARACTERS = 32  # of one of several values side by side


def read_runs(folders: list[Path]) -> dict[str, Run]:
    """Read the runs by label; ValueError, in one line, for what is no run or cannot be read."""
    folders = list(map(artifact_folder, folders))
    if not 2 <= len(folders) <= MAX_RUNS:
        raise ValueError(f"give 2 to {MAX_RUNS} runs to compare, not {len(folders)}")
    names = [folder.resolve().name for folder in folders]
    labels = names if len(set(names)) == len(names) else [str(folder) for folder in folders]
    if len(set(labels)) < len(labels):
        raise ValueError("a run is given twice")
    return {label: read_run(folder) for label, folder in zip(labels, folders, strict=True)}


def render_page(runs: dict[str, Run]) -> str:
    """Render the page."""
    from stages.reporting.comparison import ComparedRun, render_comparison  # imports matplotlib, in seconds

    facts = [ComparedRun(label, {name: record.manifest.get("stage", name) for name, record in run.artifacts.items()},
                         read_histories(run), read_evaluation(run)) for label, run in runs.items()]
    return render_comparison(facts, compare_runs(runs), list_meanings())


def format_curves(runs: dict[str, Run]) -> str:
    """Format every number that a training logged as CSV."""
    from stages.reporting.curves import COLUMNS, format_csv, list_points

    points = ((label, *point) for label, run in runs.items() for point in list_points(read_histories(run)))
    return format_csv(("run", *COLUMNS), points).rstrip("\n")


def read_histories(run: Run) -> dict[str, list[dict]]:
    """Read the series of each artifact."""
    return {name: read_history(record.folder) for name, record in run.artifacts.items()}


def read_evaluation(run: Run) -> dict | None:
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


def format_tables(tables: dict[str, Table]) -> list[str]:
    """Format the tables as lines for a terminal."""
    lines = []
    for title, rows in tables.items():
        cells = [[row[0], *(format_value(cell, CELL_CHARACTERS) for cell in row[1:])] for row in rows]
        lines += [title, *format_columns(cells), ""]
    return [escape_controls(line) for line in lines[:-1]]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser("compare", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN",
                        help="folders of runs, such as results/demo, or of artifacts, such as results/demo/ppo")
    result = parser.add_mutually_exclusive_group()
    result.add_argument("--out", type=Path, metavar="FILE.html", help="write a page")
    result.add_argument("--csv", action="store_true", help="print all curves as CSV")
    return parser


def show_comparison(arguments: argparse.Namespace) -> None:
    """Print the comparison or write the page; ValueError or OSError for a user's mistake."""
    if arguments.out and arguments.out.suffix != ".html":
        raise ValueError(f"--out {arguments.out}: give a name that ends in .html")
    runs = read_runs(arguments.runs)
    if arguments.csv:
        print_text(format_curves(runs))
    elif arguments.out:
        write_text(arguments.out, render_page(runs))
        print(f"compare: {len(runs)} runs are in {arguments.out}")
    else:
        print_text("\n".join(format_tables(compare_runs(runs))))


def main(words: list[str] | None = None) -> int:
    """Run the command; return 1, with one line on stderr, for a user's mistake."""
    arguments = build_parser().parse_args(words)
    return run_tool("compare", arguments.out or Path(), partial(show_comparison, arguments))


if __name__ == "__main__":
    sys.exit(main())
