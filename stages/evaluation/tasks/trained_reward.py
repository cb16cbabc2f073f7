"""Score answers by the reward that policies were trained on, and by each of its functions apart."""

from collections.abc import Hashable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.evaluation.tasks.trained_policies import PolicyTraining
from stages.modeling.adapters import is_adapter
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import Scorer
from stages.rewards.checked_models import reward_artifact
from stages.rewards.reward_functions import load_reward_functions
from stages.rewards.shaping import RewardSum
from stages.runtime.progress import track


class TrainedReward:
    """The weighted sum of the functions in `rewards`, as training computes it before baseline, scale, clip, penalties
    and KL.

    Each distinct answer to a prompt is scored once: who gives the same answer has the same score, also by a function
    that is random. Functions are called with at most `batch_texts` answers.
    """

    def __init__(self, training: PolicyTraining, tokenizer, *, precision: str, batch_texts: int,
                 cpu_kernels: str = "off"):
        self.batch_texts = batch_texts
        load_models = partial(_load_merged, reward=training.reward and Path(training.reward), precision=precision,
                              batch_rows=batch_texts, cpu_kernels=cpu_kernels)
        self._sum = RewardSum(
            [function for entry in training.rewards for function in load_reward_functions(
                **entry, precision=precision, pairs=None, load_models=load_models)],
            tokenizer, combine=training.reward_combine, spread_penalty=training.spread_penalty,
            template=training.prompt_template)
        self._scores: dict[tuple, np.ndarray] = {}

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each part of the sum, by name."""
        return self._sum.weights

    def score(self, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, np.ndarray]:
        """Compute rewards [N] by writer; texts: lists of prompts and of responses, as token ids, by writer."""
        return {writer: scores[0] for writer, scores in self._score_texts(texts).items()}

    def score_parts(self, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, dict[str, np.ndarray]]:
        """Compute the unweighted scores [N] of each part, by writer; none where the reward is one function's own."""
        parts = [] if list(self.weights.values()) == [1.0] else self.weights
        return {writer: dict(zip(parts, scores[1:], strict=False))
                for writer, scores in self._score_texts(texts).items()}

    def _score_texts(self, texts: dict[Hashable, tuple[list, list]]) -> dict[Hashable, np.ndarray]:
        """Compute the rewards, and the scores of the P parts beside them, by writer: [1 + P, N]."""
        rows = {writer: [(tuple(start), tuple(end)) for start, end in zip(*both, strict=True)]
                for writer, both in texts.items()}
        new = list(dict.fromkeys(row for part in rows.values() for row in part if row not in self._scores))
        starts = range(0, len(new), self.batch_texts)
        for start in track(starts, "evaluate: rewards", len(starts), f"x {self.batch_texts} texts"):
            batch = new[start:start + self.batch_texts]
            total, parts = self._sum(*([list(row[side]) for row in batch] for side in (0, 1)))
            columns = torch.stack([total, *(parts[name] for name in self.weights)], 1)
            self._scores |= zip(batch, columns.double().numpy(), strict=True)
        width = 1 + len(self.weights)
        return {writer: np.array([self._scores[row] for row in own]).reshape(-1, width).T.copy()
                for writer, own in rows.items()}


def _load_merged(source: str, reward: Path | None, **options) -> list[Scorer]:
    """Load the models of a reward artifact that training named; ValueError for an adapter, which has no base here."""
    folder = reward_artifact(source, reward)
    if is_adapter(folder):
        raise ValueError(f"the policy was trained with the reward model {folder}, an adapter, which the evaluation "
                         f"cannot load: train with the merged one")
    return load_reward_models(folder, **options)
