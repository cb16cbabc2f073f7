"""Score answers with a reward model, or with several."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Literal

import torch

from stages.distributed import group
from stages.modeling.load import autocast
from stages.modeling.packed.forward import FORWARD_TOKENS, own_chunks
from stages.modeling.packed.shared_prefix import pack_rows, row_lengths
from stages.reward_modeling.reward_model import score_packed
from stages.reward_modeling.scoring_file import Scoring

Combine = Literal["mean", "min", "mean_minus_std"]


class Scorer:
    """Compute rewards of answers, given as token ids: the model's raw score minus `mean`.

    The config of a merged model holds its scoring, `mean` and `std` as reward_* (scoring_file.apply_scoring). With
    pooling 'last' and log_probability_weight 0, the raw score is the logit of the plain
    AutoModelForSequenceClassification, so that reward = logit - config.reward_mean. scoring: None takes the config's.
    share_prompts: compute a prompt that comes with several answers of a batch once (shared_prefix.pack_rows).
    """

    def __init__(self, model, precision: str, scoring: Scoring | None = None, batch_rows: int = 64,
                 share_prompts: bool = False):
        self.model, self.precision, self.batch_rows, self.share_prompts = model, precision, batch_rows, share_prompts
        settings = {f.name: getattr(model.config, f"reward_{f.name}", f.default) for f in fields(Scoring)}
        self.scoring = Scoring(**settings) if scoring is None else scoring
        self.mean = float(getattr(model.config, "reward_mean", 0.0))
        self.std: float | None = getattr(model.config, "reward_std", None)  # over the reference answers

    @torch.no_grad()
    def __call__(self, prompts: list[list[int]], answers: list[list[int]], label: str | None = None) -> torch.Tensor:
        """Compute rewards [B], fp32 on the CPU, in the order of the rows; batches hold rows of similar length.

        The rows are shared among the processes. label: name of the progress line, in tokens; None shows none.
        """
        assert not self.model.training, "dropout would act on the scores"
        lengths = row_lengths(prompts, answers, self.share_prompts)
        scores = torch.zeros(len(prompts))
        for chunk in own_chunks(lengths, self.batch_rows, FORWARD_TOKENS, label):
            packed = pack_rows([prompts[i] for i in chunk], [answers[i] for i in chunk], self.model.device,
                               self.share_prompts)
            with autocast(self.precision):
                scores[chunk] = score_packed(self.model, packed, self.scoring).scores.cpu()
        return group.sum_tensor(scores) - self.mean


def combine_scores(
    scores: Sequence[torch.Tensor], combine: Combine = "mean", spread_penalty: float = 0.0
) -> torch.Tensor:
    """Combine the scores [B] of several models to one score [B] (Coste et al. 2023, arXiv 2310.02743).

    Reward models disagree first where a policy leaves their training data: 'min' and 'mean_minus_std' keep PPO from a
    reward that one of them alone gives. 'mean_minus_std' subtracts spread_penalty times the standard deviation.
    """
    if len(scores) == 1:
        return scores[0]
    stacked = torch.stack(list(scores))
    if combine == "min":
        return stacked.amin(0)
    mean = stacked.mean(0)
    return mean - spread_penalty * stacked.std(0, correction=0) if combine == "mean_minus_std" else mean
