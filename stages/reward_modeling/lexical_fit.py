"""The reward model's lexical term, learnt before its head, and what the head is told of it. Shapes: B answers."""

import numpy as np
import torch

from stages.modeling.load import autocast
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.lexical_term import Lexical, counts, fitted
from stages.reward_modeling.reward_model import read
from stages.reward_modeling.scoring_file import Scoring
from stages.runtime.progress import track
from stages.stackexchange.pairs.table import group_numbers

FOLDS = 5


def stacked(
    model,
    items: list[Example],
    scoring: Scoring,
    precision: str,
    *,
    buckets: int,
    penalty: float,
    characters: torch.Tensor,
    quiet: bool = False,
) -> Lexical:
    """The term learnt from all items, beside what `model`, not yet trained, says of them by `scoring` (None will do
    where that weighs no log-probability). characters: see lexical.characters_of.

    Every item is given what a term learnt from other questions says of its answers: FOLDS of them are learnt for that.
    """
    others = _log_probabilities(model, items, scoring, precision, quiet)
    bags = counts([answer for item in items for answer in item.answers], buckets, characters)
    better, worse = map(np.array, pair_indices(items))
    folds = group_numbers(item.question for item in items) % FOLDS
    of_answer = np.repeat(folds, [len(item.answers) for item in items])
    settings = {"buckets": buckets, "penalty": penalty, "others": others}
    unseen = torch.zeros(len(of_answer), dtype=torch.float64)
    for fold in track(range(FOLDS), "reward, lexical term", FOLDS, "folds", quiet):
        kept = of_answer[better] != fold
        weights = fitted(bags, better[kept], worse[kept], **settings)
        here = torch.from_numpy(of_answer == fold)
        unseen[here] = bags.scores(weights)[here]
    for item, given in zip(items, unseen.split([len(item.answers) for item in items]), strict=True):
        item.given = given.tolist()
    return Lexical(fitted(bags, better, worse, **settings), characters)


@torch.no_grad()
def _log_probabilities(model, items: list[Example], scoring: Scoring, precision: str, quiet: bool) -> torch.Tensor:
    """What the answers' mean log-probability adds to their scores [B] float64, before anything is learnt."""
    if not scoring.log_probability_weight:
        return torch.zeros(sum(len(item.answers) for item in items), dtype=torch.float64)
    found = []
    for item in track(items, "reward, log-probabilities", len(items), "examples", quiet):
        texts = pack_with_shared_prefix([item.prompt], [item.answers], model.device)
        with autocast(precision):
            found.append(read(model, texts, scoring, log_p=True).log_p.cpu())
    return scoring.log_probability_weight * torch.cat(found).double()
