"""Compare our PPO step with the peers' and with the least that this machine could take.

    python -m benchmarks.ppo.run --json ppo.json                      fp32, the workload of PEERS.md, one thread
    python -m benchmarks.ppo.run --precision bf16                     ours in bf16; peers as shipped
    python -m benchmarks.ppo.run --width 512 --prompts 16 32 --only "legacy TRL"
    python -m benchmarks.ppo.run --profile                            where our step's time goes
    python -m benchmarks.ppo.run --sweep | --growth | --gpu
    python -m benchmarks.ppo.run --shape smollm2 --precision bf16 --peer-precision bf16 --only "legacy TRL"

Every contender runs in its own process and environment, in turns (A B A B): one warm-up step, then --steps steps,
--rounds times; figures are medians over steps. With one thread the ratios compare CPU seconds, which other processes
hardly disturb; `foreign` is the number of cores that those used. flop_floor.py computes the floor.
tokens/s counts response tokens. MB are 10^6 bytes, the peak of a process.

Peers: folders legacy_trl, modern_trl and torchtune with environments of Python 3.11 below --peers or $PEERS_HOME; one
that is not there is reported as missing, and its ratios are null. Each: python3 -m venv NAME, then with NAME/bin/pip

    legacy_trl   install torch==2.13.0; install trl==0.11.4 'transformers==4.57.*' peft rich psutil
    modern_trl   install torch==2.13.0; install trl==1.12.0 transformers==5.23.0 peft psutil
    torchtune    install torch==2.13.0; install torchtune==0.6.1 torchao==0.10.0 psutil

--gpu: random LLaMA shapes of 1B and 7B in bf16, batch 32, prompts of 256, responses of 128, wall seconds and tokens a
second by phase. A test runs the same code on a CPU at a tiny shape; docs/gpu.md has what an H200 gave. How to read it:
a token step of the 7B model reads 13 GB of weights, 3 ms at 4.3 TB/s, while plain `generate` spends 25-30 ms per step
on Python and launches. So "decode / floor" near 1-2 means that memory bounds decoding, as it should; near 10, that
launches do. The goals are a step at least 3 times as fast as legacy TRL's, and decoding within 2 times the floor.
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
    RunSettings,
    measure_machine,
    median_floor,
    our_contender,
    peer_contenders,
    run_in_turns,
    summarise_runs,
)
from benchmarks.ppo.workload import SHAPES, Shape

RATIOS = {"ratio_to_legacy_trl": LEGACY, "ratio_to_published_script": PUBLISHED, "ratio_to_tuned": TUNED}
AT_LEAST = {"fp32": {"ratio_to_legacy_trl": 3.0, "ratio_to_published_script": 4.0, "ratio_to_tuned": 1.9},
            "bf16": {"ratio_to_legacy_trl": 5.0}, "mixed": {"ratio_to_legacy_trl": 5.0}}
SMOLLM2_GOALS = {"ratio_to_legacy_trl": 3.0}, {"memory_ratio_to_legacy": 0.8}  # in the same precision
AT_MOST = {"fp32": {"ratio_to_floor": 1.6, "memory_ratio_to_legacy": 0.7}, "bf16": {"memory_ratio_to_legacy": 0.7},
           "mixed": {"memory_ratio_to_legacy": 0.7}}
ELSEWHERE = 1.15  # the ratios hold at other shapes within 15 %
GPU_SHAPES = {"1B": Shape(2048, 22, 32000, (256, 256), 128), "7B": Shape(4096, 32, 32000, (256, 256), 128)}


def compute_ratios(sums: dict[str, dict], floor: dict, basis: str) -> dict[str, float | None]:
    """Compute peers' seconds over ours, ours over the floor, and our peak over legacy TRL's; None: peer missing."""
    seconds = sums[OURS][basis]
    ratios: dict[str, float | None] = {"ratio_to_floor": seconds / floor["seconds"]}
    ratios |= {key: sums[name][basis] / seconds if name in sums else None for key, name in RATIOS.items()}
    peak = sums[LEGACY]["peak_mb"] if LEGACY in sums else None
    return ratios | {"memory_ratio_to_legacy": sums[OURS]["peak_mb"] / peak if peak else None}


def check_goals(ratios: dict[str, float | None], precision: str, slack: float = 1.0, named: str = "small"
                ) -> list[Goal]:
    """Compare the measured ratios with the bounds of issue 4, or of issue 29 for the shape named smollm2."""
    at_least, at_most = SMOLLM2_GOALS if named == "smollm2" else (AT_LEAST[precision], AT_MOST[precision])
    lower = [Goal(key, ratios[key], at_least=bound / slack) for key, bound in at_least.items()
             if ratios.get(key) is not None]
    return lower + [Goal(key, ratios[key], at_most=bound * slack) for key, bound in at_most.items()
                    if ratios.get(key) is not None]


def compare(options: argparse.Namespace, settings: RunSettings) -> dict:
    """Compare ours and the peers on one shape."""
    contenders = [our_contender(options.precision, options.profile)]
    if not options.profile:
        contenders = peer_contenders(options.peers, options.shape, options.peer_precision) + contenders
    if options.only:
        contenders = [contender for contender in contenders if contender.name in {*options.only, OURS}]
    rates = measure_machine(options.precision, settings)
    runs, missing = run_in_turns(contenders, options.shape, settings)
    sums = {name: summarise_runs(results, options.shape) for name, results in runs.items()}
    floor = median_floor(options.shape, rates, settings.steps)
    ratios = compute_ratios(sums, floor, settings.basis)
    show_contenders(sums, missing, settings)
    print(f"\nfloor: {floor['seconds']:.3f} s ({sum(floor['gflop'].values()):.0f} GFLOP at {rates.flops / 1e9:.0f} "
          f"GFLOP/s by {rates.route}; memory {rates.bytes / 1e9:.1f} GB/s); ours {ratios['ratio_to_floor']:.2f}x")
    if options.profile:
        show_profile(runs[OURS], floor)
    goals = check_goals(ratios, options.precision, named=options.named)
    show_goals(goals)
    return {"shape": asdict(options.shape), "precision": options.precision, **ratios, "missing": missing,
            "floor": floor | {"rates": asdict(rates)}, "contenders": sums, "goals": goals_to_json(goals), "runs": runs}


def show_contenders(sums: dict[str, dict], missing: dict[str, str], settings: RunSettings) -> None:
    """Print the table of all contenders."""
    phases = list(dict.fromkeys(name for row in sums.values() for name in row["phases"]))
    basis = settings.basis
    tokens = "tokens_a_cpu_second" if basis == "cpu" else "tokens_a_second"
    rows = [[name, *(row["phases"].get(phase, {}).get(basis, "-") for phase in phases),
             *(row[key] for key in ("cpu", "wall", "foreign_cores", "peak_mb", tokens))] for name, row in sums.items()]
    rows += [[name, *["-"] * (len(phases) + 5)] for name in missing]
    columns = ["contender", *phases, "CPU s", "wall s", "foreign", "peak MB", f"tokens/{basis} s"]
    print(f"\nmedians of {settings.rounds} x {settings.steps} steps; phases in {basis} seconds")
    print(f"\n{table(columns, rows)}")
    for name, reason in missing.items():
        print(f"{name}: {reason}")


def show_profile(runs: list[dict], floor: dict) -> None:
    """Print the phases with their floors, and the operators."""
    steps = [step for run in runs for step in run["steps"]]
    rows = profile.phase_rows(steps, floor["phases"], runs[-1]["prefill"])
    print(f"\n{table(['phase', 'CPU s', 'wall s', 'floor s', 'CPU / floor'], rows)}")
    rows = profile.operator_rows(runs[-1]["operators"])
    print(f"\nunder the profiler, whose own cost is included\n\n{table(['operators', 'wall s', 'share'], rows)}")


def show_goals(goals: list[Goal]) -> None:
    """Print the goals with what was measured."""
    if goals:
        print(f"\n{table(['goal', 'measured', 'required', ''], [goal.row() for goal in goals])}")


def goals_to_json(goals: list[Goal]) -> list[dict]:
    """Convert goals to JSON, with whether each is met."""
    return [asdict(goal) | {"met": goal.met} for goal in goals]


def sweep(options: argparse.Namespace, settings: RunSettings) -> dict:
    """Measure the corners of the ranges of shapes."""
    rates = measure_machine(options.precision, settings)
    corners = scaling.measure_corners(options.peers, options.precision, settings, rates)
    columns = ["shape", "ours, s", "floor, s", "ours / floor", "legacy TRL / ours", "peak, ours / legacy"]
    print(f"\n{table(columns, scaling.corner_rows(corners))}")
    goals = [replace(goal, name=f"{corner['name']}: {goal.name}") for corner in corners
             for goal in check_goals(corner, options.precision, ELSEWHERE)]
    show_goals(goals)
    return {"precision": options.precision, "rates": asdict(rates), "shapes": corners, "goals": goals_to_json(goals)}


def growth(options: argparse.Namespace, settings: RunSettings) -> dict:
    """Measure the seconds of our step against batch, response, width and vocabulary."""
    rows = scaling.measure_growth(options.shape, options.precision, settings)
    columns = ["axis", f"{settings.basis} seconds a step", "exponent", "exponent of FLOPs needed"]
    print(f"\n{table(columns, scaling.growth_rows(rows))}")
    return {"shape": asdict(options.shape), "precision": options.precision, "growth": rows}


def gpu(options: argparse.Namespace, settings: RunSettings) -> dict | None:
    """Compare ours and legacy TRL on an accelerator; None without one."""
    import torch
    if not torch.cuda.is_available():
        print("benchmarks.ppo --gpu needs a CUDA device: nothing was measured.")
        return None
    report = compare_phases(GPU_SHAPES, options.peers, replace(settings, gpu=True))
    return {"device": torch.cuda.get_device_name()} | report


def compare_phases(shapes: dict[str, Shape], peers: Path, settings: RunSettings) -> dict:
    """Measure a bf16 step of ours and of legacy TRL by phase, and our decoding against its floor, at each shape."""
    rates, report = measure_machine("bf16", settings), {}
    for name, shape in shapes.items():
        legacy = next(peer for peer in peer_contenders(peers, shape) if peer.name == LEGACY)
        runs, missing = run_in_turns([legacy, our_contender("bf16")], shape, settings)
        sums = {contender: summarise_runs(results, shape) for contender, results in runs.items()}
        floor = median_floor(shape, rates, settings.steps)
        decode = sums[OURS]["phases"]["generate"]["wall"] - runs[OURS][-1]["prefill"]["wall"]
        ratios = compute_ratios(sums, floor, "wall") | {"decode_ratio_to_floor": decode / floor["phases"]["decode"]}
        print(f"\n{name}, {rates.flops / 1e12:.3g} TFLOP/s, {rates.bytes / 1e12:.3g} TB/s")
        show_contenders(sums, missing, settings)
        rows = phase_rates(sums, shape)
        print(f"\n{table(['contender', 'phase', 'wall s', 'tokens', 'tokens/s'], rows)}")
        goals = [Goal("decode / floor", ratios["decode_ratio_to_floor"], at_most=2.0)]
        if ratios["ratio_to_legacy_trl"] is not None:
            goals.append(Goal("ratio_to_legacy_trl", ratios["ratio_to_legacy_trl"], at_least=3.0))
        show_goals(goals)
        report[name] = ratios | {"floor": floor, "contenders": sums, "missing": missing, "phases": rows,
                                 "decode_seconds": decode, "goals": goals_to_json(goals)}
    return report | {"rates": asdict(rates)}


def phase_rates(sums: dict[str, dict], shape: Shape) -> list[list]:
    """List contender, phase, wall seconds, the tokens that the phase processes, and tokens per second."""
    sampled = shape.batch * shape.response
    every = sampled + shape.batch * sum(shape.prompts) // 2
    tokens = {"generate": sampled, "reward": every, "old and reference": every, "optimise": every * shape.epochs}
    return [[name, phase, seconds["wall"], tokens[phase], tokens[phase] / max(seconds["wall"], 1e-9)]
            for name, row in sums.items() for phase, seconds in row["phases"].items() if phase in tokens]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", dest="named", choices=SHAPES, default="small", help="whose sizes the next change")
    for field in fields(Shape):
        pair = {"nargs": 2, "metavar": ("MIN", "MAX")} if field.name == "prompts" else {"metavar": "N"}
        parser.add_argument(f"--{field.name}", type=int, **pair)
    parser.add_argument("--precision", choices=tuple(AT_LEAST), default="fp32", help="of ours")
    parser.add_argument("--peer-precision", choices=tuple(AT_LEAST), default="fp32", help="of legacy TRL")
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
    options = _parser().parse_args()
    given = {field.name: getattr(options, field.name) for field in fields(Shape)}
    options.shape = replace(SHAPES[options.named], **{name: tuple(value) if name == "prompts" else value
                                                      for name, value in given.items() if value is not None})
    options.peers = options.peers.absolute()
    facts, settings = machine(), RunSettings(options.steps, options.rounds, options.threads)
    report = options.mode(options, settings)
    if report is None:
        return
    print(f"\n{facts['cpu']}, {facts['cores']} cores; load average before: {facts['load_average_before'][0]:.2f}")
    if options.json:
        record = {"machine": facts, "setting": asdict(settings) | {"basis": settings.basis}, **report}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
