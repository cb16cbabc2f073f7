"""Reward training and SFT of ours beside TRL's: who runs, what came of the runs, and how it is shown and written."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.common.tables import Goal, Result, machine
from benchmarks.ppo.processes import Contender, Setting, in_turns
from benchmarks.ppo.run import as_json
from benchmarks.training.workload import Work

TRL, TUNED = "TRL", "tuned TRL"
SWITCHES = {"PEER_F32": "medium", "PEER_ATTN": "eager"}


def contender(name: str, module: str, form: str, **environment: str) -> Contender:
    """A worker in this project's own environment, where TRL is, too."""
    return Contender(name, Path(sys.executable), f"benchmarks.training_{module}", ("--form", form), environment)


def parser(description: str, *, steps: int, batch: int, learning_rate: float, rank: int) -> argparse.ArgumentParser:
    """What both programs are told, with a program's own defaults."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--pairs", type=Path, required=True, metavar="FOLDER", help="results/NAME/pairs")
    made.add_argument("--steps", type=int, default=steps, metavar="N", help="of TRL in the pass that is timed")
    made.add_argument("--rounds", type=int, default=2, metavar="N", help="processes of each contender")
    made.add_argument("--threads", type=int, default=1, metavar="N")
    made.add_argument("--batch", type=int, default=batch, metavar="N", help="pairs, or blocks, a step")
    made.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of a text at most, or of a block")
    made.add_argument("--learning-rate", type=float, default=learning_rate, metavar="X")
    made.add_argument("--rank", type=int, default=rank, metavar="N", help="of the adapters, whose alpha is 32")
    made.add_argument("--only", nargs="+", metavar="NAME", help="these contenders (by their names in the table)")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return made


def asked_for(contenders: list[Contender], given: argparse.Namespace) -> list[Contender]:
    """Those of --only, or all."""
    return [one for one in contenders if not given.only or one.name in given.only]


def compare(contenders: list[Contender], work: Work, given: argparse.Namespace, setting: Setting,
            like: Callable[[str], str]) -> dict:
    """Runs in turns and their medians; SystemExit unless all contenders `like` each other read the same texts."""
    runs, missing = in_turns(asked_for(contenders, given), work, setting)
    found: dict[str, tuple] = {}
    for name, of in runs.items():
        for run in of:
            read = tuple(run[key] for key in ("items", "tokens", "digest"))
            if found.setdefault(like(name), read) != read:
                raise SystemExit(f"{name} did not read what others read: {read}, not {found[like(name)]}")
    return {"contenders": {name: summary(of) for name, of in runs.items()}, "missing": missing, "runs": runs}


def summary(runs: list[dict]) -> dict:
    """Of one contender: items a second and seconds of a whole pass, medians over its runs; the highest peak."""
    sums = {kind: [sum(step[kind] for step in run["steps"]) for run in runs] for kind in ("cpu", "wall")}
    items = runs[0]["items"]
    return {"items": items, "a_cpu_second": items / median(sums["cpu"]), "a_second": items / median(sums["wall"]),
            "cpu": median(sums["cpu"]), "wall": median(sums["wall"]), "steps": len(runs[0]["steps"]),
            "foreign_cores": median(step["foreign_cores"] for run in runs for step in run["steps"]),
            "tokens": runs[0]["tokens"], "computed_tokens": runs[0]["computed_tokens"],
            "peak_mb": max(run["peak_mb"] for run in runs), "versions": runs[0]["versions"]}


def ratio(found: dict, one: str, other: str, key: str) -> float | None:
    """Of two contenders' figures; None where one of them did not run."""
    sums = found["contenders"]
    return sums[one][key] / sums[other][key] if one in sums and other in sums else None


def table_of(found: dict, title: str, items: str, basis: str, goals: list[Goal]) -> Result:
    """Contenders as rows, beside the goals."""
    columns = ["contender", "steps", items, "computed tokens", "CPU s", "wall s", "foreign", "peak MB",
               f"{items} a {basis} second"]
    rate = "a_cpu_second" if basis == "cpu" else "a_second"
    rows = [[name, one["steps"], one["items"], one["computed_tokens"], one["cpu"], one["wall"], one["foreign_cores"],
             one["peak_mb"], one[rate]] for name, one in found["contenders"].items()]
    return Result(title, columns, rows, goals)


def program(made: argparse.ArgumentParser, measure: Callable) -> None:
    """`measure(given, folder, setting)` gives the tables to show and what is to be written."""
    given = made.parse_args()
    facts, setting = machine(), Setting(given.steps, given.rounds, given.threads)
    with tempfile.TemporaryDirectory(prefix="benchmark-training-") as folder:
        results, found = measure(given, Path(folder), setting)
    for result in results:
        result.show()
    print(f"\n{facts['cpu']}, {facts['cores']} cores; load average before: {facts['load_average_before'][0]:.2f}")
    if given.json:
        goals = as_json([goal for result in results for goal in result.goals])
        words = {"machine": facts, "setting": asdict(setting) | {"basis": setting.basis}, **found, "goals": goals}
        given.json.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")
