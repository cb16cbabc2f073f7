"""Plan: say what each stage of a recipe needs and takes, before anything is downloaded or run.

    python -m stages.plan --recipe configs/stackllama.yaml --device-memory-gib 24 --devices 8

From the base's config.json alone, of a local folder, of a bundled shape (configs/shapes) or of the hub: no weights. A
step of each stage's own code runs on the meta device, whose tensors have shapes and no values, so that the memory is
that of the tensors it allocates; where a stage does not fit, the smallest change of its section that makes it fit is
searched. Time is work over a share of the card's published rate: an estimate. Not a stage: it makes no artifact.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stages.command_line.option_parser import OptionParser
from stages.planning import cards, pages, shapes, stage_costs
from stages.planning.smallest_change import find_smallest_change
from stages.planning.stage_plan import Hardware, StagePlan
from stages.recipe.recipe import Recipe, load_recipe
from stages.render.terminal import escape_controls
from stages.runs.dump_paths import list_dump_files
from stages.runtime.artifact import artifact_folder
from stages.runtime.files import write_json, write_text
from stages.stackexchange.pairs.table import count_pairs

SPLIT_SHARE_BYTES_PER_TOKEN = 8  # of Posts.xml for each token of a finetune text: half of it is other, 4 bytes a token


def plan_recipe(recipe: Recipe, hardware: Hardware, pairs: Path | None
                ) -> tuple[list[StagePlan], dict[str, pages.Change]]:
    """Plan every stage with a model; return the plans, and the change that makes those fit that do not."""
    config = shapes.find_config(recipe.base.model, recipe.base.revision, recipe.base.scratch)
    blocks = _count_blocks(recipe, pairs)
    reward_pairs = count_pairs(pairs, "reward") if pairs else None
    trainings: dict[str, tuple[Any, Callable[[Any], StagePlan]]] = {
        "sft": (recipe.sft, partial(stage_costs.plan_sft, config, hardware=hardware, blocks=blocks)),
        "reward": (recipe.reward, partial(stage_costs.plan_reward, config, hardware=hardware, pairs=reward_pairs)),
        "ppo": (recipe.ppo, partial(stage_costs.plan_ppo, config, reward_lora=recipe.reward.lora, hardware=hardware)),
    }
    plans, changes = [stage_costs.plan_download(config, hardware)], {}
    for name, (settings, plan) in trainings.items():
        plans += [plan(settings),
                  stage_costs.plan_merge(f"{name}-merged", config, recipe.merge, scorer=name == "reward")]
        if not plans[-2].fits(hardware.card):
            change = find_smallest_change(settings, plan, hardware.card, hardware.devices)
            changes[name] = pages.Change(change[0], change[1].peak_bytes) if change else pages.Change({}, 0)
    plans.append(stage_costs.plan_evaluate(config, recipe.evaluate, hardware, policies=1))
    return plans, changes | {plan.stage: pages.Change({}, 0) for plan in plans
                             if plan.stage not in trainings and not plan.fits(hardware.card)}


def _count_blocks(recipe: Recipe, pairs: Path | None) -> int | None:
    """Estimate the blocks of the finetune text, from a finished pairs artifact or from the dump; None without both."""
    length = recipe.sft.sequence_length_tokens
    if pairs:
        return max(1, int(count_pairs(pairs, "finetune") * stage_costs.MEAN_LENGTH_SHARE))
    dump_bytes = sum(Path(file).stat().st_size for file in list_dump_files(recipe.dump) if Path(file).is_file())
    shares = recipe.pairs
    total = shares.finetune_share + shares.reward_share + shares.rl_share + shares.evaluation_share
    tokens = dump_bytes * shares.finetune_share / total / SPLIT_SHARE_BYTES_PER_TOKEN
    return max(1, int(tokens / length)) if dump_bytes else None


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = OptionParser(prog="python -m stages.plan", description=__doc__,
                          formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--recipe", required=True, help="recipe file, or its name in configs/")
    parser.add_argument("--device", metavar="NAME", help="one of " + ", ".join(card.name for card in cards.CARDS))
    parser.add_argument("--device-memory-gib", type=float, metavar="GIB", help="memory of a card (default: this one's)")
    parser.add_argument("--device-tflops", type=float, metavar="N", help="its bf16 rate without sparsity, TFLOP/s")
    parser.add_argument("--devices", type=int, default=1, metavar="N", help="number of cards (default: 1)")
    parser.add_argument("--model-flops-share", type=float, default=0.4, metavar="SHARE",
                        help="share of the published rates that is reached (default: 0.4)")
    parser.add_argument("--pairs", type=Path, metavar="FOLDER", help="a finished pairs artifact, to count its texts")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="also write plan.json and plan.html there")
    return parser


def main(words: list[str] | None = None) -> int:
    """Print the plan; return 1, after one line, for a user's mistake."""
    parser = build_parser()
    arguments = parser.parse_args(words)
    if arguments.devices < 1 or not 0 < arguments.model_flops_share <= 1:
        parser.error("--devices must be at least 1, and --model-flops-share above 0 and at most 1")
    try:
        card = cards.choose_card(arguments.device, arguments.device_memory_gib, arguments.device_tflops)
        hardware = Hardware(card, arguments.devices, arguments.model_flops_share)
        recipe = load_recipe(arguments.recipe)
        plans = plan_recipe(recipe, hardware, artifact_folder(arguments.pairs) if arguments.pairs else None)
        title = f"plan of {recipe.name}, base {recipe.base.model}"
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            write_json(arguments.out / "plan.json", pages.plan_facts(*plans, hardware))
            write_text(arguments.out / "plan.html", pages.render_page(title, *plans, hardware))
    except (ValueError, OSError) as error:
        print(f"plan: error: {escape_controls(str(error))}", file=sys.stderr)
        return 1
    print("\n".join(map(escape_controls, pages.format_plans(title, *plans, hardware))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
