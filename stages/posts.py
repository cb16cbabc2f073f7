"""Posts: dumps of Stack Exchange sites to questions with scored answers.

    python -m stages.posts --recipe configs/demo.yaml --dump data/demo --out results/demo/posts

Writes `part-*.parquet`, in an order that is a shuffle by seed, `quarantine.jsonl`, a line for each row that cannot be
used, and README.md, a data set card. Memory stays flat: tables are read in spans, spans leave sorted runs in scratch
space, and each part is joined from slices of these. Whatever is done before a kill is not done again.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from itertools import count
from operator import itemgetter
from pathlib import Path

from stages.plumbing.artifact import write_json, write_text
from stages.plumbing.progress import Progress
from stages.plumbing.workers import Workers
from stages.recipe import Posts
from stages.text import claims, head
from stages.text.card import posts_card
from stages.text.join import Origin, double_id
from stages.text.partition import SPAN_BYTES, Span, partition
from stages.text.parts import Part, link_parts, make_part, passed_over
from stages.text.published import Records, groups_of, parquet_files, partition_records
from stages.text.rows import check_share
from stages.text.selection import Selection
from stages.text.sources import Source, Table, sources_of
from stages.text.tally import in_order
from stages.text.unpack import check_space, unpacked

SCRATCH = "scratch"
RUNS = ("posts", "sizes", "claims", "votes", "ups", "records", "recordsizes")
HUB_BYTES = 8 << 30  # taken for the size of a hub data set, which is not known before
DROPPED = "dropped: "
Work = Span | Records


def run(config: Posts, out: Path, *, dump: list[str], processes: int = 1) -> dict:
    """Fill `out` and return counts: rows_read = questions + answers + rows_set_aside + the sum of `dropped`.

    The columns are in stages/text/questions.py. Text stays as the source has it (HTML or Markdown). The result does not
    depend on `processes`. Raises ValueError with one line for people when a source cannot be used or nothing comes of
    all of them.
    """
    scratch = out / SCRATCH
    scratch.mkdir(exist_ok=True)
    try:
        with Workers(processes) as workers:
            metrics = _fill(out, scratch, config, dump, workers)
    except ValueError:  # the same again would fail the same way: nothing to resume, and it may be the disk that is full
        shutil.rmtree(scratch)
        raise
    write_text(out / "README.md", posts_card(vars(config), metrics))
    shutil.rmtree(scratch)
    return metrics


def _fill(out: Path, scratch: Path, config: Posts, dump: list[str], workers: Workers) -> dict:
    sources = _wanted(sources_of(dump), config)
    origins, work = _plan(sources, config, scratch)
    try:
        counts = _scanned(work, sources, config, workers)
    finally:
        _write_quarantine(work, out)
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
        tables = {}
        if source.kind == "dump":
            tables = {table.name.lower(): _plain(table, scratch)
                      for table in [source.posts] + [source.votes] * (config.votes == "up")}
        origins.append(Origin(source.place, source.site or source.place, tables.get("posts", Path(source.place))))
        pieces.append(_pieces(source, tables))
    parts = _number_of_parts(pieces, config.part_bytes)
    numbers = count()
    work = [_work(next(numbers), place, source, piece, parts, config, scratch)
            for place, source in enumerate(sources) for piece in pieces[place]]
    _forget_other(work, scratch)
    return origins, work


def _plain(table: Table, scratch: Path) -> Path:
    path = unpacked(table, scratch)
    if path == Path(table.path):
        check_space(table.path, scratch, 2 * path.stat().st_size)
    return path


def _pieces(source: Source, tables: dict[str, Path]) -> list[tuple]:
    """(table, path, place in it) of a dump; (file, row groups, bytes) of a published set."""
    if source.kind == "hub":
        return [(source.place, None, HUB_BYTES)]
    if source.kind == "parquet":
        return [(str(file), *piece) for file in parquet_files(source.place) for piece in groups_of(file)]
    return [(table, path, place) for table, path in tables.items()
            for place in head.places(path, table, source.place, SPAN_BYTES)]


def _number_of_parts(pieces: list[list[tuple]], part_bytes: int) -> int:
    sizes = (piece[2] if isinstance(piece[2], int) else piece[2].bytes for of_source in pieces for piece in of_source
             if piece[0] != "votes")
    return max(1, -(-sum(sizes) // part_bytes))


def _work(number: int, source_number: int, source: Source, piece: tuple, parts: int, config: Posts, scratch: Path
          ) -> Work:
    common = {"number": number, "source": source_number, "parts": parts, "folder": scratch, "seed": config.seed,
              "max_bad_rows_share": config.max_bad_rows_share}
    if source.kind == "dump":
        table, path, place = piece
        return Span(name=source.place, site=source.site, table=table, path=path, place=place,
                    max_row_bytes=config.max_row_bytes, **common)
    return Records(place=piece[0], groups=piece[1], bytes=piece[2], **common)


def _forget_other(work: list[Work], scratch: Path) -> None:
    """What was begun by a version of this code that cut the work in another way is of no use."""
    plan, path = [str(piece) for piece in work], scratch / "plan.json"
    if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != plan:
        for left in scratch.iterdir():
            if left.suffix != ".xml":  # unpacked tables are as good as before
                left.unlink()
        write_json(path, plan)


def _scanned(work: list[Work], sources: list[Source], config: Posts, workers: Workers) -> dict[str, Counter]:
    """Read everything; what was counted in each kind of table."""
    sizes = [piece.bytes if isinstance(piece, Records) else piece.place.bytes for piece in work]
    progress = Progress("read", sum(sizes), "bytes")
    counts: dict[tuple[str, int], Counter] = {(piece.table, piece.source): Counter() for piece in work}
    for piece, size, found in zip(work, sizes, workers.each(_scan, work), strict=True):
        counts[piece.table, piece.source].update(found)
        progress.advance(size, f"{sum(of['rows_read'] for of in counts.values()):,} rows")
    progress.finish()
    for (table, source), found in counts.items():
        if not found["rows_read"]:
            raise ValueError(f"{sources[source].place}: a {table} table without a single row")
        check_share(sources[source].place, found, config.max_bad_rows_share)
    return {kind: sum((found for (table, _), found in counts.items() if (table == "votes") == (kind == "votes")),
                      Counter()) for kind in ("posts", "votes")}


def _scan(piece: Work) -> dict[str, int]:
    return partition(piece) if isinstance(piece, Span) else partition_records(piece)


def _write_quarantine(work: list[Work], out: Path) -> None:
    """One file, with the line of each row of a dump."""
    with open(out / "quarantine.jsonl", "w", encoding="utf-8") as stream:
        for piece in (piece for piece in work if piece.quarantine.exists()):
            with open(piece.quarantine, encoding="utf-8") as lines:
                records = sorted(map(json.loads, lines), key=itemgetter("offset"))
            if isinstance(piece, Span):
                lines = head.lines_of(piece.path, [record["offset"] for record in records]) if records else []
                records = [record | {"line": line} for record, line in zip(records, lines, strict=True)]
            stream.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def _parts(config: Posts, scratch: Path, origins: list[Origin], number: int, workers: Workers) -> list[Part]:
    """The parts to make, after a check that no Id stands for two posts."""
    runs = {kind: sorted(scratch.glob(f"{kind}-*.arrow")) for kind in RUNS}
    sites = [origin.site for origin in origins]
    checks = [claims.Check(n, number, runs["claims"], runs["votes"], sites, config.seed, scratch / f"ups-{n:05d}.arrow")
              for n in range(number if runs["claims"] else 0)]
    for clash in workers.each(claims.check, checks):
        if clash:
            raise double_id(origins[clash.source], clash.post, clash.offsets)
    runs["ups"] = [check.out for check in checks if runs["votes"]]
    selection = Selection(config.sites, config.tags, config.asked_from, config.asked_before, config.code_languages,
                          config.min_answers)
    return [Part(n, runs, origins, selection, config.max_question_bytes, scratch / f"part-{n:05d}.parquet")
            for n in range(number)]


def _made(parts: list[Part], limit: int | None, workers: Workers) -> dict[str, Counter]:
    """Make the parts, up to `limit` questions in all; what was counted in them, added up."""
    total: dict[str, Counter] = {}
    progress = Progress("join", len(parts), "parts")
    for tally in _tallies(parts, limit, workers):
        for name, counts in tally.items():
            total.setdefault(name, Counter()).update(counts)
        progress.advance(1, f"{total['questions'].total():,} questions")
    progress.finish()
    return total


def _tallies(parts: list[Part], limit: int | None, workers: Workers) -> Iterator[dict[str, dict]]:
    if limit is None:
        yield from workers.each(make_part, parts)
        return
    made, left = workers.each(make_part, parts), limit
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


if __name__ == "__main__":
    from stages.plumbing.command import main
    main(run)
