"""Score an answer to a prompt with a reward model, from the hidden states of a sequence classifier.

By default the head reads the state at the last token, as in StackLLaMA. Options (scoring_file.Scoring): the head reads
every token of the answer; `log_probability_weight` times the answer's mean log-probability per token under the model's
own backbone is added, knowledge that a head at the last token would first have to learn to carry there; so is
`length_weight` times the logarithm of its length.
Shapes: B rows, M response tokens of all rows, D hidden size, V vocabulary size.
"""

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import packed_hidden_states, uses_cpu_kernels
from stages.modeling.packed.sequences import PackedResponses, scatter_to_rows
from stages.modeling.packed.token_logprobs import selective_log_softmax
from stages.modeling.torch_setup import without_autocast
from stages.reward_modeling.scoring_file import Scoring

SUM_UNIT_TOKENS = 10  # at 100, a head at the usual learning rates is too small for what one token decides


def initialise_head(model, generator: torch.Generator, pooling: str = "last") -> None:
    """Draw score.weight from Normal(0, 1/sqrt(D+1)) ("The N Implementation Details of RLHF with PPO").

    It is 0 where the head reads many tokens: their random outputs would add up and drown what is learnt.
    """
    weight = model.score.weight
    scale = 1 / math.sqrt(weight.shape[1] + 1) if pooling == "last" else 0.0
    drawn = torch.randn(weight.shape, generator=generator) * scale
    with torch.no_grad():
        weight.copy_(drawn.to(weight))


class RewardOutput(NamedTuple):
    """Raw scores [B] fp32, and the answers' mean log-probabilities per token [B], None unless computed."""

    scores: torch.Tensor
    mean_logprobs: torch.Tensor | None


def score_packed(model, packed: PackedResponses, scoring: Scoring, with_logprobs: bool = False) -> RewardOutput:
    """Score responses in one forward pass without padding: a score does not depend on the other rows."""
    classifier = unwrap_peft(model)
    positions = packed.last_positions if scoring.pooling == "last" else packed.positions
    with_logprobs = with_logprobs or bool(scoring.log_probability_weight)
    needed = torch.cat([positions, packed.predictor_positions]) if with_logprobs else positions
    hidden = packed_hidden_states(classifier, packed.batch, needed)
    scores = _pool(classifier, hidden[: len(positions)], packed, scoring.pooling)
    if scoring.length_weight:
        scores = scores + scoring.length_weight * log_lengths(packed)
    if not with_logprobs:
        return RewardOutput(scores, None)
    logprobs = mean_logprobs(classifier, hidden[len(positions) :], packed)
    return RewardOutput(scores + scoring.log_probability_weight * logprobs, logprobs)


def occurrence_weights(packed: PackedResponses) -> torch.Tensor:
    """Weight [M] each response token by log2(1 + 1 / n) at its n-th occurrence in the response."""
    row = packed.scatter_index // packed.mask.shape[1]
    row_tokens = row * (1 + packed.token_ids.max()) + packed.token_ids  # one number per row and token
    ordered, order = row_tokens.sort(stable=True)
    earlier = torch.arange(len(row_tokens), device=row_tokens.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(ordered, dtype=torch.float32).index_copy(0, order, torch.log2(1 + 1 / (1 + earlier)))


def check_tied_embeddings(config, weight: float, name: str) -> None:
    """Raise ValueError if setting `name` needs log-probabilities and the model's output layer is not tied.

    A sequence classifier has no language-model head: the input embeddings must serve as one.
    """
    if weight and not config.tie_word_embeddings:
        raise ValueError(f"reward.{name} needs a model whose output layer is tied to its embeddings; this one's is "
                         f"not: set it to 0")


def apply_head(classifier, hidden: torch.Tensor) -> torch.Tensor:
    """Apply the score head to hidden states [B, D]: scores [B] fp32, computed in fp32 whatever the precision.

    A sum over the width would lose in bf16 what tells one answer from another.
    """
    score = getattr(classifier.score, "modules_to_save", {"default": classifier.score})["default"]
    with without_autocast(hidden):
        return functional.linear(hidden.float(), score.weight.float()).squeeze(-1)


def log_lengths(packed: PackedResponses) -> torch.Tensor:
    """Return the logarithm of each response's number of tokens [B]."""
    return packed.mask.sum(-1).log()


def mean_states(hidden: torch.Tensor, packed: PackedResponses) -> torch.Tensor:
    """Average the hidden states [M, D] of all response tokens over each response: [B, D] fp32."""
    row = packed.scatter_index // packed.mask.shape[1]
    sums = hidden.new_zeros(len(packed.mask), hidden.shape[1], dtype=torch.float32)
    return sums.index_add_(0, row, hidden.float()) / packed.mask.sum(-1, keepdim=True)


def _pool(classifier, hidden: torch.Tensor, packed: PackedResponses, pooling: str) -> torch.Tensor:
    """Score the responses [B] from the hidden states that the pooling reads."""
    if pooling == "mean":
        return apply_head(classifier, mean_states(hidden, packed))
    scores = apply_head(classifier, hidden)
    if pooling == "last":
        return scores
    return scatter_to_rows(scores * occurrence_weights(packed), packed).sum(-1) / SUM_UNIT_TOKENS


def mean_logprobs(classifier, hidden: torch.Tensor, packed: PackedResponses) -> torch.Tensor:
    """Compute the mean log-probability per token [B] from the states [M, D] that predict the tokens.

    The embeddings must be tied (check_tied_embeddings).
    """
    embeddings = classifier.get_input_embeddings().weight
    layer = nn.utils.skip_init(nn.Linear, *reversed(embeddings.shape), bias=False, device="meta")
    layer.weight = embeddings
    logprobs = selective_log_softmax(
        layer, hidden, packed.token_ids, 1.0, cpu_kernels=uses_cpu_kernels(classifier))
    return scatter_to_rows(logprobs, packed).sum(-1) / packed.mask.sum(-1)
