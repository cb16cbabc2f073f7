"""Does a reward model score as it did when it was trained? Another precision, or a damaged file, would show here."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING


@dataclass(frozen=True)
class Agreement:
    """Of the scores of reference answers now with those at the end of training.

    correlation: Pearson's; difference: the largest, in standard deviations of the scores. None where the scores kept
    are too few, or all the same.
    """

    trained_in: str
    served_in: str
    correlation: float | None
    difference: float | None


def agreement(scorer: Scorer, folder: Path) -> Agreement:
    """Score the examples that the artifact in `folder` keeps, with the scorer that was loaded from it."""
    found = json.loads((folder / SCORING).read_text(encoding="utf-8"))
    examples, trained_in = found["examples"], found["precision"]
    before = torch.tensor([example["score"] for example in examples])
    if len(examples) < 3 or not before.std() > 0:
        return Agreement(trained_in, scorer.precision, None, None)
    now = scorer([example["prompt"] for example in examples], [example["answer"] for example in examples]) + scorer.mean
    correlation = float(torch.corrcoef(torch.stack([before, now]))[0, 1])
    return Agreement(trained_in, scorer.precision, correlation, float((now - before).abs().max() / before.std()))


def check(found: Agreement, folder: Path, least: float) -> str:
    """A line for people; ValueError where the correlation is below `least`, or no number."""
    if found.correlation is None:
        return f"trained in {found.trained_in}, served in {found.served_in}: too few scores kept to compare"
    words = (f"correlation {found.correlation:.5f} with the scores in training, {found.difference:.2g} standard "
             f"deviations apart at most (trained in {found.trained_in}, served in {found.served_in}; limit {least:g})")
    if not found.correlation >= least:
        raise ValueError(f"the reward model {folder} does not score as it was trained to: {words}. Serve it in the "
                         f"precision it was trained in (ppo.precision), or lower ppo.min_reward_correlation")
    return words
