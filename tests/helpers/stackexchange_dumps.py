"""Write small dumps in the format of the sites, and locate the real ones."""

import io
from pathlib import Path
from xml.sax.saxutils import quoteattr

import py7zr
import pyarrow.parquet as pq
import pytest

from stages import posts
from stages.recipe.sections.data import Posts

REAL = Path(__file__).parents[3] / "shared/stackexchange"
LENIENT = Posts(max_bad_rows_share=0.9)


def real_dump(name: str = "") -> Path:
    """Return the path of a real dump, or skip the test."""
    if not (REAL / name).exists():
        pytest.skip(f"no real dump at {REAL / name}")
    return REAL / name


def row(**attributes) -> str:
    return "  <row " + " ".join(f"{name}={_quoted(value)}" for name, value in attributes.items()) + " />\n"


def _quoted(value) -> str:
    return quoteattr(str(value), {"\n": "&#xA;", "\r": "&#xD;"})


def question(number: int, **more) -> str:
    return row(**{"Id": number, "PostTypeId": 1, "CreationDate": "2020-01-01T00:00:00.000", "Score": 3,
                  "Body": f"<p>question {number}</p>", "OwnerUserId": 7, "Title": f"title {number}"} | more)


def answer(number: int, parent: int, score: int = 0, **more) -> str:
    return row(**{"Id": number, "PostTypeId": 2, "ParentId": parent, "CreationDate": "2020-01-02T00:00:00.000",
                  "Score": score, "Body": f"<p>answer {number}</p>", "OwnerUserId": 8} | more)


def qa_rows(number: int = 1) -> str:
    """Return the rows of a question with two answers whose scores differ."""
    return question(number) + answer(number + 1, number, 5) + answer(number + 2, number, 0)


def document(*rows: str, head: str = '<?xml version="1.0" encoding="utf-8"?>\n') -> bytes:
    return (head + "<posts>\n" + "".join(rows) + "</posts>\n").encode()


def write_dump(folder: Path, content: bytes, name: str = "site.test/Posts.xml") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def write_archive(folder: Path, content: bytes, name: str = "site.test.7z", member: str = "Posts.xml") -> str:
    with py7zr.SevenZipFile(folder / name, "w") as out:
        out.writef(io.BytesIO(content), member)
    return str(folder / name)


def make_posts(out: Path, *dump: str, config: Posts = LENIENT, processes: int = 1) -> tuple[dict, list[dict]]:
    """Run the stage, check the sum of rows and that no scratch is left, and return metrics and records, sorted."""
    out.mkdir(parents=True, exist_ok=True)
    metrics = posts.run(config, out, dump=list(dump), processes=processes)
    used = metrics["questions"] + metrics["answers"] + metrics["rows_set_aside"] + sum(metrics["dropped"].values())
    assert metrics["rows_read"] == used
    assert {p.suffix for p in out.iterdir()} == {".parquet", ".jsonl", ".json", ".md"}
    return metrics, sorted(read_records(out), key=lambda r: (r["site"], r["question_id"]))


def read_records(posts: Path) -> list[dict]:
    """Read the question records in the order of the artifact."""
    return [r for file in sorted(posts.glob("part-*.parquet")) for r in pq.read_table(file).to_pylist()]


def posts_from_rows(folder: Path, *rows: str, config: Posts = LENIENT) -> tuple[dict, list[dict]]:
    """Write a dump of these rows to `folder` and run the stage on it."""
    return make_posts(folder / "posts", write_dump(folder, document(*rows)), config=config)
