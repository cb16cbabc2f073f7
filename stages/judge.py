"""Train the judge: a held-out reward model that the evaluation uses where no gold score is known.

    python -m stages.judge --recipe configs/sites.yaml --base results/sites/sft-merged \\
        --pairs results/sites/pairs --out results/sites/judge

PPO raises the score of the reward model that it optimises, right or wrong. The judge is another one: trained as
stages/reward.py does, with the recipe's `reward` settings, but one member, `seed` + SEED_OFFSET, and the pairs of the
rl split. The reward model is trained on the reward split and compared on the evaluation split. Of the rl split, PPO
reads only prompts, never which answer was preferred. On a site with too few pairs the artifact says so (no_model.json).
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from dataclasses import replace
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.recipe.sections.reward import Reward
from stages.reward import train_members
from stages.reward_modeling.dataset import TooFewPairsError
from stages.reward_modeling.scoring_file import write_no_model
from stages.runtime.stage_lines import print_line

SPLIT = "rl"
SEED_OFFSET = 1000  # above the seeds of the reward model's members


def run(config: Reward, out: Path, *, base: Path, pairs: Path, context: RunContext | None = None) -> dict[str, float]:
    """Fill `out` as stages.reward does and return its metrics, or write no_model.json if there are too few pairs."""
    settings = replace(config, members=1, seed=config.seed + SEED_OFFSET)
    try:
        return train_members(settings, out, base, pairs, context, stage="judge", split=SPLIT)
    except TooFewPairsError as error:
        print_line(f"judge: no model is trained: {error}")
        write_no_model(out, str(error))
        return {"pairs": 0}
