"""Compare our reward training and SFT with TRL's: contenders, runs, ratios, tables and the JSON file."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.common.tables import Goal, Result, machine
from benchmarks.ppo.processes import Contender, RunSettings, run_in_turns
from benchmarks.ppo.run import goals_to_json
from benchmarks.ppo.workload import SHAPES
from benchmarks.training.workload import Work

TRL, TUNED = "TRL", "tuned TRL"
SWITCHES = {"PEER_F32": "medium", "PEER_ATTN": "eager"}


def build_contender(name: str, module: str, form: str, **environment: str) -> Contender:
    """Build a contender that runs in this project's environment, which has TRL too."""
    return Contender(name, Path(sys.executable), f"benchmarks.training.{module}", ("--form", form), environment)


def build_parser(
    description: str, *, steps: int, batch: int, learning_rate: float, rank: int
) -> argparse.ArgumentParser:
    """Build the command line of both programs, with the program's defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, required=True, metavar="FOLDER", help="results/NAME/pairs")
    parser.add_argument("--steps", type=int, default=steps, metavar="N", help="steps of TRL in the measured pass")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="processes of each contender")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--batch", type=int, default=batch, metavar="N", help="pairs, or blocks, a step")
    parser.add_argument("--length", type=int, default=512, metavar="TOKENS", help="of a text at most, or of a block")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, metavar="X")
    parser.add_argument("--rank", type=int, default=rank, metavar="N", help="rank of the LoRA adapters; alpha is 32")
    parser.add_argument("--targets", nargs="+", default=(), metavar="LAYER", help="with an adapter (default: PEFT's)")
    parser.add_argument("--dropout", type=float, default=0.0, metavar="SHARE", help="of the adapters")
    parser.add_argument("--precision", choices=("fp32", "mixed", "bf16"), default="fp32")
    parser.add_argument("--shape", choices=SHAPES, default="small", help="of the random model, without --base")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contenders (by their names in the table)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def select_contenders(contenders: list[Contender], args: argparse.Namespace) -> list[Contender]:
    """Return the contenders of --only, or all."""
    return [one for one in contenders if not args.only or one.name in args.only]


def compare(contenders: list[Contender], work: Work, args: argparse.Namespace, setting: RunSettings,
            group: Callable[[str], str]) -> dict:
    """Run the contenders in turns and take medians; SystemExit unless all of a group read the same texts."""
    runs, missing = run_in_turns(select_contenders(contenders, args), work, setting)
    texts_read: dict[str, tuple] = {}
    for name, each in runs.items():
        for run in each:
            read = tuple(run[key] for key in ("items", "tokens", "digest"))
            if texts_read.setdefault(group(name), read) != read:
                raise SystemExit(f"{name} did not read what others read: {read}, not {texts_read[group(name)]}")
    return {"contenders": {name: summarise_runs(each) for name, each in runs.items()}, "missing": missing, "runs": runs}


def summarise_runs(runs: list[dict]) -> dict:
    """Summarise one contender's runs: medians of items per second and of seconds per pass; the highest peak memory."""
    sums = {kind: [sum(step[kind] for step in run["steps"]) for run in runs] for kind in ("cpu", "wall")}
    items = runs[0]["items"]
    return {"items": items, "a_cpu_second": items / median(sums["cpu"]), "a_second": items / median(sums["wall"]),
            "cpu": median(sums["cpu"]), "wall": median(sums["wall"]), "steps": len(runs[0]["steps"]),
            "foreign_cores": median(step["foreign_cores"] for run in runs for step in run["steps"]),
            "tokens": runs[0]["tokens"], "computed_tokens": runs[0]["computed_tokens"], "attended": runs[0]["attended"],
            "peak_mb": max(run["peak_mb"] for run in runs), "versions": runs[0]["versions"]}


def ratio(figures: dict, one: str, other: str, key: str) -> float | None:
    """Divide the figures of two contenders; None if one of them did not run."""
    sums = figures["contenders"]
    return sums[one][key] / sums[other][key] if one in sums and other in sums else None


def build_table(figures: dict, title: str, items: str, basis: str, goals: list[Goal]) -> Result:
    """Build the table with a row per contender, and the goals."""
    columns = ["contender", "steps", items, "computed tokens", "CPU s", "wall s", "foreign", "peak MB",
               f"{items} a {basis} second", "share of the rate"]
    rate = "a_cpu_second" if basis == "cpu" else "a_second"
    rows = [[name, one["steps"], one["items"], one["computed_tokens"], one["cpu"], one["wall"], one["foreign_cores"],
             one["peak_mb"], one[rate], one.get("share", "-")] for name, one in figures["contenders"].items()]
    return Result(title, columns, rows, goals)


def run_program(parser: argparse.ArgumentParser, measure: Callable) -> None:
    """Run the benchmark: measure(args, folder, setting) returns the tables and the content of the JSON file."""
    args = parser.parse_args()
    facts, setting = machine(), RunSettings(args.steps, args.rounds, args.threads)
    with tempfile.TemporaryDirectory(prefix="benchmark-training-") as folder:
        results, figures = measure(args, Path(folder), setting)
    for result in results:
        result.show()
    print(f"\n{facts['cpu']}, {facts['cores']} cores; load average before: {facts['load_average_before'][0]:.2f}")
    if args.json:
        goals = goals_to_json([goal for result in results for goal in result.goals])
        content = {"machine": facts, "setting": asdict(setting) | {"basis": setting.basis}, **figures, "goals": goals}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
