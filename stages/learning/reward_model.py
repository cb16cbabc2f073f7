"""The reward model: one score for an answer to a prompt, read at the last real token; and where its zero lies.

Beside the published head there is an optional second term, `log_probability_weight` times the answer's mean
log-probability a token under the model's own trunk. What the language model knows (which value is the likely one) is
there at each token; a head at the last token would first have to learn to carry it to the end.
Shapes: B rows, T tokens, D width, V vocabulary.
"""

import json
import math
from pathlib import Path

import torch
from torch import nn

from stages.learning.models import autocast, batched, chunks_by_length, last_hidden_states, plain, ragged_states
from stages.learning.output_layer import log_probabilities
from stages.learning.ragged import Texts, by_row, response_tokens
from stages.plumbing.artifact import write_json

SCORING = "scoring.json"


def initialise_head(model, generator: torch.Generator) -> None:
    """score.weight ~ Normal(0, 1/sqrt(D+1)) ("The N Implementation Details of RLHF with PPO")."""
    weight = model.score.weight
    drawn = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1] + 1)
    with torch.no_grad():
        weight.copy_(drawn.to(weight))


def text_batch(prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
    """Prompts with answers, right-padded: `input_ids`, `keep_mask` and `answer_mask`, each [B, T]."""
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    input_ids, keep_mask = batched(rows)
    starts = torch.tensor([len(prompt) for prompt in prompts])
    answer_mask = keep_mask * (torch.arange(keep_mask.shape[1]) >= starts[:, None])
    return {"input_ids": input_ids, "keep_mask": keep_mask, "answer_mask": answer_mask}


def raw_scores(
    model,
    input_ids: torch.Tensor,
    keep_mask: torch.Tensor,
    answer_mask: torch.Tensor,
    log_probability_weight: float,
) -> torch.Tensor:
    """Scores [B] fp32 of rows [B, T]: the head at the last real token, plus the weighted mean log-probability.

    Positions come from the mask, never from an id: padding side, filler id and order of the rows do not matter.
    """
    classifier = plain(model)
    hidden = last_hidden_states(classifier, input_ids, keep_mask)
    last = (keep_mask * torch.arange(keep_mask.shape[1], device=keep_mask.device)).argmax(-1)
    scores = _head_scores(classifier, hidden[torch.arange(len(last), device=last.device), last])
    if log_probability_weight:
        vocabulary = classifier.get_input_embeddings().weight
        scores = scores + log_probability_weight * _mean_log_probability(hidden, vocabulary, input_ids, answer_mask)
    return scores


def check_tied(config, log_probability_weight: float) -> None:
    """A sequence classifier carries no language-model head: its log-probabilities need one tied to the embeddings."""
    if log_probability_weight and not config.tie_word_embeddings:
        raise ValueError("reward.log_probability_weight needs a model whose output layer is tied to its embeddings; "
                         "this one's is not: set it to 0")


def _mean_log_probability(hidden, vocabulary, input_ids, answer_mask) -> torch.Tensor:
    """Mean log-probability [B] of the answers' tokens, with logits only where they are needed."""
    predicts = answer_mask[:, 1:].bool()  # position t predicts token t + 1
    logits = hidden[:, :-1][predicts].to(vocabulary.dtype) @ vocabulary.T
    chosen = input_ids[:, 1:][predicts]
    log_p = -torch.nn.functional.cross_entropy(logits.float(), chosen, reduction="none")
    spread = torch.zeros(predicts.shape, device=log_p.device).masked_scatter(predicts, log_p)
    return spread.sum(-1) / predicts.sum(-1)


class Scorer:
    """Prompts and answers to rewards. A merged model carries its weights and normalisation in its config.

    log_probability_weight: given while the model trains; a merged model knows its own.
    """

    def __init__(self, model, precision: str, log_probability_weight: float | None = None, batch_rows: int = 64):
        self.model, self.precision, self.batch_rows = model, precision, batch_rows
        own = getattr(model.config, "reward_log_probability_weight", 0.0)
        self.weight = own if log_probability_weight is None else log_probability_weight
        self.mean = float(getattr(model.config, "reward_mean", 0.0))
        self.std: float | None = getattr(model.config, "reward_std", None)  # on reference answers, for those who scale

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """Rewards [B] fp32 on the CPU; rows are grouped by length, results in the order given."""
        assert not self.model.training, "dropout would act on the scores"
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        scores = torch.empty(len(prompts))
        for chunk in chunks_by_length(lengths, self.batch_rows):
            texts = response_tokens([prompts[i] for i in chunk], [answers[i] for i in chunk], self.model.device)
            with autocast(self.precision):
                scores[chunk] = self._raw(texts).cpu()
        return scores - self.mean

    def _raw(self, texts: Texts) -> torch.Tensor:
        """As `raw_scores`, of texts laid end to end."""
        classifier = plain(self.model)
        last = texts.batch.starts + texts.batch.lengths - 1
        hidden = ragged_states(classifier, texts.batch, torch.cat([last, texts.before]) if self.weight else last)
        scores = _head_scores(classifier, hidden[: len(last)])
        if self.weight:
            layer = nn.utils.skip_init(nn.Linear, *reversed(self._vocabulary().shape), bias=False, device="meta")
            layer.weight = self._vocabulary()
            log_p = by_row(log_probabilities(layer, hidden[len(last) :], texts.chosen, 1.0), texts)
            scores = scores + self.weight * log_p.sum(-1) / texts.mask.sum(-1)
        return scores

    def _vocabulary(self) -> nn.Parameter:
        return plain(self.model).get_input_embeddings().weight


def save_scoring(folder: Path, log_probability_weight: float, scores: torch.Tensor) -> None:
    """How to score, and where 0 lies: the mean raw score of reference answers (arXiv 2403.17031)."""
    write_json(
        folder / SCORING,
        {
            "log_probability_weight": log_probability_weight,
            "mean": float(scores.mean()),
            "std": float(scores.std(correction=0)),
            "reference_answers": len(scores),
        },
    )


def keep_scoring(adapter: Path, out: Path, config) -> None:
    """Carry this from an adapter into a merged model: as a file, and in its config.json."""
    write_json(out / SCORING, put_scoring(adapter, config))


def put_scoring(adapter: Path, config) -> dict:
    """Carry this from an adapter into a model's config; gives what it says."""
    try:
        found = json.loads((adapter / SCORING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{adapter} has no {SCORING}: is it a finished reward artifact?") from None
    config.reward_log_probability_weight = found["log_probability_weight"]
    config.reward_mean, config.reward_std = found["mean"], found["std"]
    return found


def _head_scores(classifier, pooled: torch.Tensor) -> torch.Tensor:
    """Scores [B] fp32 of hidden states [B, D]."""
    score = getattr(classifier.score, "modules_to_save", {"default": classifier.score})["default"]
    return classifier.score(pooled.to(score.weight.dtype)).squeeze(-1).float()
