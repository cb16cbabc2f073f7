"""The data stages run by their command lines on a made dump, and what their artifacts hold.

    FOLDER/dump-200MB-0/Posts.xml, posts/, pairs/
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
    """A Posts.xml of this size, made once a folder."""
    xml = folder / f"dump-{megabytes:g}MB-{seed}" / "Posts.xml"
    if not xml.exists():
        xml.parent.mkdir(parents=True, exist_ok=True)
        say(f"making {xml}")
        draft = xml.with_name("Posts.xml.partial")
        write_posts_xml(draft, megabytes, seed)
        draft.rename(xml)
    return xml


def run_stage(stage: str, xml: Path, processes: int) -> Cost:
    """One stage by its command line, into an artifact beside the dump, from nothing."""
    out = emptied(xml.parent / stage)
    partial = emptied(out.with_name(f"{stage}.partial"))
    source = ["--dump", xml] if stage == "posts" else ["--posts", xml.parent / "posts"]
    cost = measured("-m", f"stages.{stage}", "--recipe", RECIPE, *source, "--out", out, "--processes", processes,
                    watch=partial)
    say(f"{stage}, {xml.parent.name}, {processes} process(es): {cost.cpu:.1f} CPU s, {cost.wall:.1f} s, "
         f"{cost.peak_mb:.0f} MB")
    return cost


def metrics_of(xml: Path, stage: str) -> dict:
    return json.loads((xml.parent / stage / "manifest.json").read_text(encoding="utf-8"))["metrics"]


def _tables(pairs: Path) -> list[Path]:
    return sorted(pairs.glob("*/*.parquet")) or sorted(pairs.glob("*.parquet"))


def needed_posts(pairs: Path) -> int:
    """Distinct questions and answers in the pairs written: what had to be converted when no pair was dropped."""
    posts = set()
    for file in _tables(pairs):
        for row in parquet.read_table(file, columns=["site", "qid", "response_j", "response_k"]).to_pylist():
            question = (row["site"], row["qid"])
            posts |= {question, (question, row["response_j"]), (question, row["response_k"])}
    return len(posts)


def digests_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every parquet file of both artifacts."""
    files = sorted(file for stage in ("posts", "pairs") for file in (folder / stage).rglob("*.parquet"))
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def remove_dumps(folder: Path) -> None:
    """Take away what was made below `folder`, and nothing else."""
    for made in folder.glob(DUMPS):
        shutil.rmtree(made)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
