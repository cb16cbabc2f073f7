"""Fit a reward head on the hidden states of a frozen model: a penalised logistic regression on pairs, a convex problem.

A text has three kinds of features: the mean hidden state over the answer's tokens, the logarithm of its length, and, of
a whole model with tied embeddings, its mean log-probability per token. The last two are hardly penalised, so that the
states explain what length and likelihood do not. Each text is computed once, without gradients.

Shapes: E questions, M answers of all of them, N pairs, D hidden size.
"""

import numpy as np
import torch

from stages.distributed import group
from stages.modeling.load import autocast
from stages.modeling.packed.forward import own_chunks, packed_hidden_states
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.lexical_scorer import fit_bradley_terry
from stages.reward_modeling.reward_model import log_lengths, mean_logprobs, mean_states
from stages.reward_modeling.scoring_file import Scoring

BATCH_TOKENS = 4096  # of one forward pass, unless a question's answers alone have more
PENALTY_SHARE = 0.01  # of length and log-probability, beside the penalty of a state's element


def fit_head(model, items: list[Example], *, precision: str, penalty: float, with_logprobs: bool, label: str
             ) -> Scoring:
    """Fit the classifier's head to the pairs, write it into `model`, and return how the model scores.

    penalty: of the squared weights, halved, where every feature's difference has unit root mean square over the pairs.
    label: name of the progress line.
    """
    columns, width = compute_features(model, items, precision, with_logprobs, label), model.score.in_features
    better, worse = pair_indices(items)
    weights = fit_weights(columns[better] - columns[worse], penalty, free=columns.shape[1] - width)
    with torch.no_grad():
        model.score.weight.copy_(torch.from_numpy(weights[:width])[None])
    length, logprob = [*map(float, weights[width:]), 0.0][:2]
    return Scoring(pooling="mean", log_probability_weight=logprob, length_weight=length)


def fit_weights(differences: np.ndarray, penalty: float, free: int) -> np.ndarray:
    """Fit the weights of features to their differences [N, K], better minus worse; the last `free` hardly penalised."""
    scale = np.sqrt(np.mean(differences.astype(np.float64) ** 2, axis=0))
    scale[scale == 0] = 1.0
    scale[len(scale) - free:] *= PENALTY_SHARE**0.5  # a larger feature has a smaller weight, and so a smaller penalty
    return fit_bradley_terry(differences / scale, penalty) / scale


@torch.no_grad()
def compute_features(model, items: list[Example], precision: str, with_logprobs: bool, label: str) -> np.ndarray:
    """Compute the features of all answers, in the order of the questions; the processes share the questions.

    Answers of a question share its tokens. with_logprobs: the embeddings must be tied (reward_model.mean_logprobs).

    Returns: [M, D + 1] or, with log-probabilities, [M, D + 2]: mean states, logarithm of the length, mean
        log-probability.
    """
    answers = [len(item.answers) for item in items]
    firsts = np.concatenate([[0], np.cumsum(answers)])
    tokens = [len(item.prompt) + sum(map(len, item.answers)) for item in items]
    columns = torch.zeros(int(firsts[-1]), model.score.in_features + 2)
    for batch in own_chunks(tokens, max_tokens=BATCH_TOKENS, label=label):
        rows = torch.cat([torch.arange(firsts[i], firsts[i + 1]) for i in batch])
        columns[rows] = _features_of_batch(model, [items[i] for i in batch], precision, with_logprobs).cpu()
    values = group.sum_tensor(columns).numpy()
    return values if with_logprobs else values[:, :-1]


def _features_of_batch(model, items: list[Example], precision: str, with_logprobs: bool) -> torch.Tensor:
    """Compute states, logarithms of the lengths and mean log-probabilities (or zeros) of the answers: [M, D + 2]."""
    packed = pack_with_shared_prefix([item.prompt for item in items], [item.answers for item in items], model.device)
    count = len(packed.positions)
    needed = torch.cat([packed.positions, packed.predictor_positions]) if with_logprobs else packed.positions
    with autocast(precision):
        hidden = packed_hidden_states(model, packed.batch, needed)
        lengths = log_lengths(packed)
        logprobs = mean_logprobs(model, hidden[count:], packed) if with_logprobs else torch.zeros_like(lengths)
    return torch.column_stack([mean_states(hidden[:count], packed), lengths, logprobs])
