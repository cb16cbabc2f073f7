"""Pairs: questions with scored answers to preference pairs in Markdown, split by question.

    python -m stages.pairs --recipe configs/demo.yaml --posts results/demo/posts --out results/demo/pairs

Writes the folders finetune, reward, rl and evaluation with a `part-*.parquet` for each part of the posts (columns:
stages/stackexchange/pairs/table.py), metrics.json and README.md, a data set card. A question is in one split only; consumers of
prompts take each (site, qid) once. Parts that were done before a kill are not done again.
"""

from stages.runtime.command import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import json
import re
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from stages.recipe.data import Pairs
from stages.runtime.files import write_json, write_text
from stages.runtime.process_pool import ProcessPool
from stages.runtime.progress import Progress
from stages.stackexchange.dataset_card import pairs_card
from stages.stackexchange.markdown.convert import Limits
from stages.stackexchange.pairs.build import Group, Lengths, Rules, paired
from stages.stackexchange.pairs.counts import PairsTally
from stages.stackexchange.pairs.table import SPLITS, Shard
from stages.stackexchange.questions.table import parts_of

SCRATCH, METRICS = "scratch", "metrics.json"


def run(config: Pairs, out: Path, *, posts: Path, processes: int = 1, share: str = "1/1") -> dict:
    """Fill `out` and return counts: pairs_drawn = pairs + the sum of `dropped_pairs`, posts_in = posts_out + the sum of
    `dropped_posts`.

    `share` "3/50" makes the third of 50 shares of the parts, for stages.gather to bring together. The result does not
    depend on `processes`. Raises ValueError when no pair comes of all that `posts` holds.
    """
    parts = _share_of(parts_of(posts), share)
    scratch, told = out / SCRATCH, out / METRICS
    if not told.exists():  # a run that was killed at the very end has told already
        for folder in (scratch, *(out / split for split in SPLITS)):
            folder.mkdir(exist_ok=True)
        metrics = _total(_made(parts, _rules(config), out, scratch, processes))
        if not metrics["pairs"] and share == "1/1":
            raise ValueError(f"{posts}: no pair comes of its questions; dropped: {metrics['dropped_questions']}")
        write_text(out / "README.md", pairs_card(vars(config), metrics))
        write_json(told, metrics)
    shutil.rmtree(scratch, ignore_errors=True)
    return json.loads(told.read_text(encoding="utf-8"))


def _total(tallies: Iterator[dict]) -> dict:
    total = PairsTally()
    for tally in tallies:
        total.add(tally)
    return total.metrics()


def _share_of(parts: list[Path], share: str) -> list[Path]:
    asked = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", share, re.ASCII)
    if not asked or int(asked[1]) > int(asked[2]):
        raise ValueError(f"share {share!r}: give its number and how many there are, as 3/50")
    return parts[int(asked[1]) - 1::int(asked[2])]


def _rules(config: Pairs) -> Rules:
    limits = Limits(config.max_post_characters, config.max_post_tags, config.max_post_depth, config.max_post_blanks)
    lengths = Lengths(config.length_unit, config.tokenizer, (config.min_question_length, config.max_question_length),
                      (config.min_answer_length, config.max_answer_length))
    shares = tuple((name, getattr(config, f"{name}_share")) for name in SPLITS)
    return Rules(config.max_pairs_per_question, config.min_score_gap, config.seed, shares, config.markdown, limits,
                 lengths)


def _made(parts: list[Path], rules: Rules, out: Path, scratch: Path, processes: int) -> Iterator[dict]:
    """What was counted in each part, made now or before a kill."""
    sizes = {part: pq.read_metadata(part) for part in parts}
    todo = [part for part in parts if not _tally_of(part, scratch).exists()]
    groups = [Group(part, number, rules) for part in todo for number in range(sizes[part].num_row_groups)]
    progress = Progress("pair", sum(size.num_rows for size in sizes.values()), "questions")
    with ProcessPool(processes) as workers:
        results = workers.imap(paired, groups)
        for part in parts:
            if part in todo:
                _make(part, islice(results, sizes[part].num_row_groups), out, scratch, progress)
            else:
                progress.advance(sizes[part].num_rows)
            yield json.loads(_tally_of(part, scratch).read_text(encoding="utf-8"))
    progress.finish()


def _make(part: Path, results: Iterator[tuple[dict, dict]], out: Path, scratch: Path, progress: Progress) -> None:
    """The shards of one part: written in scratch space, moved when all are whole, and last what was counted."""
    shards = {split: Shard(scratch / f"{split}.parquet") for split in SPLITS}
    total = PairsTally()
    for tables, tally in results:
        for split, table in tables.items():
            shards[split].add(table)
        total.add(tally)
        progress.advance(tally["counts"]["posts_in"]["questions"])
    for split, shard in shards.items():
        shard.close()
        (scratch / f"{split}.parquet").replace(out / split / part.name)
    write_json(_tally_of(part, scratch), total.as_dict())


def _tally_of(part: Path, scratch: Path) -> Path:
    return scratch / f"{part.stem}.json"
