"""The reward model: one score for a text, read at its last real token; and where its zero lies.

Shapes: B rows, T tokens, D width.
"""

import json
import math
from pathlib import Path

import torch

from stages.learning.models import autocast, batched, positions
from stages.plumbing.artifact import write_json

NORMALISATION = "normalisation.json"


def initialise_head(model, generator: torch.Generator) -> None:
    """score.weight ~ Normal(0, 1/sqrt(D+1)) ("The N Implementation Details of RLHF with PPO")."""
    weight = model.score.weight
    drawn = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1] + 1)
    with torch.no_grad():
        weight.copy_(drawn.to(weight))


def raw_scores(model, input_ids: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """Scores [B] fp32 of rows [B, T]: the head at the last real token, found by the mask, never by an id.

    Padding side, filler id and order of the rows do not matter.
    """
    classifier = model.get_base_model() if hasattr(model, "get_base_model") else model
    trunk = getattr(classifier, classifier.base_model_prefix)
    hidden = trunk(input_ids=input_ids, attention_mask=keep_mask, position_ids=positions(keep_mask)).last_hidden_state
    last = (keep_mask * torch.arange(keep_mask.shape[1], device=keep_mask.device)).argmax(-1)
    pooled = hidden[torch.arange(len(last), device=last.device), last]
    return classifier.score(pooled.to(_head_dtype(classifier))).squeeze(-1).float()


class Scorer:
    """Token ids to rewards. A merged model carries its normalisation: the mean over reference answers is then 0."""

    def __init__(self, model, precision: str, batch_rows: int = 64):
        self.model, self.precision, self.batch_rows = model, precision, batch_rows
        self.mean = float(getattr(model.config, "reward_mean", 0.0))

    @torch.no_grad()
    def __call__(self, rows: list[list[int]]) -> torch.Tensor:
        """Rewards [rows] fp32 on the CPU; rows are grouped by length, results in the order given."""
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        scores = torch.empty(len(rows))
        for start in range(0, len(order), self.batch_rows):
            chunk = order[start : start + self.batch_rows]
            ids, mask = batched([rows[i] for i in chunk], where=self.model.device)
            with autocast(self.precision):
                scores[chunk] = raw_scores(self.model, ids, mask).cpu()
        return scores - self.mean


def save_normalisation(folder: Path, mean: float, std: float, answers: int) -> None:
    """Where 0 lies: the mean raw score of `answers` reference answers (N+, arXiv 2403.17031, section on the bias)."""
    write_json(folder / NORMALISATION, {"mean": mean, "std": std, "reference_answers": answers})


def keep_normalisation(adapter: Path, out: Path, config) -> None:
    """Carry the normalisation from an adapter into a merged model: as a file, and in its config.json."""
    try:
        found = json.loads((adapter / NORMALISATION).read_text())
    except FileNotFoundError:
        raise ValueError(f"{adapter} has no {NORMALISATION}: is it a finished reward artifact?") from None
    config.reward_mean, config.reward_std = found["mean"], found["std"]
    write_json(out / NORMALISATION, found)


def _head_dtype(classifier) -> torch.dtype:
    score = getattr(classifier.score, "modules_to_save", {"default": classifier.score})["default"]
    return score.weight.dtype
