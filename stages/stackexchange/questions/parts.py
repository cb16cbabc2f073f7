"""Build the parts of the posts artifact: the questions of a range of keys each, in any process."""

import heapq
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.runtime.files import atomic_path, link_or_copy, write_json
from stages.runtime.process_pool import ProcessPool
from stages.runtime.progress import Progress
from stages.stackexchange.dump.sources import Source
from stages.stackexchange.questions.counts import Counts, count_question
from stages.stackexchange.questions.join import join_posts, key_ranges, sorted_rows
from stages.stackexchange.questions.sorted_runs import RECORD_ORDER, read_part
from stages.stackexchange.questions.table import SCHEMA, group_by_size, read_questions, write_questions

CODE_LANGUAGE = re.compile(r"""<(?:pre|code)\b[^<>]*?class\s*=\s*["'][^"'<>]*?\blang(?:uage)?-([\w+#.-]+)""", re.ASCII)


@dataclass(frozen=True)
class QuestionFilter:
    """Which questions are kept. A question is dropped for the first reason that applies, and counted under it.

    An empty tuple or None is no restriction. Languages are in lower case.
    """

    sites: tuple[str, ...]
    tags: tuple[str, ...]
    asked_from: str | None
    asked_before: str | None
    code_languages: tuple[str, ...]
    min_answers: int

    def drop_reason(self, question: dict) -> str | None:
        """Return why a record (schema: stages/stackexchange/questions/table.py) is dropped; None if it is kept."""
        date = question["date"].replace("/", "-")  # the published tables write 2015/09/02
        if self.sites and question["site"] not in self.sites:
            return "of another site"
        if self.tags and not set(self.tags) & set(question["tags"]):
            return "without one of the tags"
        if (self.asked_from and date < self.asked_from) or (self.asked_before and date >= self.asked_before):
            return "asked outside the dates"
        if len(question["answers"]) < self.min_answers:
            return "too few answers"
        if self.code_languages and not set(self.code_languages) & _code_languages(question):
            return "no code in one of the languages"
        return None


def _code_languages(question: dict) -> set[str]:
    """Return the languages of code blocks in the question and its answers, in lower case."""
    texts = (question["question"], *(answer["text"] for answer in question["answers"]))
    return {name.lower() for text in texts for name in CODE_LANGUAGE.findall(text)}


@dataclass(frozen=True)
class PartTask:
    """A part to build: `out` from the runs, and last, beside it, its counts."""

    number: int
    runs: dict[str, list[Path]]  # posts, sizes, upvotes (empty: votes are the posts' own), records, record_sizes
    sources: list[Source]
    question_filter: QuestionFilter
    max_question_bytes: int
    out: Path

    @property
    def counts_path(self) -> Path:
        """Path of the part's counts: the part is done if it exists."""
        return self.out.with_suffix(".json")


def build_parts(parts: list[PartTask], max_questions: int | None, workers: ProcessPool) -> Counts:
    """Build the parts, with at most `max_questions` questions in all, and return the sum of their counts."""
    total, limit = Counts(), math.inf if max_questions is None else max_questions
    progress = Progress("posts: join", len(parts), "parts")
    results = workers.imap(build_part, parts)
    for part in parts:
        remaining = limit - total["questions"].total()
        if not remaining:
            results.close()  # also drops the parts that workers build in advance
            counts = skip_part(part)
        else:
            counts = next(results)
            if sum(counts.get("questions", {}).values()) > remaining:
                counts = build_part(part, remaining)
        total.add(counts)
        progress.advance(1, f"{total['questions'].total():,} questions")
    progress.finish()
    return total


def build_part(part: PartTask, max_questions: int | None = None) -> dict[str, dict]:
    """Write the part, or its first `max_questions` questions, and return its counts (see `count_question`)."""
    if max_questions is None and part.counts_path.exists():
        return json.loads(part.counts_path.read_text())
    counts = Counts()
    with atomic_path(part.out) as draft:
        write_questions(draft, _limit(max_questions, _filter_questions(part, counts), counts))
    pa.default_memory_pool().release_unused()  # else memory grows from part to part
    write_json(part.counts_path, counts.as_dict())
    return counts.as_dict()


def skip_part(part: PartTask) -> dict[str, dict]:
    """Delete a part behind the last question wanted, if it was built, and return its posts as dropped."""
    part.out.unlink(missing_ok=True)
    part.counts_path.unlink(missing_ok=True)
    counts = Counts()
    posts = sum(pc.sum(read_part(part.runs[kind], part.number)["posts"]).as_py() or 0
                for kind in ("sizes", "record_sizes") if part.runs[kind])
    counts.drop("over max_questions", posts, questions=0)
    return counts.as_dict()


def _limit(max_questions: int | None, questions: Iterator[dict], counts: Counts) -> Iterator[dict]:
    """Yield and count the first questions; the others are counted as dropped."""
    for question in islice(questions, max_questions):
        count_question(question, counts)
        yield question
    for question in questions:
        counts.drop("over max_questions", 1 + len(question["answers"]))


def _filter_questions(part: PartTask, counts: Counts) -> Iterator[dict]:
    for _, question in heapq.merge(_join(part, counts), _read_records(part, counts), key=itemgetter(0)):
        if reason := part.question_filter.drop_reason(question):
            counts.drop(reason, 1 + len(question["answers"]))
        else:
            yield question


def _join(part: PartTask, counts: Counts) -> Iterator[tuple[int, dict]]:
    for keys in key_ranges(part.runs["sizes"], part.number, part.max_question_bytes, counts):
        yield from join_posts(part.runs, part.number, keys, part.sources, counts)


def _read_records(part: PartTask, counts: Counts) -> Iterator[tuple[int, dict]]:
    """Yield (key, question record) of the published tables, which hold whole questions."""
    for keys in key_ranges(part.runs["record_sizes"], part.number, part.max_question_bytes, counts):
        for row in sorted_rows(read_part(part.runs["records"], part.number, keys), RECORD_ORDER):
            yield row["key"], {name: row[name] for name in SCHEMA.names}


def publish_parts(parts: list[PartTask], part_bytes: int, out: Path) -> None:
    """Link the parts that were built into `out`; small neighbours, left by a narrow filter, become one file."""
    for stale in out.glob("part-*.parquet"):  # of a run that was interrupted here
        stale.unlink()
    filled = [part.out for part in parts if part.out.exists() and _text_bytes(part.out)]
    for number, (files, _) in enumerate(group_by_size(filled, _text_bytes, part_bytes // 8)):
        target = out / f"part-{number:05d}.parquet"
        if len(files) == 1:
            link_or_copy(files[0], target)
        else:
            write_questions(target, (question for file in files for question in read_questions(file)))


def _text_bytes(file: Path) -> int:
    metadata = pq.read_metadata(file)
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
