"""Inspect: what an artifact holds and comes from, what differs between two, and how far the runs in a folder are.

    python -m stages.inspect results/demo/sft                    # or a results/demo/sft.partial
    python -m stages.inspect --diff results/demo/ppo results/demo-nf4/ppo
    python -m stages.inspect results/

Reads, and writes nothing; loads no weights, and of a table its metadata and first rows. Not a stage: it makes no
artifact. An artifact is stale when an input is not what its manifest names, or its settings are not the run's recipe.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from stages.inspection.artifact_contents import read_contents
from stages.inspection.text_pages import format_artifact, format_difference, format_runs
from stages.recipe.recipe import Recipe, section_settings
from stages.render.terminal import escape_controls
from stages.runtime.artifact import ArtifactError, artifact_folder
from stages.runtime.lineage import check_inputs, find_stale_reasons, section_name, trace_ancestry
from stages.runtime.manifest import PARTIAL, Record, diff_trees, find_damaged_files, is_artifact, read_record
from stages.runtime.runs import last_write_time, list_runs

CODE = ("stage", "commit", "python", "device", "versions")


def artifact_facts(folder: Path) -> dict[str, Any]:
    """All that is known of one artifact, finished or begun; ArtifactError when `folder` is none."""
    record = read_record(folder)
    found = read_contents(folder)
    problems = [*record.problems, *find_damaged_files(record), *found.pop("problems")]
    said = {key: value for key, value in record.said.items() if key != "files"}
    return {"artifact": str(folder), "state": record.state, "stale": find_stale_reasons(record), "problems": problems,
            "last_written": last_write_time(folder), "manifest": said, "settings": _from_published(record),
            "ancestry": trace_ancestry(record), **found}


def difference_facts(a: Path, b: Path) -> dict[str, Any]:
    """What differs between two artifacts: settings, inputs, code and packages, metrics."""
    first, second = read_record(a), read_record(b)
    both = [first.said, second.said]
    return {"a": str(a), "b": str(b),
            "problems": [f"{record.folder}: {line}" for record in (first, second) for line in _unfinished(record)],
            "settings": diff_trees(*(said.get("config") for said in both)),
            "inputs": _other_inputs(first, second),
            "code": diff_trees(*({key: said[key] for key in CODE if key in said} for said in both)),
            "metrics": [row | _distance(row) for row in diff_trees(*(said.get("metrics") for said in both))]}


def page_of(path: Path) -> tuple[list[str], Any]:
    """Lines for people and the facts themselves: of an artifact or, of any other folder, of the runs in it."""
    folder = artifact_folder(path)
    if is_artifact(folder):
        facts = artifact_facts(folder)
        return format_artifact(facts), facts
    begun = Path(f"{folder}{PARTIAL}")
    if begun.is_dir():
        raise ArtifactError(f"{folder} is not finished: look at {begun}")
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is a file: give the folder of an artifact, or of runs" if folder.exists()
                            else f"there is no {folder}")
    found = list_runs(folder)
    if not found:
        raise ArtifactError(f"{folder} is no artifact, and there is none in it")
    return format_runs(found), found


def _from_published(record: Record) -> list[dict]:
    name = section_name(record.said.get("stage", ""))
    known = hasattr(Recipe(), name) and "config" in record.said
    return diff_trees(record.said["config"], section_settings(Recipe(), name)) if known else []


def _other_inputs(first: Record, second: Record) -> list[dict]:
    """Inputs that are not the same thing, wherever they lie: by digest or, of a hub's, by name."""
    sides = {side: {link.name: link for link in check_inputs(record)} for side, record in (("a", first), ("b", second))}
    rows = diff_trees(*({name: link.sha256 or link.path for name, link in found.items()} for found in sides.values()))
    return [{"name": row["name"]} | {side: {"path": found[row["name"]].path, "sha256": found[row["name"]].sha256}
                                     for side, found in sides.items() if side in row} for row in rows]


def _unfinished(record: Record) -> list[str]:
    return [*record.problems, *([] if "metrics" in record.said else [f"{record.state}: it has no metrics yet"])]


def _distance(row: dict) -> dict[str, float]:
    """b - a and b / a of two numbers."""
    a, b = (row.get(side) for side in ("a", "b"))
    if not all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b)):
        return {}
    return {"difference": b - a} | ({"ratio": b / a} if a else {})


def _json(facts: Any) -> str:
    """In printable ASCII alone, as json writes it, so that no text of a post can act on a terminal."""
    return json.dumps(_plain(facts), indent=2, default=str)


def _plain(value: Any) -> Any:
    """JSON knows no NaN and no infinity: they become text."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m stages.inspect", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("path", nargs="?", type=Path, metavar="PATH", help="an artifact, or a folder of runs")
    asked.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="two artifacts to compare")
    parser.add_argument("--json", action="store_true", help="the same facts as JSON")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print what is asked for; 1, with one line, for a user's mistake."""
    asked = _parser().parse_args(arguments)
    try:
        if asked.diff:
            facts = difference_facts(*map(artifact_folder, asked.diff))
            lines = format_difference(facts)
        else:
            lines, facts = page_of(asked.path)
    except (ArtifactError, OSError) as error:
        print(f"inspect: error: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    text = _json(facts) if asked.json else "\n".join(map(escape_controls, lines))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
