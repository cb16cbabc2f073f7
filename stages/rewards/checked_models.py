"""Reward models that a stage uses as sources of its reward: where they are, and whether they score as in training."""

from collections.abc import Callable, Iterable
from pathlib import Path

from stages.distributed import sharding
from stages.modeling import families
from stages.reward_modeling.consistency import check_consistency, compare_with_training
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import load_held_out, member_folders
from stages.rewards.reward_functions import MODEL, is_reward_artifact


def reward_artifact(source: str, reward: Path | None) -> Path:
    """Return the folder of the reward models that a source names: 'model' names `reward`, which is then given."""
    return reward if source == MODEL else Path(source)


def load_held_out_accuracies(sources: Iterable[str], reward: Path | None) -> dict[Path, dict | None]:
    """Read the accuracy on held-out pairs of every reward model among the sources, by folder; None: not measured.

    Reads no weights, and nothing of sources that are no reward model of this pipeline.
    """
    artifacts = [reward_artifact(source, reward) for source in sources if is_reward_artifact(source)]
    return {folder: numbers for artifact in artifacts for folder, numbers in load_held_out(artifact).items()}


def check_scorers(
    scorers: list[Scorer], artifact: Path, *, longest_tokens: int, min_correlation: float, sharded: bool,
    say: Callable[[str], None],
) -> list[Scorer]:
    """Check that the models of an artifact score as in training and have positions for the texts; return them.

    sharded: split their layers over the processes first.
    """
    for scorer, folder in zip(scorers, member_folders(artifact), strict=True):
        families.check_length(scorer.model.config, longest_tokens)
        if sharded:
            sharding.shard(families.backbone(scorer.model))
        consistency = compare_with_training(scorer, folder)
        say(f"check  reward model  {check_consistency(consistency, folder, min_correlation)}")
    return scorers
