"""The reward model: one score for an answer to a prompt; how it is read off the states, and where its zero lies.

As published, a head reads the state at the last token. It may also read every token of the answer, and there are two
optional further terms: `log_probability_weight` times the answer's mean log-probability a token under the model's own
trunk (what the language model knows, which value is the likely one, is there at each token; a head at the last token
would first have to learn to carry it to the end), and one that counts words (lexical.py).
Shapes: B rows, M response tokens of all rows, D width, V vocabulary.
"""

import math
from typing import NamedTuple

import torch
from torch import nn

from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import packed_hidden_states
from stages.modeling.packed.sequences import PackedResponses, by_row
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.reward_modeling.scoring_file import Scoring

SUM_TOKENS = 100  # a sum over an answer's tokens counts in hundreds: it is then about the size of a mean


def initialise_head(model, generator: torch.Generator, pooling: str = "last") -> None:
    """score.weight ~ Normal(0, 1/sqrt(D+1)) ("The N Implementation Details of RLHF with PPO").

    0 where it reads many tokens: a random direction's outputs add up, and drown what is learnt.
    """
    weight = model.score.weight
    scale = 1 / math.sqrt(weight.shape[1] + 1) if pooling == "last" else 0.0
    drawn = torch.randn(weight.shape, generator=generator) * scale
    with torch.no_grad():
        weight.copy_(drawn.to(weight))


class Reading(NamedTuple):
    """Of texts: raw `scores` [B] fp32, and the answers' mean log-probability `log_p` [B] a token, if it was read."""

    scores: torch.Tensor
    log_p: torch.Tensor | None


def read(model, texts: PackedResponses, scoring: Scoring, log_p: bool = False) -> Reading:
    """One forward pass. There are no pads in it: neither padding nor the other rows matter."""
    classifier = unwrap_peft(model)
    places = texts.last if scoring.pooling == "last" else texts.own
    log_p = log_p or bool(scoring.log_probability_weight)
    hidden = packed_hidden_states(classifier, texts.batch, torch.cat([places, texts.before]) if log_p else places)
    scores = _pooled(head_scores(classifier, hidden[: len(places)]), texts, scoring.pooling)
    if not log_p:
        return Reading(scores, None)
    means = _mean_log_probabilities(classifier, hidden[len(places) :], texts)
    return Reading(scores + scoring.log_probability_weight * means, means)


def _pooled(scores: torch.Tensor, texts: PackedResponses, pooling: str) -> torch.Tensor:
    """Of the tokens read to [B]."""
    if pooling == "last":
        return scores
    if pooling == "mean":
        return by_row(scores, texts).sum(-1) / texts.mask.sum(-1)
    return by_row(scores * novelty(texts), texts).sum(-1) / SUM_TOKENS


def novelty(texts: PackedResponses) -> torch.Tensor:
    """Weight [M] of each response token: log2(1 + 1 / n) for its n-th occurrence in the response."""
    row = texts.place // texts.mask.shape[1]
    words = row * (1 + texts.chosen.max()) + texts.chosen
    ordered, order = words.sort(stable=True)
    before = torch.arange(len(words), device=words.device) - torch.searchsorted(ordered, ordered)  # in the response
    return torch.empty_like(ordered, dtype=torch.float32).index_copy(0, order, torch.log2(1 + 1 / (1 + before)))


def _mean_log_probabilities(classifier, before: torch.Tensor, texts: PackedResponses) -> torch.Tensor:
    """Mean log-probability [B] a token of the responses, from the states [M, D] before their tokens.

    The output layer is the embeddings', see `check_tied`.
    """
    vocabulary = classifier.get_input_embeddings().weight
    layer = nn.utils.skip_init(nn.Linear, *reversed(vocabulary.shape), bias=False, device="meta")
    layer.weight = vocabulary
    return by_row(selective_log_softmax(layer, before, texts.chosen, 1.0), texts).sum(-1) / texts.mask.sum(-1)


def check_tied(config, weight: float, name: str) -> None:
    """A sequence classifier carries no language-model head: its log-probabilities need one tied to the embeddings."""
    if weight and not config.tie_word_embeddings:
        raise ValueError(f"reward.{name} needs a model whose output layer is tied to its embeddings; this one's is "
                         f"not: set it to 0")


def head_scores(classifier, pooled: torch.Tensor) -> torch.Tensor:
    """Scores [B] fp32 of hidden states [B, D]."""
    score = getattr(classifier.score, "modules_to_save", {"default": classifier.score})["default"]
    return classifier.score(pooled.to(score.weight.dtype)).squeeze(-1).float()
