"""A folder with base, pairs, and a reward model that the stages have trained and merged."""

from pathlib import Path

from stages import merge, reward
from stages.recipe.sections.models import Merge
from stages.recipe.sections.reward import Reward
from tests.helpers import tiny_models


def save_trained_reward(folder: Path, config: Reward) -> Path:
    """Fill `folder` with base, pairs, reward and merged."""
    tiny_models.save_base(folder / "base")
    tiny_models.save_pairs(folder / "pairs")
    for name in ("reward", "merged"):
        (folder / name).mkdir()
    reward.run(config, folder / "reward", base=folder / "base", pairs=folder / "pairs")
    merge.run(Merge(dtype="fp32"), folder / "merged", base=folder / "base", adapter=[str(folder / "reward")],
              pairs=folder / "pairs")
    return folder
