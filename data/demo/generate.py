"""Write the demo site in the format of the official Stack Exchange dumps: Posts.xml, alone or in a .7z archive.

python data/demo/generate.py --questions 8000 --seed 7 --out data/demo/demo.stackexchange.com.7z --statistics
"""

import argparse
import sys
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from xml.sax.saxutils import escape

if not __package__:  # run as a script: the imports below start at the repository root
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from data.demo.measure import statistics
from data.demo.simulate import Answer, Question, simulate

START = datetime(2019, 1, 1)
HOURS_TO_NEXT_QUESTION = 7.0  # means of exponential distributions
HOURS_TO_ANSWER = 10.0
DELETED_USER_SHARE = 0.02  # their posts have a name instead of an id
LICENSE = "CC BY-SA 4.0"
HEADER = '\ufeff<?xml version="1.0" encoding="utf-8"?>'  # starts with a byte order mark
NEWLINE = "\r\n"
ROW_ATTRIBUTES = (  # in the order of the official dumps
    "Id",
    "PostTypeId",
    "ParentId",
    "AcceptedAnswerId",
    "CreationDate",
    "Score",
    "ViewCount",
    "Body",
    "OwnerUserId",
    "OwnerDisplayName",
    "LastActivityDate",
    "Title",
    "Tags",
    "AnswerCount",
    "ContentLicense",
)


def posts_xml(questions: list[Question], seed: int) -> str:
    """Format Posts.xml. As in a real dump, rows are sorted by date, so answers are not next to their question."""
    rng = Random(seed)
    posts = _dated_posts(questions, rng)
    ids = {id(post): number for number, (_, post, _) in enumerate(posts, 1)}
    last_activity = {id(question): date for date, _, question in posts}  # the question's latest post wins
    rows = []
    for date, post, question in posts:
        if post is question:
            row = _question_row(question, ids, date, last_activity[id(question)])
        else:
            row = _answer_row(post, ids[id(question)], date)
        rows.append(_row_xml({"Id": ids[id(post)], **row, **_owner(post.user, rng), "ContentLicense": LICENSE}))
    return NEWLINE.join([HEADER, "<posts>", *rows, "</posts>"])


def _dated_posts(questions: list[Question], rng: Random) -> list[tuple[datetime, Question | Answer, Question]]:
    """Return (date, post, its question), sorted by date."""
    posts, asked = [], START
    for question in questions:
        asked += _waiting_time(rng, HOURS_TO_NEXT_QUESTION)
        posts.append((asked, question, question))
        posts += [(asked + _waiting_time(rng, HOURS_TO_ANSWER), answer, question) for answer in question.answers]
    return sorted(posts, key=lambda post: post[0])


def _waiting_time(rng: Random, mean_hours: float) -> timedelta:
    return timedelta(milliseconds=1 + round(rng.expovariate(1 / mean_hours) * 3_600_000))


def _question_row(question: Question, ids: dict[int, int], date: datetime, last: datetime) -> dict[str, object]:
    accepted = [ids[id(answer)] for answer in question.answers if answer.accepted]
    tags = dict.fromkeys(tag for fact in question.facts for tag in fact)  # an ordered set
    return {
        "PostTypeId": 1,
        **({"AcceptedAnswerId": accepted[0]} if accepted else {}),
        "CreationDate": _stamp(date),
        "Score": question.views // 100,
        "ViewCount": question.views,
        "Body": question.html,
        "LastActivityDate": _stamp(last),
        "Title": question.title,
        "Tags": "".join(f"<{tag}>" for tag in tags),
        "AnswerCount": len(question.answers),
    }


def _answer_row(answer: Answer, parent: int, date: datetime) -> dict[str, object]:
    return {
        "PostTypeId": 2,
        "ParentId": parent,
        "CreationDate": _stamp(date),
        "Score": answer.score,
        "Body": answer.html,
        "LastActivityDate": _stamp(date),
    }


def _owner(user: int, rng: Random) -> dict[str, object]:
    if rng.random() < DELETED_USER_SHARE:
        return {"OwnerDisplayName": f"user{user + 1}"}
    return {"OwnerUserId": user + 1}


def _row_xml(row: dict[str, object]) -> str:
    attributes = " ".join(f'{name}="{_escaped(row[name])}"' for name in ROW_ATTRIBUTES if name in row)
    return f"  <row {attributes} />"


def _escaped(value: object) -> str:
    return escape(str(value), {'"': "&quot;", "\n": "&#xA;"})


def _stamp(date: datetime) -> str:
    return date.isoformat(timespec="milliseconds")


def write(text: str, out: Path) -> Path:
    """Write Posts.xml to the folder or .7z archive `out`, and return the path of the file."""
    data = text.encode()
    if out.suffix == ".7z":
        import py7zr  # only needed for archives

        out.parent.mkdir(parents=True, exist_ok=True)
        with py7zr.SevenZipFile(out, "w", filters=[{"id": py7zr.FILTER_LZMA2, "preset": 9}]) as archive:
            archive.writestr(data, "Posts.xml")
        return out
    out.mkdir(parents=True, exist_ok=True)
    (out / "Posts.xml").write_bytes(data)
    return out / "Posts.xml"


def main(arguments: list[str] | None = None) -> None:
    """Generate the site that the command line describes."""
    parser = argparse.ArgumentParser(description="Write the synthetic demo site as a Stack Exchange dump.")
    parser.add_argument("--questions", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, help="a folder for Posts.xml, or a .7z archive")
    parser.add_argument("--statistics", action="store_true", help="print figures of the site")
    options = parser.parse_args(arguments)
    if not (options.out or options.statistics):
        parser.error("nothing to do: give --out or --statistics")
    questions = simulate(options.questions, options.seed)
    if options.out:
        path = write(posts_xml(questions, options.seed), options.out)
        print(f"{path}: {path.stat().st_size:,} bytes")
    if options.statistics:
        for name, figure in statistics(questions).items():
            print(f"{name:36} {figure:,}" if isinstance(figure, int) else f"{name:36} {figure:.3f}")


if __name__ == "__main__":
    main()
