"""Inspect: show what an artifact holds and comes from, what differs between two, or the state of all runs in a folder.

    python -m stages.inspect results/demo/sft                    # or a results/demo/sft.partial
    python -m stages.inspect --diff results/demo/ppo results/demo-nf4/ppo
    python -m stages.inspect results/
    python -m stages.inspect --verify results/demo               # hash every file of every artifact

Reads only: without --verify no weights, and of a table only its metadata and first rows. Not a stage: it makes no
artifact. An artifact is stale if an input is not the one its manifest names, or its settings are not those of the run's
recipe.
"""

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

from stages.inspection.artifact_diff import diff_artifacts
from stages.inspection.artifact_facts import describe_artifact
from stages.inspection.text_pages import format_artifact, format_difference, format_runs
from stages.render.terminal import escape_controls
from stages.runs.listing import list_artifacts, list_runs
from stages.runtime.artifact import MANIFEST, PARTIAL, ArtifactError, artifact_folder
from stages.runtime.manifest import is_artifact
from stages.runtime.option_parser import OptionParser
from stages.runtime.verification import list_damage


def inspect_path(path: Path) -> tuple[list[str], Any]:
    """Return the page, as lines, and its facts: of an artifact or, for any other folder, of the runs in it."""
    folder = artifact_folder(path)
    if is_artifact(folder):
        facts = describe_artifact(folder)
        return format_artifact(facts), facts
    partial = Path(f"{folder}{PARTIAL}")
    if partial.is_dir():
        raise ArtifactError(f"{folder} is not finished: look at {partial}")
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is a file: give the folder of an artifact, or of runs" if folder.exists()
                            else f"there is no {folder}")
    runs = list_runs(folder)
    if not runs:
        raise ArtifactError(f"{folder} is no artifact, and there is none in it")
    return format_runs(runs), runs


def verify_path(path: Path) -> dict[str, list[str]]:
    """Return what is damaged in each finished artifact, by folder: in this one, or in all below it."""
    folder = artifact_folder(path)
    folders = [folder] if is_artifact(folder) else list_artifacts(folder)
    finished = [artifact for artifact in folders if (artifact / MANIFEST).is_file()]
    if not finished:
        raise ArtifactError(f"{folder} is no finished artifact, and there is none in it")
    return {str(artifact): list_damage(artifact) for artifact in finished}


def format_json(facts: Any) -> str:
    """Format facts as JSON in printable ASCII, so that no text of a post can control a terminal."""
    return json.dumps(_replace_non_finite(facts), indent=2, default=str)


def _replace_non_finite(value: Any) -> Any:
    """Turn NaN and infinity, which JSON lacks, into text."""
    if isinstance(value, dict):
        return {str(key): _replace_non_finite(child) for key, child in value.items()}
    if isinstance(value, list):
        return [_replace_non_finite(child) for child in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser(prog="python -m stages.inspect", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("path", nargs="?", type=Path, metavar="PATH", help="an artifact, or a folder of runs")
    group.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="two artifacts to compare")
    group.add_argument("--verify", type=Path, metavar="PATH",
                       help="an artifact, or a folder of runs: compare all files with the digests in the manifests")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    return parser


def main(words: list[str] | None = None) -> int:
    """Print the page; return 1 for damaged artifacts and, after one line, for a user's mistake."""
    arguments = build_parser().parse_args(words)
    try:
        if arguments.diff:
            facts = diff_artifacts(*map(artifact_folder, arguments.diff))
            lines = format_difference(facts)
        elif arguments.verify:
            facts = verify_path(arguments.verify)
            lines = [f"{folder}: {'; '.join(problems) or 'as published'}" for folder, problems in facts.items()]
        else:
            lines, facts = inspect_path(arguments.path)
    except (ArtifactError, OSError) as error:
        print(f"inspect: error: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    text = format_json(facts) if arguments.json else "\n".join(map(escape_controls, lines))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(bool(arguments.verify) and any(facts.values()))


if __name__ == "__main__":
    sys.exit(main())
