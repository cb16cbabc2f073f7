"""A Posts.xml to questions with their answers: rows go to sorted runs by question id, then join range by range."""

import re
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow as pa

from stages.plumbing.progress import Progress
from stages.text.rows import Reading, rows
from stages.text.runs import Runs
from stages.text.scoring import answer_score

QUESTION, ANSWER = 1, 2
INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
LICENSES = (("2011-04-08", "CC BY-SA 2.5"), ("2018-05-02", "CC BY-SA 3.0"))  # until, name; 4.0 since
POST = pa.schema([("home", pa.int64()), ("kind", pa.int8()), ("id", pa.int64()), ("line", pa.int64()),
                  ("votes", pa.int64()), ("accepted", pa.int64()), ("body", pa.string()), ("title", pa.string()),
                  ("tags", pa.string()), ("date", pa.string()), ("author", pa.string()), ("license", pa.string())])
CLAIM = pa.schema([("id", pa.int64()), ("home", pa.int64()), ("line", pa.int64())])


class BadRowError(Exception):
    """This row cannot be used; the text says why."""


def questions(path: Path, site: str, reading: Reading) -> Iterator[dict]:
    """Question records (schema: stages/posts.py) of one Posts.xml, by question id. Counts go to `reading`.

    Raises ValueError as `rows` does, and when two different rows have one Id.
    """
    posts = Runs(reading.scratch / "posts", POST, ["home", "kind", "id", "line"])
    claims = Runs(reading.scratch / "claims", CLAIM, ["id", "line"])
    for line, row in rows(path, reading):
        try:
            post = _post(row, line)
        except BadRowError as reason:
            reading.set_aside(str(reason), line, row.get("Id"))
            continue
        if post is None:
            reading.counts["dropped: other post types"] += 1
            continue
        posts.add(post, size=len(post[6]) + len(post[7]))
        claims.add((post[2], post[0], line))
    reading.check_share()
    _refuse_double_ids(claims, reading.name)
    yield from _joined(posts, site, reading)


def _post(row: dict[str, str], line: int) -> tuple | None:
    """A row as a tuple of POST; None for wiki pages and other types; BadRowError when it cannot be used."""
    kind = _integer(row, "PostTypeId")
    post_id = _integer(row, "Id")
    if kind not in (QUESTION, ANSWER):
        return None
    votes = _integer(row, "Score")
    home = post_id if kind == QUESTION else _integer(row, "ParentId")
    accepted = row.get("AcceptedAnswerId")
    accepted = int(accepted) if accepted and INTEGER.fullmatch(accepted) else None
    return (home, kind, post_id, line, votes, accepted, row.get("Body", ""), row.get("Title", ""), row.get("Tags", ""),
            row.get("CreationDate", ""), _author(row), _license(row))


def _integer(row: dict[str, str], name: str) -> int:
    text = row.get(name, "")
    if not INTEGER.fullmatch(text):
        raise BadRowError(f"{name} is {text[:40]!r}, not a whole number" if text else f"no {name}")
    return int(text)


def _author(row: dict[str, str]) -> str:
    if name := row.get("OwnerDisplayName"):
        return name
    return f"user {row['OwnerUserId']}" if row.get("OwnerUserId") else "unknown"


def _license(row: dict[str, str]) -> str:
    """Dumps before 2020 do not say: the terms of the day then (stackoverflow.com/help/licensing)."""
    if stated := row.get("ContentLicense"):
        return stated
    return next((name for until, name in LICENSES if row.get("CreationDate", "") < until), "CC BY-SA 4.0")


def _refuse_double_ids(claims: Runs, name: str) -> None:
    """An Id that two questions, or a question and an answer, or answers to two questions have."""
    for table in claims.ranges():
        ids, homes, lines = (table[column].to_numpy() for column in ("id", "home", "line"))
        clash = ((ids[1:] == ids[:-1]) & (homes[1:] != homes[:-1])).nonzero()[0]
        if len(clash):
            raise _double(name, ids[clash[0]], lines[clash[0]], lines[clash[0] + 1])


def _double(name: str, post_id: int, first: int, second: int) -> ValueError:
    return ValueError(f"{name}: two different rows have Id {post_id}: lines {first} and {second}; remove one")


def _joined(posts: Runs, site: str, reading: Reading) -> Iterator[dict]:
    progress = Progress(f"join {site}", None, "questions")
    for table in posts.ranges():
        for _, group in groupby(_records(table), key=itemgetter("home")):
            question, *answers = _without_copies(group, reading)
            if question["kind"] == QUESTION:
                yield _question(question, answers, site, reading)
                progress.advance()
            else:
                reading.counts["dropped: answers without their question"] += 1 + len(answers)
    progress.finish()


def _records(table: pa.Table) -> Iterator[dict]:
    for batch in table.to_batches(max_chunksize=1000):
        yield from batch.to_pylist()


def _without_copies(group: Iterator[dict], reading: Reading) -> list[dict]:
    """Rows of one question, the question first; an identical row counts once."""
    kept: dict[int, dict] = {}
    for row in group:
        first = kept.setdefault(row["id"], row)
        if first is not row:
            if first | {"line": 0} != row | {"line": 0}:
                raise _double(reading.name, row["id"], first["line"], row["line"])
            reading.counts["dropped: identical copies of a row"] += 1
    return list(kept.values())


def _question(question: dict, answers: list[dict], site: str, reading: Reading) -> dict:
    accepted = question["accepted"]
    if accepted is not None and all(accepted != a["id"] for a in answers):
        reading.counts["accepted answers not in the file"] += 1
    return {
        "question_id": question["id"], "site": site, "title": question["title"], "question": question["body"],
        "markup": "html", "tags": re.findall(r"[^<>|]+", question["tags"]), "date": question["date"],
        "url": f"https://{site}/questions/{question['id']}", "author": question["author"],
        "license": question["license"],
        "answers": [_answer(a, a["id"] == accepted) for a in answers],
    }


def _answer(answer: dict, accepted: bool) -> dict:
    return {"id": answer["id"], "text": answer["body"], "author": answer["author"], "votes": answer["votes"],
            "accepted": accepted, "score": answer_score(answer["votes"], accepted)}
