"""TODO docstring."""

from dataclasses import fields

import torch

from stages.modeling.load import autocast
from stages.modeling.packed.forward import chunks_by_length
from stages.modeling.packed.sequences import pack_responses
from stages.reward_modeling.lexical_term import Lexical
from stages.reward_modeling.reward_model import read
from stages.reward_modeling.scoring_file import Scoring


class Scorer:
    """Prompts and answers to rewards. A merged model carries its way of scoring and its normalisation in its config.

    scoring, words: given while the model trains; a merged model knows its own (see put_scoring).
    """

    def __init__(self, model, precision: str, scoring: Scoring | None = None, batch_rows: int = 64,
                 words: Lexical | None = None):
        self.model, self.precision, self.batch_rows = model, precision, batch_rows
        self.words = getattr(model, "lexical", None) if words is None else words
        known = {f.name: getattr(model.config, f"reward_{f.name}", f.default) for f in fields(Scoring)}
        self.scoring = Scoring(**known) if scoring is None else scoring
        self.mean = float(getattr(model.config, "reward_mean", 0.0))
        self.std: float | None = getattr(model.config, "reward_std", None)  # on reference answers, for those who scale

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """Rewards [B] fp32 on the CPU; rows are grouped by length, results in the order given."""
        assert not self.model.training, "dropout would act on the scores"
        lengths = [len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
        scores = torch.empty(len(prompts))
        for chunk in chunks_by_length(lengths, self.batch_rows):
            texts = pack_responses([prompts[i] for i in chunk], [answers[i] for i in chunk], self.model.device)
            with autocast(self.precision):
                scores[chunk] = read(self.model, texts, self.scoring).scores.cpu()
        return scores - self.mean if self.words is None else scores - self.mean + self.words(answers)


