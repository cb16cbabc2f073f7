"""Posts: dumps of Stack Exchange sites to questions with scored answers.

    python -m stages.posts --recipe configs/demo.yaml --dump data/demo --out results/demo/posts

Writes `part-*.parquet`, in an order that is a shuffle by seed, `quarantine.jsonl`, a line for each row that cannot be
used, metrics.json and README.md, a data set card. Memory stays flat: tables are read in spans, spans leave sorted runs
in scratch space, and each part is joined from its parts of these. What was done before a kill is not done again.
"""

from stages.runtime.command import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from stages.recipe.data import Posts
from stages.runtime.files import write_json, write_text
from stages.runtime.process_pool import ProcessPool
from stages.runtime.progress import Progress
from stages.stackexchange.dataset_card import posts_card
from stages.stackexchange.dump import xml_table
from stages.stackexchange.dump.archives import check_space, unpacked
from stages.stackexchange.dump.hub_tables import Records, groups_of, parquet_files, partition_records
from stages.stackexchange.dump.sources import Source, Table, sources_of
from stages.stackexchange.dump.xml_rows import ROWS_BEFORE_EARLY_STOP, check_share
from stages.stackexchange.questions import duplicate_ids
from stages.stackexchange.questions.counts import in_order
from stages.stackexchange.questions.filters import Selection
from stages.stackexchange.questions.join import Origin, double_id
from stages.stackexchange.questions.shards import Part, link_parts, make_part, passed_over
from stages.stackexchange.questions.spans import SPAN_BYTES, Span, partition

SCRATCH, METRICS = "scratch", "metrics.json"
RUNS = ("posts", "sizes", "claims", "votes", "ups", "records", "recordsizes")
HUB_BYTES = 8 << 30  # taken for the size of a hub data set, which is not known before
DROPPED = "dropped: "
Work = Span | Records


def run(config: Posts, out: Path, *, dump: list[str], processes: int = 1) -> dict:
    """Fill `out` and return counts: rows_read = questions + answers + rows_set_aside + the sum of `dropped`.

    The columns are in stages/stackexchange/questions/table.py. Text stays as the source has it (HTML or Markdown). The result does not
    depend on `processes`. Raises ValueError with one line for people when a source cannot be used or nothing comes of
    all of them.
    """
    scratch, told = out / SCRATCH, out / METRICS
    if not told.exists():  # a run that was killed at the very end has told already
        scratch.mkdir(exist_ok=True)
        try:
            with ProcessPool(processes) as workers:
                metrics = _fill(out, scratch, config, dump, workers)
        except ValueError:  # the same again would fail the same way, and it may be the disk that is full
            shutil.rmtree(scratch)
            raise
        write_text(out / "README.md", posts_card(vars(config), metrics))
        write_json(told, metrics)
    shutil.rmtree(scratch, ignore_errors=True)
    return json.loads(told.read_text(encoding="utf-8"))


def _fill(out: Path, scratch: Path, config: Posts, dump: list[str], workers: ProcessPool) -> dict:
    sources = _wanted(sources_of(dump), config)
    origins, work = _plan(sources, config, scratch)
    try:
        counts = _scanned(work, sources, config, workers)
    finally:
        _write_quarantine(work, out / "quarantine.jsonl")
    parts = _parts(config, scratch, origins, work[0].parts, workers)
    metrics = _metrics(counts, _made(parts, config.max_questions, workers))
    if not metrics["questions"]:
        raise ValueError(f"{', '.join(dump)}: no question is left of {metrics['rows_read']} rows; "
                         f"dropped: {metrics['dropped']}")
    link_parts(parts, config.part_bytes, out)
    return metrics


def _wanted(sources: list[Source], config: Posts) -> list[Source]:
    """Dumps of the sites that are asked for; published sets hold many sites and are looked through."""
    wanted = [source for source in sources if not config.sites or source.site is None or source.site in config.sites]
    if not wanted:
        raise ValueError(f"none of the sites {', '.join(config.sites)} is here, but "
                         f"{', '.join(source.site for source in sources)}")
    if config.votes == "up":
        for source in wanted:
            if source.votes is None:
                raise ValueError(f"{source.place}: votes=up needs the site's Votes.xml, which is not here")
    return wanted


def _plan(sources: list[Source], config: Posts, scratch: Path) -> tuple[list[Origin], list[Work]]:
    """Unpack what is packed, and cut all into pieces of work."""
    origins, pieces = [], []
    for source in sources:
        tables = {table.name.lower(): _plain(table, scratch) for table in _tables(source, config)}
        origins.append(Origin(source.place, source.site or source.place, tables.get("posts", Path(source.place))))
        pieces += [(len(origins) - 1, *piece) for piece in _pieces(source, tables, config)]
    text_bytes = sum(_bytes(values) for *_, values in pieces if values.get("table") != "votes")
    common = {"parts": max(1, -(-text_bytes // config.part_bytes)), "folder": scratch, "seed": config.seed,
              "max_bad_rows_share": config.max_bad_rows_share}
    work = [kind(number=number, source=source, **common, **values)
            for number, (source, kind, values) in enumerate(pieces)]
    _forget_other(work, scratch)
    return origins, work


def _tables(source: Source, config: Posts) -> list[Table]:
    return [table for table in (source.posts, source.votes if config.votes == "up" else None) if table]


def _plain(table: Table, scratch: Path) -> Path:
    path = unpacked(table, scratch)
    if path == Path(table.path):
        check_space(table.path, scratch, 2 * path.stat().st_size)
    return path


def _pieces(source: Source, tables: dict[str, Path], config: Posts) -> list[tuple[type, dict]]:
    """Kind and values of each piece of a source, but for what is common to all."""
    if source.kind == "hub":
        return [(Records, {"place": source.place, "groups": None, "bytes": HUB_BYTES})]
    if source.kind == "parquet":
        return [(Records, {"place": str(file), "groups": groups, "bytes": size})
                for file in parquet_files(source.place) for groups, size in groups_of(file)]
    return [(Span, {"name": source.place, "site": source.site, "table": table, "path": path, "place": place,
                    "max_row_bytes": config.max_row_bytes})
            for table, path in tables.items() for place in xml_table.places(path, table, source.place, SPAN_BYTES)]


def _bytes(values: dict) -> int:
    return values["bytes"] if "bytes" in values else values["place"].bytes


def _forget_other(work: list[Work], scratch: Path) -> None:
    """What was begun by a version of this code that cut the work in another way is of no use."""
    plan, path = [str(piece) for piece in work], scratch / "plan.json"
    if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != plan:
        for left in scratch.iterdir():
            if left.suffix != ".xml":  # unpacked tables are as good as before
                left.unlink()
        write_json(path, plan)


def _scanned(work: list[Work], sources: list[Source], config: Posts, workers: ProcessPool) -> dict[str, Counter]:
    """Read everything; what was counted in each kind of table."""
    progress = Progress("read", sum(_bytes(vars(piece)) for piece in work), "bytes")
    counts: dict[tuple[str, int], Counter] = {(piece.table, piece.source): Counter() for piece in work}
    for piece, found in zip(work, workers.imap(_scan, work), strict=True):
        count = counts[piece.table, piece.source]
        count.update(found)
        check_share(sources[piece.source].place, count, config.max_bad_rows_share, ROWS_BEFORE_EARLY_STOP)
        progress.advance(_bytes(vars(piece)), f"{sum(of['rows_read'] for of in counts.values()):,} rows")
    progress.finish()
    for (table, source), found in counts.items():
        if not found["rows_read"]:
            raise ValueError(f"{sources[source].place}: a {table} table without a single row")
        check_share(sources[source].place, found, config.max_bad_rows_share)
    return {kind: sum((found for (table, _), found in counts.items() if (table == "votes") == (kind == "votes")),
                      Counter()) for kind in ("posts", "votes")}


def _scan(piece: Work) -> dict[str, int]:
    return partition(piece) if isinstance(piece, Span) else partition_records(piece)


def _write_quarantine(work: list[Work], path: Path) -> None:
    """One file, by source and place, with the line of each row of a dump."""
    with open(path, "w", encoding="utf-8") as stream:
        for file, pieces in groupby(work, key=lambda piece: getattr(piece, "path", None)):
            lines = xml_table.Lines(file) if file else None
            for piece in (piece for piece in pieces if piece.quarantine.exists()):
                with open(piece.quarantine, encoding="utf-8") as records:
                    for record in sorted(map(json.loads, records), key=itemgetter("offset")):
                        line = {"line": lines.at(record["offset"])} if lines else {}
                        stream.write(json.dumps(record | line, ensure_ascii=False) + "\n")


def _parts(config: Posts, scratch: Path, origins: list[Origin], number: int, workers: ProcessPool) -> list[Part]:
    """The parts to make, after a check that no Id stands for two posts."""
    runs = {kind: sorted(scratch.glob(f"{kind}-*.arrow")) for kind in RUNS}
    sites = [origin.site for origin in origins]
    checks = [duplicate_ids.Check(n, number, runs["claims"], runs["votes"], sites, config.seed, scratch / f"ups-{n:05d}.arrow")
              for n in range(number if runs["claims"] else 0)]
    for clash in workers.imap(duplicate_ids.check, checks):
        if clash:
            raise double_id(origins[clash.source], clash.post, clash.offsets)
    runs["ups"] = [check.out for check in checks if runs["votes"]]
    selection = Selection(config.sites, config.tags, config.asked_from, config.asked_before, config.code_languages,
                          config.min_answers)
    return [Part(n, runs, origins, selection, config.max_question_bytes, scratch / f"part-{n:05d}.parquet")
            for n in range(number)]


def _made(parts: list[Part], limit: int | None, workers: ProcessPool) -> dict[str, Counter]:
    """Make the parts, up to `limit` questions in all; what was counted in them, added up."""
    total: dict[str, Counter] = {}
    progress = Progress("join", len(parts), "parts")
    for tally in _tallies(parts, limit, workers):
        for name, counts in tally.items():
            total.setdefault(name, Counter()).update(counts)
        progress.advance(1, f"{total['questions'].total():,} questions")
    progress.finish()
    return total


def _tallies(parts: list[Part], limit: int | None, workers: ProcessPool) -> Iterator[dict[str, dict]]:
    if limit is None:
        yield from workers.imap(make_part, parts)
        return
    made, left = workers.imap(make_part, parts), limit
    for part in parts:
        if left:
            tally = next(made)
            if sum(tally["questions"].values()) > left:
                tally = make_part(part, left)
            left -= sum(tally["questions"].values())
        else:
            made.close()  # and with it the parts that workers are ahead with
            tally = passed_over(part)
        yield tally


def _metrics(counts: dict[str, Counter], tally: dict[str, Counter]) -> dict:
    read, votes = counts["posts"], counts["votes"]
    dropped = Counter({key[len(DROPPED):]: n for key, n in read.items() if key.startswith(DROPPED)}) + tally["dropped"]
    sites = {site: {"questions": tally["questions"][site], "answers": tally["answers"][site]}
             for site in sorted(tally["questions"])}
    names = ("dropped_questions", "licenses", "scores", "years", "question_characters", "answer_characters")
    return {"questions": tally["questions"].total(), "answers": tally["answers"].total(),
            "rows_read": read["rows_read"], "rows_set_aside": read["rows_set_aside"],
            "votes_read": votes["rows_read"], "votes_set_aside": votes["rows_set_aside"],
            "bytes_read": read["bytes_read"] + votes["bytes_read"],
            "accepted_answers_not_in_the_file": tally["accepted_not_in_the_file"].total(),
            "dropped": dict(sorted(dropped.items())), "sites": sites,
            **{name: in_order(tally[name]) for name in names}}
