"""Prototype of the posts stage with DuckDB's out-of-core sort instead of sorted runs (docs/experiments/duckdb.md).

    pip install duckdb
    python -m benchmarks.data.duckdb_sort Posts.xml --threads 2 --memory-limit 650MB

Rows are read by our XML reader and written to a Parquet file per span. DuckDB checks for duplicate ids and sorts all
rows; the sorted rows are joined to questions and written by our code, as one file. Prints CPU seconds, peak memory and
the SHA-256 of the questions. What the stage does besides is left out: quarantine, votes, parts, resume.
"""

import argparse
import hashlib
import io
import resource
import tempfile
import time
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.recipe.sections.data import Posts
from stages.stackexchange.dump.scan_log import ScanLog
from stages.stackexchange.dump.xml_table import read_rows, split_spans
from stages.stackexchange.questions.counts import Counts
from stages.stackexchange.questions.join import question_record
from stages.stackexchange.questions.post_columns import QUESTION, post_columns
from stages.stackexchange.questions.scan import BATCH_ROWS, SPAN_BYTES
from stages.stackexchange.questions.sorted_runs import add_key_column, question_keys
from stages.stackexchange.questions.table import write_questions

SITE, LIMITS = "site", Posts()


def scan_to_parquet(xml: Path, folder: Path) -> None:
    """Write the posts with their keys, a file per span."""
    for number, span in enumerate(split_spans(xml, "posts", "dump", SPAN_BYTES)):
        log = ScanLog("dump", io.StringIO(), LIMITS.max_row_bytes)
        rows, tables = read_rows(xml, span, log), []
        while batch := list(islice(rows, BATCH_ROWS)):
            tables.append(post_columns(*zip(*batch, strict=True), log))
        posts = pa.concat_tables(tables)
        posts = add_key_column(posts, question_keys(SITE, LIMITS.seed, posts["question_id"].to_numpy()))
        pq.write_table(posts, folder / f"{number:05d}.parquet", compression="lz4", use_dictionary=False)
        pa.default_memory_pool().release_unused()


def sort_and_join(folder: Path, threads: int, memory_limit: str, out: Path) -> None:
    """Sort the posts by DuckDB, and write the questions with at least LIMITS.min_answers answers."""
    import duckdb
    database = duckdb.connect(str(folder / "duckdb"), config={
        "threads": threads, "memory_limit": memory_limit, "temp_directory": str(folder / "spilled"),
        "preserve_insertion_order": "false"})
    posts = f"read_parquet('{folder}/*.parquet')"
    duplicates = f"SELECT id FROM {posts} GROUP BY id HAVING min(question_id) <> max(question_id)"
    assert not database.sql(duplicates).fetchall()
    order = 'key, question_id, kind, id, "offset"'
    batches = database.sql(f"SELECT * FROM {posts} ORDER BY {order}").to_arrow_reader(1000)
    rows = (row for batch in batches for row in batch.to_pylist())
    groups = (list(group) for _, group in groupby(rows, key=itemgetter("key", "question_id")))
    write_questions(out, (question_record(posts[0], posts[1:], SITE, Counts()) for posts in groups
                          if posts[0]["kind"] == QUESTION and len(posts) > LIMITS.min_answers))


def report(step: str) -> None:
    """Print what this process has used so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    print(f"{step}: {time.process_time():.1f} CPU s, peak {peak:.0f} MB", flush=True)


def main() -> None:
    """Run the prototype on the dump of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("xml", type=Path, metavar="POSTS_XML")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--memory-limit", default="500MB", metavar="SIZE", help="of DuckDB (default: 500MB)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.xml.parent) as folder:
        scan_to_parquet(args.xml, Path(folder))
        report("scan")
        sort_and_join(Path(folder), args.threads, args.memory_limit, Path(folder) / "questions")
        report("scan, sort, join")
        print(hashlib.sha256((Path(folder) / "questions").read_bytes()).hexdigest())


if __name__ == "__main__":
    main()
