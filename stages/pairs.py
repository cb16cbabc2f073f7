"""Pairs: questions with scored answers to preference pairs in Markdown, split by question.

    python -m stages.pairs --recipe configs/demo.yaml --posts results/demo/posts --out results/demo/pairs

Writes the folders finetune, reward, rl and evaluation with a `part-*.parquet` for each part of the posts (columns:
stages/stackexchange/pairs/table.py), metrics.json and README.md, a data set card. A question is in one split only; a
consumer of prompts takes each (site, qid) once. A restart after a kill builds no finished part again.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import json
import re
import shutil
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq

from stages.cards.dataset_card import render_pairs_card
from stages.recipe.sections.data import Pairs
from stages.runtime.files import check_free_space, used_bytes, write_json, write_text
from stages.runtime.process_pool import ProcessPool
from stages.runtime.progress import Progress
from stages.stackexchange.pairs.build import LengthLimits, PairRules, build_pairs
from stages.stackexchange.pairs.counts import PairCounts, print_split_sizes
from stages.stackexchange.pairs.table import SPLITS, PairsWriter
from stages.stackexchange.questions.table import list_parts

SIZE_FACTOR = 2  # pairs to posts, both compressed: 0.96 to 1.41 on four sites


def run(config: Pairs, out: Path, *, posts: Path, processes: int = 1, share: str = "1/1") -> dict:
    """Fill `out` and return counts: pairs_drawn = pairs + the sum of `dropped_pairs`, posts_in = posts_out + the sum of
    `dropped_posts`.

    `share` "3/50" processes the third of 50 shares of the parts, for stages.gather to combine. The result does not
    depend on `processes`. Raises ValueError if `posts` yields no pair.
    """
    parts = _select_share(list_parts(posts), share)
    scratch, metrics_path = out / "scratch", out / "metrics.json"
    if not metrics_path.exists():  # else the run was killed after its last step
        needed_bytes = SIZE_FACTOR * used_bytes(*parts) - used_bytes(out)
        check_free_space("pairs", out, needed_bytes)
        for folder in (scratch, *(out / split for split in SPLITS)):
            folder.mkdir(exist_ok=True)
        total = PairCounts()
        for counts in _build_parts(parts, _pair_rules(config), out, scratch, processes):
            total.add(counts)
        metrics = total.metrics()
        if not metrics["pairs"] and share == "1/1":
            raise ValueError(f"{posts}: no pair comes of its questions; dropped: {metrics['dropped_questions']}")
        write_text(out / "README.md", render_pairs_card(vars(config), metrics))
        write_json(metrics_path, metrics)
    shutil.rmtree(scratch, ignore_errors=True)
    metrics = json.loads(metrics_path.read_text(encoding="utf-8"))
    if share == "1/1":
        print_split_sizes(vars(config), metrics)
    return metrics


def _select_share(parts: list[Path], share: str) -> list[Path]:
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", share, re.ASCII)
    if not match or int(match[1]) > int(match[2]):
        raise ValueError(f"share {share!r}: give its number and the number of shares, as 3/50")
    return parts[int(match[1]) - 1::int(match[2])]


def _pair_rules(config: Pairs) -> PairRules:
    lengths = LengthLimits(config.length_unit, config.tokenizer,
                           (config.min_question_length, config.max_question_length),
                           (config.min_answer_length, config.max_answer_length))
    shares = tuple((name, getattr(config, f"{name}_share")) for name in SPLITS)
    return PairRules(config.max_pairs_per_question, config.min_score_gap, config.later_wins, config.seed, shares,
                     config.markdown, lengths)


def _build_parts(parts: list[Path], rules: PairRules, out: Path, scratch: Path, processes: int) -> Iterator[dict]:
    """Yield the counts of each part, built now or before a kill."""
    metadata = {part: pq.read_metadata(part) for part in parts}
    unfinished = [part for part in parts if not _counts_path(part, scratch).exists()]
    row_groups = [(part, number) for part in unfinished for number in range(metadata[part].num_row_groups)]
    progress = Progress("pairs", sum(part.num_rows for part in metadata.values()), "questions")
    with ProcessPool(processes) as workers:
        results = workers.imap(partial(build_pairs, rules=rules), row_groups)
        for part in parts:
            if part in unfinished:
                _write_part(part, islice(results, metadata[part].num_row_groups), out, scratch, progress)
            else:
                progress.advance(metadata[part].num_rows)
            yield json.loads(_counts_path(part, scratch).read_text(encoding="utf-8"))
    progress.finish()


def _write_part(part: Path, results: Iterator[tuple[dict, dict]], out: Path, scratch: Path, progress: Progress) -> None:
    """Write the pairs of one part to scratch space, move the files when all are complete, and write the counts last."""
    writers = {split: PairsWriter(scratch / f"{split}.parquet") for split in SPLITS}
    total = PairCounts()
    for tables, counts in results:
        for split, table in tables.items():
            writers[split].add(table)
        total.add(counts)
        progress.advance(counts["counts"]["posts_in"]["questions"])
    for split, writer in writers.items():
        writer.close()
        (scratch / f"{split}.parquet").replace(out / split / part.name)
    write_json(_counts_path(part, scratch), total.as_dict())


def _counts_path(part: Path, scratch: Path) -> Path:
    return scratch / f"{part.stem}.json"
