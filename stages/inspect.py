"""Inspect: show what an artifact holds and comes from, or the state of all runs in a folder.

    python -m stages.inspect results/demo/sft                    # or a results/demo/sft.partial
    python -m stages.inspect results/
    python -m stages.inspect --verify results/demo               # hash every file of every artifact
    python -m stages.inspect results/demo/pairs --id 17          # or, of posts, --tag TAG: questions with answers
    python -m stages.inspect results/demo/pairs --export trl --out pairs.parquet

Reads only, but for --export: without --verify no weights, and of a table only its metadata and first rows, or those
that --id and --tag ask for. Not a stage: it makes no artifact. `python -m stages.compare A B` shows what differs.
An artifact is stale if an input is not the one its manifest names, or its settings are not those of the run's recipe.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from stages.artifacts.artifact import MANIFEST, PARTIAL, ArtifactError, artifact_folder
from stages.artifacts.manifest import is_artifact, list_damage, read_record
from stages.artifacts.run_facts import list_artifacts, list_runs
from stages.command_line.option_parser import OptionParser
from stages.command_line.start import close_output, print_text
from stages.inspection.artifact_facts import describe_artifact
from stages.inspection.text_pages import format_artifact, format_questions, format_runs
from stages.render.terminal import escape_controls
from stages.stackexchange.pairs.table import SPLITS, export_preferences
from stages.stackexchange.row_lookup import find_pairs, find_questions, match_id, match_tag

MAX_QUESTIONS = 3


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


def find_rows(path: Path, question: str | None, tag: str | None, max_questions: int) -> tuple[list[str], list[dict]]:
    """Return the page and the rows of the questions with this id or tag, in a posts or pairs artifact."""
    folder = artifact_folder(path)
    stage = read_record(folder).manifest.get("stage")
    if stage not in ("posts", "pairs", "gather"):
        raise ArtifactError(f"{folder} holds no questions: give a posts or a pairs artifact")
    if tag and stage != "posts":
        raise ArtifactError(f"{folder} has no tags: give the posts artifact, and then an --id of its questions here")
    find = find_questions if stage == "posts" else find_pairs
    rows = find(folder, match_id(question) if question else match_tag(tag), max_questions)
    if not rows:
        raise ArtifactError(f"{folder} has no question {question or f'with the tag {tag}'}")
    return format_questions(rows), rows


def export_pairs(path: Path, split: str, out: Path | None) -> tuple[list[str], dict]:
    """Write a split of a pairs artifact for TRL; return the page and the facts."""
    folder = artifact_folder(path)
    if read_record(folder).manifest.get("stage") not in ("pairs", "gather"):
        raise ArtifactError(f"{folder} is no pairs artifact: only pairs can be exported")
    if out is None:
        raise ArtifactError("--export needs --out FILE.parquet or FILE.jsonl")
    count = export_preferences(folder, split, out)
    return [f"{out}: {count:,} rows of prompt, chosen, rejected, from the split {split}"], {
        "file": str(out), "rows": count, "split": split}


def format_json(facts: Any) -> str:
    """Format facts as JSON in printable ASCII, so that no text of a post can control a terminal; NaN becomes text."""
    return json.dumps(json.loads(json.dumps(facts, default=str), parse_constant=str), indent=2)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser("inspect", __doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("path", nargs="?", type=Path, metavar="PATH", help="an artifact, or a folder of runs")
    group.add_argument("--verify", type=Path, metavar="PATH",
                       help="an artifact, or a folder of runs: compare all files with the digests in the manifests")
    actions = parser.add_mutually_exclusive_group()
    actions.add_argument("--id", metavar="[SITE/]NUMBER", help="of a posts or pairs artifact: show this question")
    actions.add_argument("--tag", help="of a posts artifact: show the first questions with this tag")
    actions.add_argument("--export", choices=("trl",), help="of a pairs artifact: write prompt, chosen and rejected")
    parser.add_argument("--questions", type=int, default=MAX_QUESTIONS, metavar="N",
                        help=f"how many questions --id and --tag show at most (default: {MAX_QUESTIONS})")
    parser.add_argument("--split", choices=SPLITS, default="reward", help="that --export writes (default: reward)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="that --export writes: .parquet or .jsonl")
    parser.add_argument("--json", action="store_true", help="print the same facts as JSON")
    return parser


def main(words: list[str] | None = None) -> int:
    """Print the page; return 1 for damaged artifacts and, after one line, for a user's mistake."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    if not arguments.path and (arguments.id or arguments.tag or arguments.export):
        parser.error("--id, --tag and --export need the folder of an artifact")
    if arguments.questions < 1:
        parser.error(f"--questions must be at least 1, not {arguments.questions}")
    try:
        lines, facts = _answer(arguments)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        close_output()
        return 0
    except (ValueError, OSError) as error:  # ArtifactError is a ValueError
        print(f"inspect: error: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    text = format_json(facts) if arguments.json else "\n".join(map(escape_controls, lines))
    print_text(text)
    return int(bool(arguments.verify) and any(facts.values()))


def _answer(arguments: argparse.Namespace) -> tuple[list[str], Any]:
    if arguments.verify:
        facts = verify_path(arguments.verify)
        return [f"{folder}: {'; '.join(problems) or 'as published'}" for folder, problems in facts.items()], facts
    if arguments.export:
        return export_pairs(arguments.path, arguments.split, arguments.out)
    if arguments.id or arguments.tag:
        return find_rows(arguments.path, arguments.id, arguments.tag, arguments.questions)
    return inspect_path(arguments.path)


if __name__ == "__main__":
    sys.exit(main())
