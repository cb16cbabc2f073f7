"""Measure the data stages on a dump of any size, against the usual way and a bare XML parser.

    python -m benchmarks.data.run compare --megabytes 200 --repeats 3    against the usual way
    python -m benchmarks.data.run parse --megabytes 200 --repeats 7      the scan against a bare expat pass
    python -m benchmarks.data.run memory --megabytes 200 1000 4000       constant memory, linear time
    python -m benchmarks.data.run processes --megabytes 200              two processes against one (idle machine)
    python -m benchmarks.data.run extrapolate memory.json                estimate for stackoverflow.com

benchmarks/data/synthetic_posts.py makes the dump. The stages run by their command lines. CPU seconds are user and
system, of all processes of a run, start and imports included (not in `parse`); MB are 10^6 bytes.
"""

import argparse
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.common.process_cost import Cost, bytes_in, measured
from benchmarks.common.tables import Goal, Result, machine
from benchmarks.data.stage_runs import (
    count_posts,
    delete,
    dump,
    hash_tables,
    read_metrics,
    remove_dumps,
    run_stage,
    say,
)

FEWER_CPU_SECONDS, OF_EXPAT, PEAK_MB, DRIFT, SPEEDUP = 2.5, 0.7, 600, 1.1, 1.8
STACKOVERFLOW_MB, STACKOVERFLOW_POSTS = 100_000, 60_000_000
EXPAT = """
import sys, time, xml.parsers.expat
start, parser = time.process_time(), xml.parsers.expat.ParserCreate()
with open(sys.argv[1], "rb") as stream:
    while block := stream.read(1 << 20):
        parser.Parse(block)
parser.Parse(b"", True)
print(time.process_time() - start)
"""
SCAN = """
import sys, time
from pathlib import Path
from stages.recipe.sections.data import Posts
from stages.stackexchange.dump.xml_table import split_spans
from stages.stackexchange.questions.scan import SPAN_BYTES, ScanTask, scan
start, path, limits = time.process_time(), Path(sys.argv[1]), Posts()
parts = -(-path.stat().st_size // limits.part_bytes)
for number, span in enumerate(split_spans(path, "posts", "dump", SPAN_BYTES)):
    scan(ScanTask(number=number, source=0, name="dump", site="site", table="posts", path=path, span=span, parts=parts,
                  size_bytes=span.stop - span.start, folder=Path(sys.argv[2]), seed=0,
                  max_row_bytes=limits.max_row_bytes))
print(time.process_time() - start)
"""


def compare(args: argparse.Namespace, folder: Path) -> Result:
    """Compare posts and pairs in one process with the usual way, in turns."""
    xml, runs = dump(folder, args.megabytes[0], args.seed), []
    for _ in range(args.repeats):
        ours = [run_stage(stage, xml, 1) for stage in ("posts", "pairs")]
        usual = measured("-m", "benchmarks.data.baseline", xml, xml.with_name("usual.parquet"))
        runs += [_named("ours: posts", ours[0]), _named("ours: pairs", ours[1]), _named("usual way", usual)]
    pairs_metrics, needed = read_metrics(xml, "pairs"), count_posts(xml.parent / "pairs")
    posts, pairs, baseline = (_median(runs, name, "cpu") for name in ("ours: posts", "ours: pairs", "usual way"))
    usual_counts = json.loads(usual.stdout)
    rows = [[run["name"], run["cpu"], run["wall"], run["peak_mb"]] for run in runs]
    goals = [
        Goal("CPU seconds, usual way / ours", baseline / (posts + pairs), at_least=FEWER_CPU_SECONDS),
        Goal("conversions a needed post", pairs_metrics["conversions"] / needed, 1, 1),
        Goal("pairs, ours / usual way", pairs_metrics["pairs"] / usual_counts["pairs"], 1, 1),
    ]
    title = (f"{args.megabytes[0]:g} MB, 1 process: {pairs_metrics['pairs']:,} pairs; conversions: "
             f"{pairs_metrics['conversions']:,} (usual way {usual_counts['conversions']:,}), posts needed: {needed:,}")
    return Result(title, ["run", "CPU s", "wall s", "peak MB"], rows, goals, runs)


def parse(args: argparse.Namespace, folder: Path) -> Result:
    """Compare the scan with a bare expat pass without handlers, in turns; imports are not counted."""
    xml, runs = dump(folder, args.megabytes[0], args.seed), []
    for _ in range(args.repeats):
        scratch = delete(xml.with_name("scan"))
        scratch.mkdir()
        for name, command in (("expat", [EXPAT, xml]), ("scan", [SCAN, xml, scratch])):
            cost = measured("-c", *command)
            seconds = float(cost.stdout)
            runs.append(_named(name, cost) | {"seconds": seconds, "mb_s": xml.stat().st_size / 1e6 / seconds})
            say(f"{name}: {runs[-1]['mb_s']:.0f} MB/s")
    rows = [[name, _median(runs, name, "seconds"), _median(runs, name, "mb_s"), _median(runs, name, "peak_mb")]
            for name in ("expat", "scan")]
    goal = Goal("MB/s of the scan / of expat", rows[1][2] / rows[0][2], at_least=OF_EXPAT)
    title = f"{args.megabytes[0]:g} MB, 1 process, medians of {args.repeats}"
    return Result(title, ["run", "CPU s", "MB a CPU s", "peak MB"], rows, [goal], runs)


def memory(args: argparse.Namespace, folder: Path) -> Result:
    """Measure each size once; without --keep, its files are deleted before the next."""
    runs = []
    for megabytes in args.megabytes:
        xml = dump(folder, megabytes, args.seed)
        for stage in ("posts", "pairs")[:1 + ("pairs" in args.stages)]:
            cost = run_stage(stage, xml, args.processes)
            rows = read_metrics(xml, "posts")["rows_read"]
            artifact = bytes_in(xml.parent / stage) / 1e6
            runs.append(_named(stage, cost) | {"megabytes": megabytes, "rows": rows, "processes": args.processes,
                                               "artifact_mb": artifact, "disk_mb": max(cost.disk_mb, artifact)})
        if not args.keep:
            shutil.rmtree(xml.parent)
    rows = [[run["megabytes"], run["name"], run["cpu"], run["cpu"] / run["megabytes"], run["wall"], run["peak_mb"],
             run["disk_mb"], run["artifact_mb"]] for run in runs]
    columns = ["MB", "stage", "CPU s", "CPU s/MB", "wall s", "peak MB", "disk while running, MB", "artifact MB"]
    title = f"processes: {args.processes}; peak MB is that of the largest process"
    return Result(title, columns, rows, [goal for name in args.stages for goal in _memory_goals(runs, name)], runs)


def _memory_goals(runs: list[dict], stage: str) -> list[Goal]:
    runs = [run for run in runs if run["name"] == stage]
    goals = [Goal(f"{stage}: highest peak MB", max(run["peak_mb"] for run in runs), at_most=PEAK_MB)]
    if len(runs) > 1:
        before, last, cost = runs[-2], runs[-1], [run["cpu"] / run["megabytes"] for run in runs]
        goals += [Goal(f"{stage}: peak, last size / one before", last["peak_mb"] / before["peak_mb"], at_most=DRIFT),
                  Goal(f"{stage}: CPU s/MB, last size / first", cost[-1] / cost[0], at_most=DRIFT)]
    return goals


def processes(args: argparse.Namespace, folder: Path) -> Result:
    """Compare the wall seconds and the bytes of one process and of two, in turns."""
    xml, runs, digests = dump(folder, args.megabytes[0], args.seed), [], []
    for _ in range(args.repeats):
        for number in (1, 2):
            runs += [_named(f"{stage} {number}", run_stage(stage, xml, number)) for stage in ("posts", "pairs")]
            digests.append(hash_tables(xml.parent))
    differing = sum(digests[0].get(name) != other.get(name) for other in digests for name in digests[0] | other)
    walls = {run["name"]: _median(runs, run["name"], "wall") for run in runs}
    walls |= {f"together {n}": walls[f"posts {n}"] + walls[f"pairs {n}"] for n in (1, 2)}
    rows = [[stage, walls[f"{stage} 1"], walls[f"{stage} 2"], walls[f"{stage} 1"] / walls[f"{stage} 2"]]
            for stage in ("posts", "pairs", "together")]
    goals = [Goal("wall of 1 process / of 2, together", rows[2][3], at_least=SPEEDUP),
             Goal(f"files that differ, of {len(digests[0])}", differing, 0, 0)]
    title = f"{args.megabytes[0]:g} MB, medians of {args.repeats}"
    return Result(title, ["stage", "1 process, s", "2 processes, s", "speedup"], rows, goals, runs)


def extrapolate(args: argparse.Namespace, folder: Path) -> Result:
    """Scale the CPU seconds and bytes per MB (and per row) of the largest size to the whole site."""
    runs = json.loads(args.measured.read_text(encoding="utf-8"))["runs"]
    largest = max(run["megabytes"] for run in runs)
    rows = []
    for run in (run for run in runs if run["megabytes"] == largest):
        times = STACKOVERFLOW_MB / run["megabytes"]
        hours, by_rows = run["cpu"] * times / 3600, run["cpu"] / run["rows"] * STACKOVERFLOW_POSTS / 3600
        rows.append([run["name"], hours, by_rows, *(hours / number for number in args.processes),
                     run["disk_mb"] * times / 1000, run["artifact_mb"] * times / 1000])
    if len(rows) > 1:  # the posts stay on the disk while the pairs are built
        sums = [sum(column) for column in list(zip(*rows, strict=True))[1:]]
        rows.append(["together", *sums[:-2], max(rows[0][-2], rows[0][-1] + rows[1][-2]), sums[-1]])
    columns = ["stage", "CPU h by MB", "CPU h by rows", *(f"h, {number} processes" for number in args.processes),
               "disk while running, GB", "artifact GB"]
    title = (f"EXTRAPOLATED, not measured: stackoverflow.com, {STACKOVERFLOW_MB / 1000:g} GB of Posts.xml, "
             f"{STACKOVERFLOW_POSTS / 1e6:g} million posts,\nfrom {largest:g} MB: CPU s/MB times MB, evenly shared by "
             "the processes; no waiting for the disk; the dump itself is not included")
    return Result(title, columns, rows)


def _named(name: str, cost: Cost) -> dict:
    return {"name": name} | {key: value for key, value in asdict(cost).items() if key != "stdout"}


def _median(runs: list[dict], name: str, key: str) -> float:
    return median(run[key] for run in runs if run["name"] == name)


@contextmanager
def _work_folder(args: argparse.Namespace) -> Iterator[Path]:
    """Yield --folder or a new folder; without --keep, delete its dumps and artifacts."""
    folder = args.folder or Path(tempfile.mkdtemp(prefix="benchmark-data-"))
    try:
        yield folder.absolute()
    finally:
        if args.keep:
            say(f"kept: {folder}")
        else:
            remove_dumps(folder)
            if not args.folder:
                folder.rmdir()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="BENCHMARK")
    for benchmark, sizes in ((compare, [200]), (parse, [200]), (memory, [200, 1000, 4000]), (processes, [200])):
        one = commands.add_parser(benchmark.__name__, help=benchmark.__doc__)
        one.add_argument("--megabytes", type=float, nargs="+" if benchmark is memory else 1, default=sizes, metavar="N")
        one.add_argument("--seed", type=int, default=0, metavar="N", help="of the synthetic dump")
        one.add_argument("--folder", type=Path, help="of dumps and artifacts (default: a temporary one)")
        one.add_argument("--keep", action="store_true", help="keep dumps and artifacts for the next run")
        if benchmark is memory:
            one.add_argument("--processes", type=int, default=1, metavar="N")
            one.add_argument("--stages", nargs="+", choices=("posts", "pairs"), default=["posts", "pairs"])
        else:
            one.add_argument("--repeats", type=int, default=5 if benchmark is parse else 1, metavar="N")
        one.set_defaults(benchmark=benchmark)
    one = commands.add_parser("extrapolate", help=extrapolate.__doc__)
    one.add_argument("measured", type=Path, metavar="FILE", help="the --json of `memory`")
    one.add_argument("--processes", type=int, nargs="+", default=[1, 2, 16, 64], metavar="N")
    one.set_defaults(benchmark=extrapolate, folder=None, keep=False)
    for one in commands.choices.values():
        one.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def main() -> None:
    """Run the benchmark of the command line, print its table and write its figures."""
    args = _parser().parse_args()
    facts = machine()
    with _work_folder(args) as folder:
        result = args.benchmark(args, folder)
    result.show()
    print(f"\n{facts['cpu']}, {facts['cores']} cores; load average before: {facts['load_average_before'][0]:.2f}")
    if args.json:
        result.write(args.json, facts)


if __name__ == "__main__":
    main()
