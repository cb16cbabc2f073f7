"""Parts of the posts artifact: each holds the questions of a range of keys, and is made on its own, in any process."""

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.runtime.files import atomic_path, link_or_copy, write_json
from stages.stackexchange.questions.counts import Tally
from stages.stackexchange.questions.filters import Selection
from stages.stackexchange.questions.join import Origin, as_dicts, cuts, joined
from stages.stackexchange.questions.sorted_runs import RECORD_ORDER, part_of
from stages.stackexchange.questions.table import SCHEMA, questions_in, write_part


@dataclass(frozen=True)
class Part:
    """One piece of work: `out` is made of the keys of part `number` of `parts`, and last, beside it, its tally."""

    number: int
    runs: dict[str, list[Path]]  # by kind: posts, sizes, ups (empty: votes are the posts' own), records, recordsizes
    origins: list[Origin]
    selection: Selection
    max_question_bytes: int
    out: Path

    @property
    def tally(self) -> Path:
        return self.out.with_suffix(".json")


def make_part(part: Part, limit: int | None = None) -> dict[str, dict]:
    """Write the part and return its tally (see `Tally`). With `limit`, keep the first so many questions only."""
    if limit is None and part.tally.exists():
        return json.loads(part.tally.read_text())
    tally = Tally()
    with atomic_path(part.out) as draft:
        write_part(draft, _first(limit, _kept(part, tally), tally))
    pa.default_memory_pool().release_unused()  # or what parts leave behind adds up
    written = tally.as_dict()
    write_json(part.tally, written)
    return written


def _first(limit: int | None, kept: Iterator[dict], tally: "Tally") -> Iterator[dict]:
    """The first `limit` questions, each counted; all behind them are counted as dropped."""
    for question in islice(kept, limit):
        tally.keep(question)
        yield question
    for question in kept:
        tally.drop("over max_questions", 1 + len(question["answers"]))


def _kept(part: Part, tally: Tally) -> Iterator[dict]:
    for _, question in heapq.merge(_posts(part, tally), _records(part, tally), key=itemgetter(0)):
        if reason := part.selection.reason(question):
            tally.drop(reason, 1 + len(question["answers"]))
        else:
            yield question


def _posts(part: Part, tally: Tally) -> Iterator[tuple[int, dict]]:
    for cut in cuts(part.runs["sizes"], part.number, part.max_question_bytes, tally):
        yield from joined(part.runs["posts"], part.runs["ups"], part.number, cut, part.origins, tally)


def _records(part: Part, tally: Tally) -> Iterator[tuple[int, dict]]:
    """What came as questions already, from the published sets."""
    for cut in cuts(part.runs["recordsizes"], part.number, part.max_question_bytes, tally):
        for record in as_dicts(part_of(part.runs["records"], part.number, cut), RECORD_ORDER):
            yield record["key"], {name: record[name] for name in SCHEMA.names}


def passed_over(part: Part) -> dict[str, dict]:
    """The tally of a part behind the last question that is kept; nothing of it stays, should it be made already."""
    part.out.unlink(missing_ok=True)
    part.tally.unlink(missing_ok=True)
    tally = Tally()
    posts = sum(pc.sum(part_of(part.runs[kind], part.number)["posts"]).as_py() or 0
                for kind in ("sizes", "recordsizes") if part.runs[kind])
    tally.drop("over max_questions", posts, questions=0)
    return tally.as_dict()


def link_parts(parts: list[Part], part_bytes: int, out: Path) -> None:
    """The parts that were made into `out`, small neighbours (after a narrow selection) as one file."""
    for left in out.glob("part-*.parquet"):  # by a run that was interrupted here
        left.unlink()
    for number, files in enumerate(_neighbours(parts, part_bytes // 8)):
        target = out / f"part-{number:05d}.parquet"
        if len(files) == 1:
            link_or_copy(files[0], target)
        else:
            write_part(target, (question for file in files for question in questions_in(file)))


def _neighbours(parts: list[Part], enough_bytes: int) -> Iterator[list[Path]]:
    held, size = [], 0
    for part in parts:
        if part.out.exists() and (size_of_part := _text_bytes(part.out)):
            held.append(part.out)
            size += size_of_part
        if held and (size >= enough_bytes or part is parts[-1]):
            yield held
            held, size = [], 0


def _text_bytes(part: Path) -> int:
    about = pq.read_metadata(part)
    return sum(about.row_group(group).total_byte_size for group in range(about.num_row_groups))
