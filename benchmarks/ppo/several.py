"""Time our PPO step in 1, 2 and more processes that share its rows.

    python -m benchmarks.ppo.several --processes 1 2                  one thread each
    python -m benchmarks.ppo.several --processes 1 --threads 2        what they have to beat

Every count runs --rounds times in turns (A B A B): one warm-up step, then --steps steps; figures are medians over steps
in wall seconds, of the first process. `waiting` is the share of its wall seconds in which it did not compute: on a
machine with nothing else to do, it waits for the others then.
"""

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks.common.tables import table
from benchmarks.data.stage_runs import say
from benchmarks.ppo.processes import RunSettings, summarise_runs
from benchmarks.ppo.workload import Shape
from stages.runtime import processes


def run_once(count: int, shape: Shape, settings: RunSettings) -> dict:
    """Run our step in `count` processes and return the JSON that the first one wrote."""
    os.environ.update(settings.environment())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = ["-W", "ignore", "-m", "benchmarks.ppo.ours", "--shape", shape.to_json(),
                   "--steps", str(settings.steps), "--out", str(out)]
        if processes.launch(count, command, "benchmark", [out] * count):
            raise SystemExit(f"{count} processes: failed")
        return json.loads(out.read_text(encoding="utf-8"))


def measure(counts: list[int], shape: Shape, settings: RunSettings) -> dict[int, dict]:
    """Return the medians of each number of processes."""
    runs: dict[int, list] = {count: [] for count in counts}
    for number in range(settings.rounds):
        for count in counts:
            runs[count].append(run_once(count, shape, settings))
            say(f"{number + 1}/{settings.rounds} {count} processes")
    return {count: summarise_runs(results, shape) for count, results in runs.items()}


def table_rows(sums: dict[int, dict]) -> list[list]:
    """Return a row for each number of processes: seconds of each phase and of the step, gain, share of waiting."""
    first = next(iter(sums.values()))
    return [[count, *(phase["wall"] for phase in row["phases"].values()), row["wall"], first["wall"] / row["wall"],
             f"{max(0.0, 1 - row['cpu'] / row['wall']):.0%}", row["peak_mb"]] for count, row in sums.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], metavar="N")
    for name, default in (("threads", 1), ("steps", 2), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    for name in ("width", "layers", "response", "batch", "minibatch"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Shape(), name), metavar="N")
    options = vars(parser.parse_args())
    counts = options.pop("processes")
    settings = RunSettings(**{name: options.pop(name) for name in ("threads", "steps", "rounds")})
    sums = measure(counts, replace(Shape(), **options), settings)
    phases = next(iter(sums.values()))["phases"]
    print(f"\n{table(['processes', *phases, 'wall s', 'gain', 'waiting', 'peak MB'], table_rows(sums))}")


if __name__ == "__main__":
    main()
