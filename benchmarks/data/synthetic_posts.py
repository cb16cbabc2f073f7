"""Write a synthetic Posts.xml of any size, in the dumps' format and with the shape of real posts.

    python -m benchmarks.data.synthetic_posts OUT --megabytes 200 --seed 0

Rows are sorted by Id and by time. Most answers follow their question within some rows, a few half a million rows later.
The file depends only on size and seed. Text is joined from pieces that are escaped once, which gives 30 MB/s.
"""

import argparse
import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

from benchmarks.data.synthetic_prose import Pieces, attribute, pieces

MEGABYTE = 1_000_000
ROW_BYTES = 2090  # on average
BODY_MEDIAN, BODY_SPREAD, BODY_LONGEST = 1070, 0.85, 30_000  # HTML characters before the last block; log-normal
# Answers of each of a hundred questions: 1.5 on average, with a long tail.
FEW_ANSWERS = [0] * 25 + [1] * 46 + [2] * 13 + [3] * 7 + [4] * 4 + [5] * 2 + [6] * 1
MANY_ANSWERS = 8
NEAR_MEDIAN, NEAR_SPREAD, FAR, FARTHEST = 15, 2.0, 0.05, 500_000  # rows between a question and an answer
FIRST_DAY, SECONDS_A_ROW = datetime(2009, 1, 1), 150
LICENSES = (("2011-04-08", "CC BY-SA 2.5"), ("2018-05-02", "CC BY-SA 3.0"), ("9", "CC BY-SA 4.0"))  # until, name


def write_posts_xml(path: Path, megabytes: float, seed: int = 0) -> int:
    """Write at least `megabytes`, by less than a row more, and return the number of rows."""
    size, rows = int(megabytes * MEGABYTE), 0
    with open(path, "wb") as stream:
        written = stream.write(b'<?xml version="1.0" encoding="utf-8"?>\n<posts>\n')
        for row in _rows(random.Random(seed), max(1, size // ROW_BYTES)):
            if written >= size:
                break
            written += stream.write(row.encode())
            rows += 1
        stream.write(b"</posts>\n")
    return rows


def _rows(rng: random.Random, expected: int) -> Iterator[str]:
    """Yield rows without end. Each takes a slot; a question reserves later slots for its answers, to know their Ids.

    Memory holds the reserved slots: about ten thousand, whatever the size of the file.
    """
    text, reserved = pieces(), {}
    for slot in count():
        if slot in reserved:
            yield _answer(rng, text, slot, *reserved.pop(slot))
        else:
            slots = [_reserve(rng, reserved, slot, expected - slot) for _ in range(_answer_count(rng))]
            votes = _votes(rng, len(slots))
            for answer, score in zip(slots, votes, strict=True):
                reserved[answer] = (slot, score)
            yield _question(rng, text, slot, _accepted(rng, slots, votes), len(slots))


def _answer_count(rng: random.Random) -> int:
    number = int(rng.random() * 100)
    return FEW_ANSWERS[number] if number < len(FEW_ANSWERS) else int(MANY_ANSWERS * rng.paretovariate(2.2))


def _reserve(rng: random.Random, reserved: dict, slot: int, remaining: int) -> int:
    """Reserve a free slot behind a question's, mostly near it and before the expected end of the file."""
    if rng.random() < FAR:
        distance = int(rng.random() * FARTHEST)
    else:
        distance = int(rng.lognormvariate(math.log(NEAR_MEDIAN), NEAR_SPREAD))
    answer = slot + 1 + distance % max(remaining, NEAR_MEDIAN)
    while answer in reserved:
        answer += 1
    reserved[answer] = None
    return answer


def _votes(rng: random.Random, answers: int) -> list[int]:
    """Draw the net votes of a question's answers; they share the question's popularity."""
    popularity = rng.gauss(0.2, 1.0)
    return [-int(rng.paretovariate(2)) if rng.random() < 0.03 else int(math.exp(popularity + rng.gauss(0, 0.75)))
            for _ in range(answers)]


def _accepted(rng: random.Random, slots: list[int], votes: list[int]) -> int | None:
    """Draw the slot of the accepted answer, mostly that with the most votes."""
    if not slots or rng.random() > 0.6:
        return None
    return slots[votes.index(max(votes))] if rng.random() < 0.7 else rng.choice(slots)


def _id(slot: int) -> int:
    """Return a slot's Id; every fifth Id is missing, as of a deleted post."""
    return 4 + slot * 5 // 4


def _question(rng: random.Random, text: Pieces, slot: int, accepted: int | None, answers: int) -> str:
    accepts = "" if accepted is None else f' AcceptedAnswerId="{_id(accepted)}"'
    tags = "".join(f"&lt;{tag}&gt;" for tag in rng.sample(text.tags, rng.randint(1, 5)))
    return _row(rng, text, slot, f' PostTypeId="1"{accepts}', int(math.exp(rng.gauss(0.3, 1.1))) - 1,
                f' ViewCount="{int(rng.lognormvariate(6, 1.5))}"',
                f' Title="{" ".join(rng.sample(text.phrases, 2))}?" Tags="{tags}" AnswerCount="{answers}"')


def _answer(rng: random.Random, text: Pieces, slot: int, question: int, score: int) -> str:
    return _row(rng, text, slot, f' PostTypeId="2" ParentId="{_id(question)}"', score, "", "")


def _row(rng: random.Random, text: Pieces, slot: int, kind: str, score: int, views: str, about: str) -> str:
    created = FIRST_DAY + timedelta(seconds=slot * SECONDS_A_ROW, milliseconds=int(rng.random() * 1000))
    active = created + timedelta(seconds=int(rng.lognormvariate(9, 3)) % 10**8, milliseconds=500)
    date = created.isoformat(timespec="milliseconds")
    terms = next(name for until, name in LICENSES if date < until)
    owner = f'OwnerUserId="{int(1000 * rng.paretovariate(0.5)) % 20_000_000}"'
    if rng.random() < 0.01:  # a deleted account
        owner = f'OwnerDisplayName="user{slot}"'
    return (f'  <row Id="{_id(slot)}"{kind} CreationDate="{date}" Score="{score}"{views} '
            f'Body="{_body(rng, text, slot)}" {owner} LastActivityDate="{active.isoformat(timespec="milliseconds")}"'
            f'{about} CommentCount="{int(rng.expovariate(0.6))}" ContentLicense="{terms}" />\n')


def _body(rng: random.Random, text: Pieces, slot: int) -> str:
    """Join blocks until the drawn size is reached; the slot's number makes every body unique."""
    length = min(rng.lognormvariate(math.log(BODY_MEDIAN), BODY_SPREAD), BODY_LONGEST)
    body = [attribute(f"<p>In case {slot}, "), rng.choice(text.sentences), attribute("</p>\n\n")]
    size = sum(map(len, body))
    while size < length:
        block = rng.choice(text.blocks)
        body.append(block.opening + block.between.join(rng.choices(block.pool, k=rng.choice(block.numbers)))
                    + block.closing)
        size += len(body[-1])
    return "".join(body)


def main() -> None:
    """Write the file that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("--megabytes", type=float, default=200, metavar="N", help="its size (default: 200)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="(default: 0)")
    arguments = parser.parse_args()
    rows = write_posts_xml(arguments.out, arguments.megabytes, arguments.seed)
    print(f"{arguments.out}: {rows:,} rows, {arguments.out.stat().st_size / MEGABYTE:.1f} MB")


if __name__ == "__main__":
    main()
