"""Plan: say what each stage of a recipe needs and takes, before anything is downloaded or run.

    python -m stages.plan --recipe configs/stackllama.yaml --device-memory-gib 24 --devices 8
    snakemake plan --config recipe=configs/stackllama.yaml device_memory_gib=24 devices=8

From the base's config.json alone, of a local folder, of a bundled shape (configs/shapes) or of the hub: no weights. The
memory of a step is computed from the sizes of what its operations store; where a stage does not fit, the smallest
change of its section that makes it fit is searched. Time is work over a share of the card's published rate, or over
the measured rate of this processor: an estimate. Not a stage: it makes no artifact, and does not import torch.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from stages.artifacts.artifact import MANIFEST, artifact_folder
from stages.command_line.option_parser import OptionParser
from stages.command_line.start import run_tool
from stages.planning import data_size, plan_table
from stages.planning.data_size import DataSize
from stages.planning.hardware import choose_hardware
from stages.planning.other_costs import plan_stage
from stages.planning.plan_table import RecipePlan
from stages.planning.shapes import find_shape
from stages.planning.stage_plan import Run, find_smallest_change
from stages.recipe.algorithms import ALGORITHMS, FIRST
from stages.recipe.recipe import Recipe, load_recipe
from stages.render.terminal import escape_controls
from stages.render.units import format_bytes, format_duration
from stages.runs.dump_paths import list_dump_files
from stages.runtime.environment import processor_has_bf16_products, to_fp32
from stages.runtime.files import write_json
from stages.runtime.stage_lines import print_line

ALL = "all"
PAIRS_SECONDS = 60  # to wait for a run's pairs, which say how much there is to do
WITHOUT_MODEL = ("posts", "pairs", "report")
START_SECONDS = 12.0  # in which a stage imports and loads on a processor, which matters for its small models
PROCESS_BYTES = 600 << 20  # of Python and torch, which is the memory of a processor's models


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser("plan", __doc__)
    parser.add_argument("--recipe", required=True, help="recipe file, or its name in configs/")
    parser.add_argument("--algorithm", default=FIRST, choices=(*ALGORITHMS, ALL), help="what aligns the policy")
    parser.add_argument("--device", metavar="NAME", help="the card, such as H100 or 4090; a wrong name lists all")
    parser.add_argument("--device-memory-gib", type=float, metavar="GIB",
                        help="memory of a card (default: this machine's card or, without one, its processor)")
    parser.add_argument("--device-tflops", type=float, metavar="N", help="its bf16 rate without sparsity, TFLOP/s")
    parser.add_argument("--devices", type=int, metavar="N", help="number of cards (default: those here, or 1)")
    parser.add_argument("--model-flops-share", type=float, metavar="SHARE",
                        help="share of the rates that is reached (default: 0.4; of a processor: 0.5 of measured ones)")
    parser.add_argument("--pairs", type=Path, metavar="FOLDER",
                        help="a finished pairs artifact, to count its texts (default: of results/NAME)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write plan.json there")
    parser.add_argument("--stages", nargs="+", metavar="NAME",
                        help="of a run that starts now: print one line, once its pairs are there, and fail silently")
    return parser


def plan_recipe(recipe: Recipe, arguments: argparse.Namespace, algorithms: tuple[str, ...]) -> RecipePlan:
    """Plan every stage with a model for the hardware that is named, in the precisions that it really computes in."""
    hardware = choose_hardware(arguments.device, arguments.device_memory_gib, arguments.device_tflops,
                               arguments.devices, arguments.model_flops_share)
    if hardware.is_processor and not processor_has_bf16_products():
        recipe = to_fp32(recipe)
    shape = find_shape(recipe.base.model, recipe.base.revision, recipe.base.scratch)
    run = Run(shape, hardware, _data_size(recipe, arguments.pairs), recipe.reward, len(algorithms))
    plans, changes = [], {}
    for name, section in _list_stages(recipe, algorithms):
        plan = plan_stage(name, run, section)
        if not plan.fits(hardware.card):
            changes[name] = find_smallest_change(section, partial(plan_stage, name, run), hardware)
        if hardware.is_processor and plan.seconds is not None:
            plan = plan._replace(seconds=plan.seconds + START_SECONDS)
        plans.append(plan)
    return RecipePlan(f"plan of {recipe.name}, base {recipe.base.model}", hardware, plans, changes)


def _list_stages(recipe: Recipe, algorithms: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """Yield name and section of the stages with a model, in the order of the run."""
    yield "base", recipe.base
    names = list(algorithms)
    if recipe.prompts is None:
        judge = {"always": True, "auto": recipe.evaluate.gold is None, "none": False}[recipe.evaluate.train_judge]
        names = ["sft", "reward", *["judge"] * judge, *names]
    for name in names:
        yield name, getattr(recipe, "reward" if name == "judge" else name)
        if name not in ALGORITHMS or ALGORITHMS[name].trains_model:
            yield f"{name}-merged", recipe.merge
    if recipe.prompts is None:
        yield "evaluate", recipe.evaluate


def _data_size(recipe: Recipe, pairs: Path | None) -> DataSize:
    own = Path("results") / recipe.name / "pairs"  # of an earlier run of this recipe
    if pairs or (own / MANIFEST).is_file():
        return data_size.measure_pairs(artifact_folder(pairs or own), recipe.sft.max_answer_tokens)
    return data_size.measure_dump(list_dump_files(recipe.dump), recipe.pairs, recipe.sft.max_answer_tokens)


def print_plan(arguments: argparse.Namespace, algorithms: tuple[str, ...]) -> None:
    """Print the plan of a recipe, and write it to a folder if wanted; ValueError or OSError for a user's mistake."""
    plan = plan_recipe(load_recipe(arguments.recipe), arguments, algorithms)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "plan.json", plan_table.plan_facts(plan))
    print("\n".join(map(escape_controls, plan_table.format_plan(plan))))


def print_run(arguments: argparse.Namespace) -> None:
    """Print in one line what the stages of a run that has started will take, once its pairs are there to be counted."""
    recipe, started, parent = load_recipe(arguments.recipe), time.monotonic(), os.getppid()
    pairs = Path(arguments.recipe).parent / "pairs"
    while "pairs" in arguments.stages and not (pairs / MANIFEST).is_file() and os.getppid() == parent and (
            time.monotonic() < started + PAIRS_SECONDS):
        time.sleep(0.5)
    if (pairs / MANIFEST).is_file():
        arguments.pairs = pairs
    algorithms = tuple(name for name in ALGORITHMS if name in arguments.stages) or (FIRST,)
    plan = plan_recipe(recipe, arguments, algorithms)
    names = [name.partition("-")[0] if name.startswith(("evaluate-", "report-")) else name for name in arguments.stages]
    planned = [stage for stage in plan.stages if stage.stage in names and stage.seconds is not None]
    if planned and os.getppid() == parent:  # the run has not ended
        seconds, peak = sum(stage.seconds for stage in planned), max(stage.peak_bytes for stage in planned)
        about = "about" if plan.hardware.is_processor else "at least"  # on a card, small models wait for launches
        if plan.hardware.is_processor:
            seconds += START_SECONDS * sum(name in WITHOUT_MODEL for name in names)
            peak += PROCESS_BYTES
        print_line(f"the plan: {about} {format_duration(seconds)} and at most {format_bytes(peak)} of memory, if "
                   f"nothing else runs on this machine ({plan.hardware.card.name})")


def main(words: list[str] | None = None) -> int:
    """Print the plan; return 1, after one line, for a user's mistake."""
    arguments = build_parser().parse_args(words)
    if arguments.stages:
        with suppress(Exception):  # it is beside a run, which goes on without
            print_run(arguments)
        return 0
    algorithms = tuple(ALGORITHMS) if arguments.algorithm == ALL else (arguments.algorithm,)
    return run_tool("plan", arguments.out or Path(), partial(print_plan, arguments, algorithms))


if __name__ == "__main__":
    sys.exit(main())
