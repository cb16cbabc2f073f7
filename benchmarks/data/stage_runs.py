"""Run the data stages by their command lines on a synthetic dump, and read their artifacts.

Files: FOLDER/dump-200MB-0/Posts.xml, posts/, pairs/.
"""

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pyarrow.parquet as parquet

from benchmarks.common.process_cost import Cost, measured
from benchmarks.data.synthetic_posts import write_posts_xml

RECIPE = "configs/stackllama.yaml"
DUMPS = "dump-*MB-*"


def dump(folder: Path, megabytes: float, seed: int) -> Path:
    """Return a Posts.xml of this size, written if the folder has none."""
    xml = folder / f"dump-{megabytes:g}MB-{seed}" / "Posts.xml"
    if not xml.exists():
        xml.parent.mkdir(parents=True, exist_ok=True)
        say(f"writing {xml}")
        draft = xml.with_name("Posts.xml.partial")
        write_posts_xml(draft, megabytes, seed)
        draft.rename(xml)
    return xml


def run_stage(stage: str, xml: Path, processes: int) -> Cost:
    """Run a stage by its command line, into an empty artifact beside the dump, and return its cost."""
    out = delete(xml.parent / stage)
    partial = delete(out.with_name(f"{stage}.partial"))
    source = ["--dump", xml] if stage == "posts" else ["--posts", xml.parent / "posts"]
    cost = measured("-m", f"stages.{stage}", "--recipe", RECIPE, *source, "--out", out, "--processes", processes,
                    watch=partial)
    say(f"{stage}, {xml.parent.name}, {processes} process(es): {cost.cpu:.1f} CPU s, {cost.wall:.1f} s, "
        f"{cost.peak_mb:.0f} MB")
    return cost


def read_metrics(xml: Path, stage: str) -> dict:
    """Read the metrics of the stage's artifact beside a dump."""
    return json.loads((xml.parent / stage / "manifest.json").read_text(encoding="utf-8"))["metrics"]


def _list_files(pairs: Path) -> list[Path]:
    return sorted(pairs.glob("*/*.parquet")) or sorted(pairs.glob("*.parquet"))


def count_posts(pairs: Path) -> int:
    """Count the distinct questions and answers in pairs: the conversions needed if no pair was dropped."""
    posts = set()
    for file in _list_files(pairs):
        for row in parquet.read_table(file, columns=["site", "qid", "response_j", "response_k"]).to_pylist():
            question = (row["site"], row["qid"])
            posts |= {question, (question, row["response_j"]), (question, row["response_k"])}
    return len(posts)


def hash_tables(folder: Path) -> dict[str, str]:
    """Compute the SHA-256 of every Parquet file of both artifacts."""
    files = sorted(file for stage in ("posts", "pairs") for file in (folder / stage).rglob("*.parquet"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def remove_dumps(folder: Path) -> None:
    """Delete the dumps and artifacts in `folder`, and nothing else."""
    for dump_folder in folder.glob(DUMPS):
        shutil.rmtree(dump_folder)


def delete(folder: Path) -> Path:
    """Delete a folder if it exists, and return its path."""
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)
