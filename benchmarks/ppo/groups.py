"""Compare steps of RLOO and GRPO with PPO's and with TRL 1.16's RLOOTrainer and GRPOTrainer.

    python -m benchmarks.ppo.groups --json groups.json

All contenders sample as many responses of as many tokens a step and take --epochs passes over them, in minibatches of
the same size; PPO samples one response to each prompt, the others --responses. Each contender runs in its own process,
in turns (A B A B): one warm-up step, then --steps steps, --rounds times. Figures are medians over steps; ratios are of
CPU seconds with one thread. `foreign` is the number of cores that other processes used.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.common.tables import Goal, machine, table
from benchmarks.ppo.processes import OURS, Contender, RunSettings, run_in_turns, summarise_runs
from benchmarks.ppo.workload import Shape

METHODS = ("ppo_head", "ppo_model", "rloo", "grpo")
PEERS = ("rloo", "grpo")
AT_MOST_OF_PPO, AT_LEAST_TRL = 0.7, 3.0


def list_contenders(responses: int) -> list[Contender]:
    """List ours and TRL's by method."""
    def contender(name: str, module: str, method: str) -> Contender:
        return Contender(f"{name} {method}", Path(sys.executable), module,
                         ("--method", method, "--responses", str(responses)))

    return [*(contender(OURS, "benchmarks.ppo.group_steps", method) for method in METHODS),
            *(contender("TRL", "benchmarks.ppo.peers.trl_1_16", method) for method in PEERS)]


def compute_goals(sums: dict[str, dict], basis: str) -> list[Goal]:
    """Compare seconds a step of each method with PPO's and with TRL's, where they ran."""
    goals = []
    for method in PEERS:
        seconds = sums[f"{OURS} {method}"][basis]
        goals += [Goal(f"{method} / {critic}", seconds / sums[f"{OURS} {critic}"][basis], at_most=AT_MOST_OF_PPO)
                  for critic in METHODS[:2]]
        if f"TRL {method}" in sums:
            goals.append(Goal(f"TRL {method} / ours", sums[f"TRL {method}"][basis] / seconds, at_least=AT_LEAST_TRL))
    return goals


def main() -> None:
    """Run all contenders in turns, print the table of ratios, and write the figures as JSON if wanted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("layers", 6), ("vocabulary", 4096), ("response", 64), ("batch", 32),
                          ("minibatch", 8), ("epochs", 1), ("responses", 4), ("steps", 2), ("rounds", 2),
                          ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    options = parser.parse_args()
    if options.minibatch % options.responses:
        parser.error(f"--minibatch {options.minibatch} must be a multiple of --responses {options.responses}")
    shape = Shape(**{name: getattr(options, name) for name in
                     ("width", "layers", "vocabulary", "response", "batch", "minibatch", "epochs")})
    facts, settings = machine(), RunSettings(options.steps, options.rounds, options.threads)
    runs, missing = run_in_turns(list_contenders(options.responses), shape, settings)
    sums = {name: summarise_runs(results, shape) for name, results in runs.items()}
    goals = compute_goals(sums, settings.basis)
    columns = ("cpu", "wall", "foreign_cores", "peak_mb")
    rows = [[name, *(row[key] for key in columns)] for name, row in sums.items()]
    print(table(["contender", "CPU s", "wall s", "foreign", "peak MB"], rows))
    print(f"\n{table(['goal', 'measured', 'required', ''], [goal.row() for goal in goals])}")
    if options.json:
        record = {"machine": facts, "setting": asdict(settings), "shape": asdict(shape), "responses": options.responses,
                  "missing": missing, "contenders": sums, "goals": [asdict(goal) | {"met": goal.met} for goal in goals]}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
