"""Time the training stages and the evaluation in 1, 2 and 4 processes of one thread, on the artifacts of a run.

    python -m benchmarks.scaling.run results/demo
    python -m benchmarks.scaling.run results/demo --processes 1 2 --stages ppo evaluate --rounds 3

The settings are those of the run, but with fewer steps. All counts run in turns; figures are medians over --rounds.
seconds: of the whole stage, with its start. gain: seconds of the first count, divided by these. CPU: seconds of all
processes. transfers: share of the first process's seconds in sums and gathers, which is transfers, and waiting for the
other processes. imports: share of the seconds in which Python starts and imports the stage, which more processes do not
shorten. A machine with other work makes all of them wait: see that it has none.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path
from statistics import median

import yaml

from benchmarks.common.process_cost import measured
from benchmarks.common.tables import table
from benchmarks.data.stage_runs import delete, say
from stages.recipe.recipe import load_recipe
from stages.recipe.schema import to_dict

FEWER_STEPS = {
    "base": {"scratch": {"epochs": 10, "max_tokens": 250_000}},
    "sft": {"max_steps": 60, "evaluate_every_steps": 1000},
    "reward": {"train_pairs": 3000, "epochs": 1.0},
    "ppo": {"iterations": 6, "validation_prompts": 32, "learning_rate_decay": False},
    "evaluate": {"prompts": 64, "temperature_prompts": 16, "max_pairs": 400, "cache": False},
}
INPUTS = {  # options of each stage, with the artifacts that they name
    "base": {"pairs": "pairs"},
    "sft": {"base": "base", "pairs": "pairs"},
    "reward": {"base": "sft-merged", "pairs": "pairs"},
    "ppo": {"policy": "sft-merged", "reward": "reward-merged", "pairs": "pairs"},
    "evaluate": {"base": "base", "sft": "sft-merged", "policy": "ppo=ppo-merged", "reward": "reward-merged",
                 "pairs": "pairs", "posts": "posts"},
}


def write_recipe(run: Path, folder: Path) -> Path:
    """Write the run's recipe with fewer steps."""
    path = folder / "recipe.yaml"
    recipe = load_recipe(run / "recipe.yaml", FEWER_STEPS)
    path.write_text(yaml.safe_dump(to_dict(recipe)), encoding="utf-8")
    return path


def run_stage(stage: str, run: Path, recipe: Path, folder: Path, processes: int) -> dict[str, float]:
    """Run a stage once; return the seconds, CPU seconds, and seconds in transfers."""
    out = delete(folder / stage)
    named = [name.partition("=") for name in INPUTS[stage].values()]
    sources = [f"{policy}={run / path}" if path else str(run / policy) for policy, _, path in named]
    options = [word for option, source in zip(INPUTS[stage], sources, strict=True) for word in (f"--{option}", source)]
    cost = measured("-m", f"stages.{stage}", "--recipe", recipe, *options, "--out", out, "--processes", processes)
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    transfers = manifest.get("transfer_seconds", 0.0)
    say(f"{stage}, {processes} process(es): {manifest['seconds']:.1f} s, {cost.cpu:.1f} CPU s, {transfers:.1f} s in "
        f"transfers")
    return {"seconds": manifest["seconds"], "cpu": cost.cpu, "transfers": transfers}


def measure(stages: list[str], run: Path, counts: list[int], rounds: int) -> list[list]:
    """Run the stages in turns; return a row of the table for each stage and number of processes."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, rows = write_recipe(run, Path(folder)), []
        for stage in stages:
            imports = median(measured("-c", f"import stages.{stage}").wall for _ in range(rounds))
            runs: dict[int, list[dict]] = {count: [] for count in counts}
            for _ in range(rounds):
                for count in counts:
                    runs[count].append(run_stage(stage, run, recipe, Path(folder), count))
            medians = {count: {name: median(run[name] for run in results) for name in results[0]}
                       for count, results in runs.items()}
            first = medians[counts[0]]["seconds"]
            for count, numbers in medians.items():
                seconds = numbers["seconds"]
                shares = [f"{part / seconds:.0%}" for part in (numbers["transfers"], imports)]
                rows.append([stage, count, seconds, first / seconds, numbers["cpu"], *shares])
    return rows


def main() -> None:
    """Measure what the command line names, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N")
    parser.add_argument("--stages", nargs="+", choices=INPUTS, default=list(INPUTS))
    parser.add_argument("--rounds", type=int, default=1, metavar="N")
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")  # a process has at least one
    rows = measure(given.stages, given.run.resolve(), given.processes, given.rounds)
    names = ["stage", "processes", "seconds", "gain", "CPU seconds", "transfers", "imports"]
    print(f"\n{table(names, rows)}")


if __name__ == "__main__":
    main()
