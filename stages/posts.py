"""Posts: dumps of Stack Exchange sites to questions with scored answers.

    python -m stages.posts --recipe configs/demo.yaml --dump data/demo --out results/demo/posts

Writes `part-*.parquet`, by site and question id, and `quarantine.jsonl`, a line for each row that cannot be used.
"""

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from stages.recipe import Posts
from stages.text.questions import Parts
from stages.text.rows import Reading
from stages.text.sources import Source, sources_of

SCRATCH = "scratch"
DROPPED = "dropped: "


def run(config: Posts, out: Path, *, dump: list[str]) -> dict:
    """Fill `out` and return counts: rows_read = questions + answers + rows_set_aside + the sum of `dropped`.

    The columns are in stages/text/questions.py. Text stays as the source has it (HTML or Markdown).
    Raises ValueError with one line for people when a source cannot be used or nothing comes of all of them.
    """
    sources = sources_of(dump)
    for left in out.glob("part-*.parquet"):  # by a run that was interrupted
        left.unlink()
    total: Counter = Counter()
    sites: dict[str, Counter] = {}
    with (open(out / "quarantine.jsonl", "w", encoding="utf-8") as quarantine,
          Parts(out, config.questions_per_part) as parts):
        for source in sources:
            for question in _kept(source, config, out, quarantine, total):
                parts.add(question)
                sites.setdefault(question["site"], Counter()).update(questions=1, answers=len(question["answers"]))
    metrics = _metrics(total, sites)
    if not metrics["questions"]:
        raise ValueError(f"{', '.join(dump)}: no question with at least {config.min_answers} answers; "
                         f"dropped: {metrics['dropped']}")
    return metrics


def _kept(source: Source, config: Posts, out: Path, quarantine: TextIO, total: Counter) -> Iterator[dict]:
    """Questions of one source with enough answers; what was counted is added to `total` at the end."""
    with _scratch(out) as scratch:
        reading = Reading(source.place, scratch, quarantine, config.max_row_bytes, config.max_bad_rows_share)
        for question in source.questions(reading):
            answers = len(question["answers"])
            if answers >= config.min_answers:
                yield question
            else:
                reading.counts["dropped: questions with too few answers"] += 1
                reading.counts["dropped: answers of questions with too few"] += answers
    total.update(reading.counts)


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """An empty folder inside `out`, gone afterwards; one that a killed run left is emptied first."""
    folder = out / SCRATCH
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _metrics(total: Counter, sites: dict[str, Counter]) -> dict:
    dropped = {key[len(DROPPED):]: count for key, count in sorted(total.items()) if key.startswith(DROPPED)}
    kept = {name: sum(site[name] for site in sites.values()) for name in ("questions", "answers")}
    read = {name: total[name] for name in ("rows_read", "rows_set_aside", "bytes_read")}
    return kept | read | {"accepted_answers_not_in_the_file": total["accepted answers not in the file"],
                          "dropped": dropped, "sites": {site: dict(counts) for site, counts in sites.items()}}


if __name__ == "__main__":
    from stages.plumbing.command import main
    main(run)
