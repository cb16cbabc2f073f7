"""One PPO step of ours beside the peers' and beside the least that this machine could take.

    python -m benchmarks.ppo.run --json ppo.json                      fp32, the workload of PEERS.md, one thread
    python -m benchmarks.ppo.run --precision bf16                     ours in bf16; peers stay as they are shipped
    python -m benchmarks.ppo.run --width 512 --prompts 16 32 --only "legacy TRL"
    python -m benchmarks.ppo.run --profile                            where our step's time goes
    python -m benchmarks.ppo.run --sweep | --growth | --gpu

Every contender runs in a process and an environment of its own, in turns (A B A B): one step to warm up, then --steps,
--rounds times; figures are medians over steps. With one thread the ratios are of CPU seconds, which other processes
hardly disturb; `foreign` is the number of cores that those had. The floor is counted (benchmarks/ppo/flop_floor.py).
tokens/s: those of responses. MB are 10^6 bytes, the most that a process held.

Peers: folders legacy_trl, modern_trl and torchtune with environments of Python 3.11 below --peers or $PEERS_HOME; one
that is not there is reported as missing, and its ratios are null. Each: python3 -m venv NAME, then with NAME/bin/pip

    legacy_trl   install torch==2.13.0; install trl==0.11.4 'transformers==4.57.*' peft rich psutil
    modern_trl   install torch==2.13.0; install trl==1.12.0 transformers==5.23.0 peft psutil
    torchtune    install torch==2.13.0; install torchtune==0.6.1 torchao==0.10.0 psutil

--gpu: random LLaMA shapes of 1B and 7B in bf16, batch 32, prompts of 256, responses of 128, wall seconds. It has not
been run where the figures of the README were made. How to read it: a token step of the 7B model reads 13 GB of weights,
3 ms at 4.3 TB/s, while plain `generate` spends 25-30 ms a step on Python and launches. So "decode / floor" near 1-2
means that decoding is bound by memory, as it should be; near 10, that launches bind it. The goals are a step at least 3
times as fast as legacy TRL's, and decoding within 2 times the floor.
"""

import argparse
import json
import os
from dataclasses import asdict, fields, replace
from pathlib import Path

from benchmarks.common.tables import Goal, machine, table
from benchmarks.ppo import profile, scaling
from benchmarks.ppo.processes import (
    LEGACY,
    MODERN,
    OURS,
    PUBLISHED,
    TORCHTUNE,
    TUNED,
    Setting,
    floor_of,
    in_turns,
    ours,
    peers,
    rates,
    summary,
)
from benchmarks.ppo.workload import Shape

RATIOS = {"ratio_to_legacy_trl": LEGACY, "ratio_to_published_script": PUBLISHED, "ratio_to_tuned": TUNED}
AT_LEAST = {"fp32": {"ratio_to_legacy_trl": 3.0, "ratio_to_published_script": 4.0, "ratio_to_tuned": 1.9},
            "bf16": {"ratio_to_legacy_trl": 5.0}, "mixed": {"ratio_to_legacy_trl": 5.0}}
AT_MOST = {"fp32": {"ratio_to_floor": 1.6, "memory_ratio_to_legacy": 0.7}, "bf16": {"memory_ratio_to_legacy": 0.7},
           "mixed": {"memory_ratio_to_legacy": 0.7}}
ELSEWHERE = 1.15  # the ratios hold at other shapes within 15 %
GPU_SHAPES = {"1B": Shape(2048, 22, 32000, (256, 256), 128), "7B": Shape(4096, 32, 32000, (256, 256), 128)}


def ratios(sums: dict[str, dict], floor: dict, basis: str) -> dict[str, float | None]:
    """What a peer takes over what ours does, ours over the floor, and ours' peak over legacy's; None: peer missing."""
    taken = sums[OURS][basis]
    found: dict[str, float | None] = {"ratio_to_floor": taken / floor["seconds"]}
    found |= {key: sums[name][basis] / taken if name in sums else None for key, name in RATIOS.items()}
    peak = sums[LEGACY]["peak_mb"] if LEGACY in sums else None
    return found | {"memory_ratio_to_legacy": sums[OURS]["peak_mb"] / peak if peak else None}


def goals(found: dict[str, float | None], precision: str, slack: float = 1.0) -> list[Goal]:
    """Issue 4's bounds, on what was measured."""
    lower = [Goal(key, found[key], at_least=bound / slack) for key, bound in AT_LEAST[precision].items()
             if found.get(key) is not None]
    return lower + [Goal(key, found[key], at_most=bound * slack) for key, bound in AT_MOST[precision].items()
                    if found.get(key) is not None]


def compare(given: argparse.Namespace, setting: Setting) -> dict:
    """Ours and the peers on one shape."""
    contenders = [ours(given.precision, given.profile)]
    if not given.profile:
        contenders = peers(given.peers, given.shape) + contenders
    if given.only:
        contenders = [one for one in contenders if one.name in {*given.only, OURS}]
    measured = rates(given.precision, setting)
    runs, missing = in_turns(contenders, given.shape, setting)
    sums = {name: summary(found, given.shape) for name, found in runs.items()}
    floor = floor_of(given.shape, measured, setting.steps)
    found = ratios(sums, floor, setting.basis)
    show_contenders(sums, missing, setting)
    print(f"\nfloor: {floor['seconds']:.3f} s ({sum(floor['gflop'].values()):.0f} GFLOP at {measured.flops / 1e9:.0f} "
          f"GFLOP/s by {measured.route}; memory {measured.bytes / 1e9:.1f} GB/s); ours {found['ratio_to_floor']:.2f}x")
    if given.profile:
        show_profile(runs[OURS], floor)
    found_goals = goals(found, given.precision)
    show_goals(found_goals)
    return {"shape": asdict(given.shape), "precision": given.precision, **found, "missing": missing,
            "floor": floor | {"rates": asdict(measured)}, "contenders": sums, "goals": as_json(found_goals),
            "runs": runs}


def show_contenders(sums: dict[str, dict], missing: dict[str, str], setting: Setting) -> None:
    phases = list(dict.fromkeys(name for one in sums.values() for name in one["phases"]))
    kind = setting.basis
    rows = [[name, *(one["phases"].get(phase, {}).get(kind, "-") for phase in phases), one["cpu"], one["wall"],
             one["foreign_cores"], one["peak_mb"], one["tokens_a_cpu_second" if kind == "cpu" else "tokens_a_second"]]
            for name, one in sums.items()]
    rows += [[name, *["-"] * (len(phases) + 5)] for name in missing]
    columns = ["contender", *phases, "CPU s", "wall s", "foreign", "peak MB", f"tokens/{kind} s"]
    print(f"\nmedians of {setting.rounds} x {setting.steps} steps; phases in {kind} seconds\n\n{table(columns, rows)}")
    for name, reason in missing.items():
        print(f"{name}: {reason}")


def show_profile(runs: list[dict], floor: dict) -> None:
    steps = [step for run in runs for step in run["steps"]]
    rows = profile.phase_rows(steps, floor["phases"], runs[-1]["prefill"])
    print(f"\n{table(['phase', 'CPU s', 'wall s', 'floor s', 'CPU / floor'], rows)}")
    rows = profile.operator_rows(runs[-1]["operators"])
    print(f"\nunder the profiler, whose own cost is in it\n\n{table(['operators', 'wall s', 'share'], rows)}")


def show_goals(found: list[Goal]) -> None:
    if found:
        print(f"\n{table(['goal', 'measured', 'required', ''], [goal.row() for goal in found])}")


def as_json(found: list[Goal]) -> list[dict]:
    return [asdict(goal) | {"met": goal.met} for goal in found]


def sweep(given: argparse.Namespace, setting: Setting) -> dict:
    """Corners of the ranges of shapes."""
    measured = rates(given.precision, setting)
    found = scaling.sweep(given.peers, given.precision, setting, measured)
    columns = ["shape", "ours, s", "floor, s", "ours / floor", "legacy TRL / ours", "peak, ours / legacy"]
    print(f"\n{table(columns, scaling.sweep_rows(found))}")
    found_goals = [replace(goal, name=f"{one['name']}: {goal.name}") for one in found
                   for goal in goals(one, given.precision, ELSEWHERE)]
    show_goals(found_goals)
    return {"precision": given.precision, "rates": asdict(measured), "shapes": found, "goals": as_json(found_goals)}


def growth(given: argparse.Namespace, setting: Setting) -> dict:
    """Seconds a step of ours against batch, response, width and vocabulary."""
    found = scaling.growth(given.shape, given.precision, setting)
    columns = ["axis", f"{setting.basis} seconds a step", "exponent", "exponent of FLOPs needed"]
    print(f"\n{table(columns, scaling.growth_rows(found))}")
    return {"shape": asdict(given.shape), "precision": given.precision, "growth": found}


def gpu(given: argparse.Namespace, setting: Setting) -> dict | None:
    """Ours and legacy TRL on an accelerator; None where there is none."""
    import torch
    if not torch.cuda.is_available():
        print("There is no CUDA device here: nothing was measured.")
        return None
    setting, found = replace(setting, gpu=True), {"device": torch.cuda.get_device_name()}
    measured = rates("bf16", setting)
    for name, shape in GPU_SHAPES.items():
        legacy = next(one for one in peers(given.peers, shape) if one.name == LEGACY)
        runs, missing = in_turns([legacy, ours("bf16")], shape, setting)
        sums = {who: summary(of, shape) for who, of in runs.items()}
        floor = floor_of(shape, measured, setting.steps)
        decode = sums[OURS]["phases"]["generate"]["wall"] - runs[OURS][-1]["prefill"]["wall"]
        one = ratios(sums, floor, "wall") | {"decode_ratio_to_floor": decode / floor["phases"]["decode"]}
        print(f"\n{name}, {found['device']}, {measured.flops / 1e12:.0f} TFLOP/s, {measured.bytes / 1e12:.2f} TB/s")
        show_contenders(sums, missing, setting)
        found_goals = [Goal("decode / floor", one["decode_ratio_to_floor"], at_most=2.0)]
        if one["ratio_to_legacy_trl"] is not None:
            found_goals.append(Goal("ratio_to_legacy_trl", one["ratio_to_legacy_trl"], at_least=3.0))
        show_goals(found_goals)
        found[name] = one | {"floor": floor, "contenders": sums, "missing": missing, "goals": as_json(found_goals)}
    return found | {"rates": asdict(measured)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Shape):
        pair = {"nargs": 2, "metavar": ("MIN", "MAX")} if field.name == "prompts" else {"metavar": "N"}
        parser.add_argument(f"--{field.name}", type=int, default=field.default, **pair)
    parser.add_argument("--precision", choices=tuple(AT_LEAST), default="fp32", help="of ours")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="of each process, after one to warm up")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="processes of each contender")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--peers", type=Path, default=os.environ.get("PEERS_HOME", "peers"), metavar="FOLDER")
    parser.add_argument("--only", nargs="+", help="these peers, and ours",
                        choices=(LEGACY, PUBLISHED, TUNED, MODERN, TORCHTUNE))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    modes = parser.add_mutually_exclusive_group()
    for mode in (sweep, growth, gpu):
        modes.add_argument(f"--{mode.__name__}", dest="mode", action="store_const", const=mode, help=mode.__doc__)
    modes.add_argument("--profile", action="store_true", help="phases beside their floors, operators in groups")
    parser.set_defaults(mode=compare)
    return parser


def main() -> None:
    given = _parser().parse_args()
    given.shape = Shape(**{field.name: getattr(given, field.name) for field in fields(Shape)}
                        | {"prompts": tuple(given.prompts)})
    given.peers = given.peers.absolute()
    facts, setting = machine(), Setting(given.steps, given.rounds, given.threads)
    found = given.mode(given, setting)
    if found is None:
        return
    print(f"\n{facts['cpu']}, {facts['cores']} cores; load average before: {facts['load_average_before'][0]:.2f}")
    if given.json:
        words = {"machine": facts, "setting": asdict(setting) | {"basis": setting.basis}, **found}
        given.json.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
