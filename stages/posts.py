"""Posts: dumps of Stack Exchange sites to questions with scored answers.

    python -m stages.posts --recipe configs/demo.yaml --dump data/demo --out results/demo/posts

Writes `part-*.parquet`, shuffled by seed; `quarantine.jsonl`, a line for each row that cannot be used; metrics.json and
README.md, a data set card. Memory is constant: tables are read in spans, each span leaves sorted runs in scratch space,
and each part is joined from its share of all runs. A restart after a kill does no finished work again.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import json
import shutil
from pathlib import Path

from stages.cards.dataset_card import render_posts_card
from stages.recipe.recipe import select_settings
from stages.recipe.sections.data import Posts
from stages.runtime.files import hash_input, write_json, write_text
from stages.runtime.process_pool import ProcessPool
from stages.stackexchange.dump.sources import Source, find_sources, select_sources
from stages.stackexchange.questions.counts import posts_metrics
from stages.stackexchange.questions.join import check_ids
from stages.stackexchange.questions.parts import PartTask, QuestionFilter, build_parts, publish_parts
from stages.stackexchange.questions.post_columns import ANSWER_BOT, WATERMARKS
from stages.stackexchange.questions.scan import plan_scans, run_scans, write_quarantine
from stages.stackexchange.questions.sorted_runs import list_run_files


def run(config: Posts, out: Path, *, dump: list[str], processes: int = 1) -> dict:
    """Fill `out` and return counts: rows_read = questions + answers + rows_set_aside + the sum of `dropped`.

    The columns are in stages/stackexchange/questions/table.py. Text stays as the source has it (HTML or Markdown). The
    result does not depend on `processes`. Raises ValueError if a source cannot be used or no question is left.
    """
    scratch, metrics_path = out / "scratch", out / "metrics.json"
    if not metrics_path.exists():  # else the run was killed after its last step
        scratch.mkdir(exist_ok=True)
        try:
            with ProcessPool(processes) as workers:
                metrics = convert(config, out, scratch, dump, workers)
        except ValueError:  # a rerun would fail in the same way, and the disk may be full
            shutil.rmtree(scratch)
            raise
        write_text(out / "README.md", render_posts_card(vars(config), metrics))
        write_json(metrics_path, metrics)
    shutil.rmtree(scratch, ignore_errors=True)
    return json.loads(metrics_path.read_text(encoding="utf-8"))


def convert(config: Posts, out: Path, scratch: Path, dump: list[str], workers: ProcessPool) -> dict:
    """Write the parts and the quarantine to `out`, and return the metrics."""
    # 1. Plan: find the sources, unpack their tables, split them into spans.
    given = select_sources(find_sources(dump), config.sites, needs_votes=config.votes == "up")
    sources, tasks = plan_scans(given, scratch, config.part_bytes, seed=config.seed,
                                max_row_bytes=config.max_row_bytes, exclude=_excluded_posts(config))

    # 2. Scan: read each span into sorted runs.
    try:
        posts, votes = run_scans(tasks, sources, config.max_bad_rows_share, workers)
    finally:
        write_quarantine(tasks, out / "quarantine.jsonl")

    # 3. Join the runs into parts: posts to their questions, and votes to their posts.
    runs, number_of_parts = list_run_files(scratch), tasks[0].parts
    runs["upvotes"] = check_ids(runs, sources, number_of_parts, config.seed, scratch, workers)
    question_filter = QuestionFilter(**select_settings(QuestionFilter, config))
    parts = [PartTask(number, runs, sources, question_filter, config.max_question_bytes,
                      scratch / f"part-{number:05d}.parquet") for number in range(number_of_parts)]
    metrics = posts_metrics(posts, votes, build_parts(parts, config.max_questions, workers))
    if not metrics["questions"]:
        raise ValueError(f"{', '.join(dump)}: no question is left of {metrics['rows_read']} rows; "
                         f"dropped: {metrics['dropped']}")

    metrics["source_files"] = _hash_source_files(given)

    # 4. Publish the parts.
    publish_parts(parts, config.part_bytes, out)
    return metrics


def _excluded_posts(config: Posts) -> tuple[str, ...]:
    return tuple(name for name, is_dropped in ((WATERMARKS, config.drop_watermarks),
                                               (ANSWER_BOT, config.drop_answer_bot)) if is_dropped)


def _hash_source_files(sources: list[Source]) -> dict[str, dict[str, str]]:
    """Compute the SHA-256 of each file that was read, by site and file name, to compare with published lists."""
    files = dict.fromkeys((source.site, Path(table.path)) for source in sources for table in source.tables)
    hashes: dict[str, dict[str, str]] = {}
    for site, path in files:
        hashes.setdefault(site, {})[path.name] = hash_input(path)
    return hashes
