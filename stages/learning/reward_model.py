"""The reward model: one score for an answer to a prompt; where it is read, and where its zero lies.

Pooling 'last token' reads the head at the last real token, as published. 'answer mean' reads it at every token of the
answer, EOS included, and averages: what is wrong with an answer can then be seen where it is said, without having to
be carried to the end first.
Shapes: B rows, T tokens, D width.
"""

import json
import math
from pathlib import Path

import torch

from stages.learning.models import autocast, batched, positions
from stages.plumbing.artifact import write_json

SCORING = "scoring.json"
LAST_TOKEN, ANSWER_MEAN = "last token", "answer mean"


def initialise_head(model, generator: torch.Generator) -> None:
    """score.weight ~ Normal(0, 1/sqrt(D+1)) ("The N Implementation Details of RLHF with PPO")."""
    weight = model.score.weight
    drawn = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1] + 1)
    with torch.no_grad():
        weight.copy_(drawn.to(weight))


def text_batch(prompts: list[list[int]], answers: list[list[int]], pooling: str) -> dict[str, torch.Tensor]:
    """Prompts with answers, right-padded: `input_ids`, `keep_mask` and `read_mask`, each [B, T].

    read_mask is 1 where the head is read: at the last real token, or at every token of the answer.
    """
    rows = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    input_ids, keep_mask = batched(rows)
    read_mask = torch.zeros_like(keep_mask)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        read_mask[row, end - 1 if pooling == LAST_TOKEN else len(prompt) : end] = 1
    return {"input_ids": input_ids, "keep_mask": keep_mask, "read_mask": read_mask}


def raw_scores(
    model, input_ids: torch.Tensor, keep_mask: torch.Tensor, read_mask: torch.Tensor
) -> torch.Tensor:
    """Scores [B] fp32 of rows [B, T]: the head on the mean of the last hidden states where `read_mask` is 1.

    Positions come from the mask, never from an id: padding side, filler id and order of the rows do not matter.
    """
    classifier = model.get_base_model() if hasattr(model, "get_base_model") else model
    trunk = getattr(classifier, classifier.base_model_prefix)
    hidden = trunk(input_ids=input_ids, attention_mask=keep_mask, position_ids=positions(keep_mask)).last_hidden_state
    read = read_mask[..., None].to(hidden.dtype)
    pooled = (hidden * read).sum(1) / read.sum(1)
    return classifier.score(pooled.to(_head_dtype(classifier))).squeeze(-1).float()


class Scorer:
    """Prompts and answers to rewards. A merged model carries its pooling and its normalisation in its config."""

    def __init__(self, model, precision: str, pooling: str | None = None, batch_rows: int = 64):
        self.model, self.precision, self.batch_rows = model, precision, batch_rows
        self.pooling = pooling or getattr(model.config, "reward_pooling", LAST_TOKEN)
        self.mean = float(getattr(model.config, "reward_mean", 0.0))

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """Rewards [B] fp32 on the CPU; rows are grouped by length, results in the order given."""
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]) + len(answers[i]))
        scores = torch.empty(len(prompts))
        for start in range(0, len(order), self.batch_rows):
            chunk = order[start : start + self.batch_rows]
            batch = text_batch([prompts[i] for i in chunk], [answers[i] for i in chunk], self.pooling)
            with autocast(self.precision):
                found = raw_scores(self.model, **{name: tensor.to(self.model.device) for name, tensor in batch.items()})
            scores[chunk] = found.cpu()
        return scores - self.mean


def save_scoring(folder: Path, pooling: str, scores: torch.Tensor) -> None:
    """How to score: the pooling, and where 0 lies, the mean raw score of reference answers (arXiv 2403.17031)."""
    write_json(folder / SCORING, {"pooling": pooling, "mean": float(scores.mean()),
                                  "std": float(scores.std(correction=0)), "reference_answers": len(scores)})


def keep_scoring(adapter: Path, out: Path, config) -> None:
    """Carry pooling and normalisation from an adapter into a merged model: as a file, and in its config.json."""
    try:
        found = json.loads((adapter / SCORING).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{adapter} has no {SCORING}: is it a finished reward artifact?") from None
    config.reward_pooling, config.reward_mean, config.reward_std = found["pooling"], found["mean"], found["std"]
    write_json(out / SCORING, found)


def _head_dtype(classifier) -> torch.dtype:
    score = getattr(classifier.score, "modules_to_save", {"default": classifier.score})["default"]
    return score.weight.dtype
