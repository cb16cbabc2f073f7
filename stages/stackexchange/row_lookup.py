"""Find questions in a posts or pairs artifact by id or tag. Reads keys first, and texts only of what matches."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq

from stages.stackexchange.pairs.table import SPLITS
from stages.stackexchange.questions.table import list_parts

POST_KEYS = ["site", "question_id", "tags"]
PAIR_KEYS = ["site", "qid"]
SIDES = ("j", "k")  # better, worse


def match_id(text: str) -> Callable[[dict], bool]:
    """Build a test for '17' or, of one site, 'beer.stackexchange.com/17'; ValueError for anything else."""
    site, _, number = text.rpartition("/")
    if not number.isascii() or not number.isdecimal():
        raise ValueError(f"--id takes a question's number or SITE/NUMBER, not {text!r}")
    return lambda row: row.get("question_id", row.get("qid")) == int(number) and site in ("", row["site"])


def match_tag(tag: str) -> Callable[[dict], bool]:
    """Build a test for questions with a tag."""
    return lambda row: tag in (row["tags"] or ())


def find_questions(posts: Path, matches: Callable[[dict], bool], max_questions: int) -> list[dict]:
    """Return the first records of a posts artifact that match."""
    rows = _find_rows(list_parts(posts), POST_KEYS, matches)
    return [row for row, _ in zip(rows, range(max_questions), strict=False)]


def find_pairs(pairs: Path, matches: Callable[[dict], bool], max_questions: int) -> list[dict]:
    """Return the first questions of a pairs artifact that match, each with its split, answers and pairs of these.

    A pair is (better, worse), as indices of the answers, which are sorted by falling score.
    """
    questions: dict[tuple, dict] = {}
    for split in SPLITS:
        for row in _find_rows(sorted((pairs / split).glob("part-*.parquet")), PAIR_KEYS, matches):
            key = (row["site"], row["qid"])
            if key not in questions and len(questions) == max_questions:
                return [_number_answers(question) for question in questions.values()]
            question = questions.setdefault(key, {
                **{name: row[name] for name in ("site", "qid", "question", "date")}, "split": split,
                "url": (row["metadata"] or [None])[0], "answers": {}, "pairs": []})
            question["pairs"].append(tuple(_add_answer(question["answers"], row, side) for side in SIDES))
    return [_number_answers(question) for question in questions.values()]


def _find_rows(files: list[Path], columns: list[str], matches: Callable[[dict], bool]) -> Iterator[dict]:
    """Yield the rows that match by `columns`; of other row groups, no other column is read."""
    for file in files:
        with pq.ParquetFile(file) as table:
            for group in range(table.num_row_groups):
                keys = table.read_row_group(group, columns=columns).to_pylist()
                rows = [number for number, row in enumerate(keys) if matches(row)]
                if rows:
                    yield from table.read_row_group(group).take(rows).to_pylist()


def _add_answer(answers: dict[str, dict], row: dict, side: str) -> str:
    """Add an answer of a pair by its text; return the text."""
    author_index = 1 + SIDES.index(side)  # the question's author comes first
    answers.setdefault(row[f"response_{side}"], {
        "id": row[f"answer_{side}"], "score": row[f"score_{side}"], "text": row[f"response_{side}"],
        "author": (row["authors"] or [None] * 3)[author_index]})
    return row[f"response_{side}"]


def _number_answers(question: dict) -> dict:
    answers = sorted(question["answers"].values(), key=lambda answer: -answer["score"])
    numbers = {answer["text"]: number for number, answer in enumerate(answers)}
    return question | {"answers": answers, "pairs": sorted(
        tuple(numbers[text] for text in pair) for pair in question["pairs"])}
