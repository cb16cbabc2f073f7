"""Reward models that a stage uses as sources of its reward: where they are, and whether they score as in training."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from stages.distributed import sharding
from stages.modeling import families
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import load_held_out, load_scoring, member_folders
from stages.rewards.reward_functions import MODEL, is_reward_artifact

COMPARED_TOKENS = 8192  # of stored examples: more say little more, and a deep model scores them for half a minute


@dataclass(frozen=True)
class ScoreConsistency:
    """Scores of reference answers now, compared with those at the end of training."""

    training_precision: str
    precision: str
    correlation: float | None  # Pearson's r; None for under three stored scores, or equal ones
    max_difference_stds: float | None  # in standard deviations of the scores; None likewise


def compare_with_training(scorer: Scorer, folder: Path) -> ScoreConsistency:
    """Score the examples stored in the artifact `folder` with the scorer loaded from it."""
    scoring = load_scoring(folder)
    examples, training_precision = _first_examples(scoring["examples"]), scoring["precision"]
    before = torch.tensor([example["score"] for example in examples])
    if len(examples) < 3 or not before.std() > 0:
        return ScoreConsistency(training_precision, scorer.precision, None, None)
    now = scorer([example["prompt"] for example in examples], [example["answer"] for example in examples]) + scorer.mean
    correlation = float(torch.corrcoef(torch.stack([before, now]))[0, 1])
    difference = float((now - before).abs().max() / before.std())
    return ScoreConsistency(training_precision, scorer.precision, correlation, difference)


def _first_examples(examples: list[dict]) -> list[dict]:
    """Take the first examples of up to COMPARED_TOKENS tokens, and three at least."""
    totals = accumulate(len(example["prompt"]) + len(example["answer"]) for example in examples)
    return examples[: max(3, sum(total <= COMPARED_TOKENS for total in totals))]


def check_consistency(consistency: ScoreConsistency, folder: Path, min_correlation: float) -> str:
    """Describe the comparison in one line; ValueError if the correlation is below the minimum, or NaN."""
    if consistency.correlation is None:
        return (f"trained in {consistency.training_precision}, loaded in {consistency.precision}: too few stored "
                f"scores to compare")
    line = (f"correlation {consistency.correlation:.5f} with the scores in training, largest difference "
            f"{consistency.max_difference_stds:.2g} standard deviations (trained in {consistency.training_precision}, "
            f"loaded in {consistency.precision}; minimum correlation {min_correlation:g})")
    if not consistency.correlation >= min_correlation:
        raise ValueError(f"the reward model {folder} does not score as in training: {line}. Load it in the precision "
                         f"it was trained in (ppo.precision), or lower ppo.min_reward_correlation")
    return line


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
