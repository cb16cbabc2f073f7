"""Plan: say what each stage of a recipe needs and takes, before anything is downloaded or run.

    python -m stages.plan --recipe configs/stackllama.yaml --device-memory-gib 24 --devices 8
    snakemake plan --config recipe=configs/stackllama.yaml device_memory_gib=24 devices=8

From the base's config.json alone, of a local folder, of a bundled shape (configs/shapes) or of the hub: no weights. A
step of each stage's own code runs on the meta device, whose tensors have shapes and no values, so that the memory is
that of the tensors it allocates; where a stage does not fit, the smallest change of its section that makes it fit is
searched. Time is work over a share of the card's published rate: an estimate. Not a stage: it makes no artifact.
"""

import argparse
import sys
from pathlib import Path

from stages.command_line.option_parser import OptionParser
from stages.recipe.algorithms import ALGORITHMS, FIRST
from stages.runtime.environment import silence_missing_kernel

ALL = "all"


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser(prog="python -m stages.plan", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--recipe", required=True, help="recipe file, or its name in configs/")
    parser.add_argument("--algorithm", default=FIRST, choices=(*ALGORITHMS, ALL), help="what aligns the policy")
    parser.add_argument("--device", metavar="NAME", help="the card, such as H100 or 4090; a wrong name lists all")
    parser.add_argument("--device-memory-gib", type=float, metavar="GIB",
                        help="memory of a card (default: this machine's card or, without one, its processor)")
    parser.add_argument("--device-tflops", type=float, metavar="N", help="its bf16 rate without sparsity, TFLOP/s")
    parser.add_argument("--devices", type=int, metavar="N", help="number of cards (default: those here, or 1)")
    parser.add_argument("--model-flops-share", type=float, metavar="SHARE",
                        help="share of the rates that is reached (default: 0.4; of a processor: measured)")
    parser.add_argument("--pairs", type=Path, metavar="FOLDER",
                        help="a finished pairs artifact, to count its texts (default: of results/NAME)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write plan.json and plan.html there")
    return parser


if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    build_parser().parse_args()
    silence_missing_kernel()

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from stages.planning import cards, data_size, other_costs, pages, shapes, training_costs
from stages.planning.data_size import DataSize
from stages.planning.processor import measure_share
from stages.planning.smallest_change import find_smallest_change
from stages.planning.stage_plan import Hardware, StagePlan
from stages.planning.step_meter import StepMeter
from stages.recipe.lookups import SCRATCH
from stages.recipe.recipe import Recipe, load_recipe
from stages.render.terminal import escape_controls
from stages.runs.dump_paths import list_dump_files
from stages.runtime.artifact import artifact_folder
from stages.runtime.files import write_json, write_text
from stages.runtime.finished import MANIFEST


class PlannedStage(NamedTuple):
    """A stage of the recipe: its section, None if no setting of it could make it fit, and what plans it."""

    name: str
    section: Any
    plan: Callable[[Any], StagePlan]


def plan_recipe(recipe: Recipe, hardware: Hardware, size: DataSize, algorithms: tuple[str, ...] = (FIRST,)
                ) -> tuple[list[StagePlan], dict[str, pages.Change]]:
    """Plan every stage with a model; return the plans, and the change that makes those fit that do not."""
    meter = StepMeter(shapes.find_config(recipe.base.model, recipe.base.revision, recipe.base.scratch))
    plans, changes = [], {}
    for stage in _list_stages(recipe, meter, hardware, size, algorithms):
        plans.append(stage.plan(stage.section))
        if not plans[-1].fits(hardware.card):
            change = stage.section and find_smallest_change(
                stage.section, stage.plan, hardware.card, hardware.devices)
            changes[stage.name] = pages.Change(change[0], change[1].peak_bytes) if change else pages.Change({}, 0)
    return plans, changes


def _list_stages(recipe: Recipe, meter: StepMeter, hardware: Hardware, size: DataSize, algorithms: tuple[str, ...]
                 ) -> Iterator[PlannedStage]:
    """Yield the stages with a model, in the order of the run."""
    if recipe.base.model == SCRATCH:
        yield PlannedStage("base", recipe.base.scratch, partial(
            training_costs.plan_scratch, meter, hardware=hardware, tokens=size.finetune_tokens,
            save_every_minutes=recipe.base.save_every_minutes))
    else:
        yield PlannedStage("base", None, lambda section: other_costs.plan_download(meter.config))
    if recipe.prompts is None:
        yield from _with_merge(PlannedStage("sft", recipe.sft, partial(
            training_costs.plan_sft, meter, hardware=hardware, tokens=size.finetune_tokens)), recipe, meter)
        judge = {"always": True, "auto": recipe.evaluate.gold is None, "none": False}[recipe.evaluate.train_judge]
        for name in ("reward", "judge") if judge else ("reward",):
            yield from _with_merge(PlannedStage(name, recipe.reward, partial(
                training_costs.plan_pairwise, name, meter, hardware=hardware, size=size)), recipe, meter)
    for name in algorithms:
        stage = PlannedStage(name, getattr(recipe, name), _plan_algorithm(name, recipe, meter, hardware, size))
        yield from _with_merge(stage, recipe, meter) if ALGORITHMS[name].trains_model else [stage]
    if recipe.prompts is None:
        yield PlannedStage("evaluate", recipe.evaluate, partial(
            other_costs.plan_evaluate, meter.config, hardware=hardware, size=size, policies=len(algorithms)))


def _with_merge(stage: PlannedStage, recipe: Recipe, meter: StepMeter) -> Iterator[PlannedStage]:
    yield stage
    is_scorer = stage.name in ("reward", "judge")
    yield PlannedStage(f"{stage.name}-merged", recipe.merge, lambda section: other_costs.plan_merge(
        f"{stage.name}-merged", meter.config, section, is_scorer))


def _plan_algorithm(name: str, recipe: Recipe, meter: StepMeter, hardware: Hardware, size: DataSize
                    ) -> Callable[[Any], StagePlan]:
    """Return the function from the section of an algorithm to its plan."""
    members = recipe.reward.members
    plans = {
        "dpo": partial(training_costs.plan_pairwise, name, meter, hardware=hardware, size=size),
        "ilql": partial(training_costs.plan_ilql, meter, hardware=hardware, pairs=size.reward_pairs),
        "best_of_n": partial(other_costs.plan_best_of_n, meter.config, hardware=hardware,
                             questions=size.rl_questions, members=members),
        "expert_iteration": partial(other_costs.plan_expert_iteration, meter, hardware=hardware,
                                    questions=size.rl_questions, members=members),
    }
    policy_gradient = partial(training_costs.plan_policy_gradient, name, meter, hardware=hardware, reward=recipe.reward,
                              size=size)
    return plans.get(name, policy_gradient)


def _data_size(recipe: Recipe, pairs: Path | None) -> DataSize:
    own = Path("results") / recipe.name / "pairs"  # of an earlier run of this recipe
    if pairs or (own / MANIFEST).is_file():
        return data_size.measure_pairs(artifact_folder(pairs or own), recipe.sft.max_answer_tokens)
    shares = recipe.pairs
    total = shares.finetune_share + shares.reward_share + shares.rl_share + shares.evaluation_share
    return data_size.measure_dump(list_dump_files(recipe.dump), shares.finetune_share / total)


def print_plan(arguments: argparse.Namespace, algorithms: tuple[str, ...]) -> None:
    """Print the plan of a recipe, and write it to a folder if wanted; ValueError or OSError for a user's mistake."""
    hardware = cards.choose_hardware(arguments.device, arguments.device_memory_gib, arguments.device_tflops,
                                     arguments.devices, arguments.model_flops_share)
    recipe = load_recipe(arguments.recipe)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, about settings that a dry run does not reach
        if hardware.share is None:
            config = shapes.find_config(recipe.base.model, recipe.base.revision, recipe.base.scratch)
            hardware = hardware._replace(share=measure_share(config, recipe.sft, hardware))
        plans = plan_recipe(recipe, hardware, _data_size(recipe, arguments.pairs), algorithms)
    title = f"plan of {recipe.name}, base {recipe.base.model}"
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_json(arguments.out / "plan.json", pages.plan_facts(*plans, hardware))
        write_text(arguments.out / "plan.html", pages.render_page(title, *plans, hardware))
    print("\n".join(map(escape_controls, pages.format_plans(title, *plans, hardware))))


def main(words: list[str] | None = None) -> int:
    """Print the plan; return 1, after one line, for a user's mistake."""
    arguments = build_parser().parse_args(words)
    try:
        print_plan(arguments, tuple(ALGORITHMS) if arguments.algorithm == ALL else (arguments.algorithm,))
    except (ValueError, OSError) as error:
        print(f"plan: error: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
