"""Load the reward model to be judged, and score texts and sampled answers with it.

It is a merged reward artifact of this project, or any sequence classifier with one output, by folder or hub id.
Shapes: M texts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from stages.evaluation.policy_answers import Answers
from stages.modeling import families
from stages.modeling.load import check_whole_model
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.no_model import read_no_model
from stages.reward_modeling.scorer import combine_scores
from stages.rewards.classifier import ClassifierScorer
from stages.rewards.sources import is_reward_artifact
from stages.runtime.progress import track
from stages.stackexchange.prompt import encode_examples

SCORED_AT_ONCE = 512  # texts


class RewardUnderTest(Protocol):
    """A reward model with its tokenizer; max_tokens: of the longest question with its answer that it reads."""

    tokenizer: object
    max_tokens: int

    def score_texts(self, questions: Sequence[str], answers: Sequence[str], label: str) -> np.ndarray:
        """Compute the rewards [M] of complete answers; label: name of the progress line."""

    def score_sampled(self, questions: Sequence[str], prompts: list[list[int]], sampled: Answers, tokenizer, label: str
                      ) -> np.ndarray:
        """Compute the rewards [M] of a policy's answers; prompts, tokenizer: the policy's."""


def load_reward(source: str, template: str, cpu_kernels: str) -> RewardUnderTest:
    """Load a reward model in fp32; ValueError, in one line, if it cannot be used."""
    folder = Path(source)
    if reason := read_no_model(folder):
        raise ValueError(f"--reward {source}: there is no model: {reason}")
    check_whole_model(folder)
    if is_reward_artifact(source):
        return ArtifactReward(folder, cpu_kernels)
    if "{response}" not in template:
        raise ValueError(f"--template must contain {{response}}, and {template!r} does not")
    return ClassifierReward(source, template)


class ArtifactReward:
    """A merged reward artifact; several models in it are averaged."""

    def __init__(self, folder: Path, cpu_kernels: str):
        self.tokenizer = load_tokenizer(folder)
        self.max_tokens = families.max_positions(folder)
        self.scorers = load_reward_models(folder, "fp32", cpu_kernels=cpu_kernels)

    def score_texts(self, questions, answers, label) -> np.ndarray:
        """Compute the rewards [M] of complete answers, which EOS closes."""
        encoded = list(encode_examples(self.tokenizer, zip(questions, answers, strict=True)))
        return self._score_ids([prompt for prompt, _ in encoded], [answer for _, answer in encoded], label)

    def score_sampled(self, questions, prompts, sampled, tokenizer, label) -> np.ndarray:
        """Compute the rewards [M] of the ids as sampled, or of the texts if the policy has another vocabulary."""
        if tokenizer.get_vocab() != self.tokenizer.get_vocab():
            return self.score_texts(questions, sampled.texts, label)
        return self._score_ids(prompts, sampled.responses, label)

    def _score_ids(self, prompts: list, answers: list, label: str) -> np.ndarray:
        return _score_in_parts(lambda *rows: combine_scores([scorer(*rows) for scorer in self.scorers]).numpy(),
                               prompts, answers, label)


class ClassifierReward:
    """A sequence classifier of anyone's, with its own tokenizer and template."""

    def __init__(self, name: str, template: str):
        self.scorer = ClassifierScorer(name, template, "fp32")
        self.tokenizer, self.max_tokens = self.scorer.tokenizer, self.scorer.max_tokens

    def score_texts(self, questions, answers, label) -> np.ndarray:
        """Compute the rewards [M]; the template says whether a token closes the answers."""
        return _score_in_parts(lambda *rows: self.scorer(*rows).numpy(), questions, answers, label)

    def score_sampled(self, questions, prompts, sampled, tokenizer, label) -> np.ndarray:
        """Compute the rewards [M] of the sampled texts."""
        return self.score_texts(questions, sampled.texts, label)


def _score_in_parts(score: Callable, starts: Sequence, ends: Sequence, label: str) -> np.ndarray:
    """Score rows in parts of similar length, with a progress line."""
    lengths = [len(start) + len(end) for start, end in zip(starts, ends, strict=True)]
    order = np.argsort(lengths, kind="stable")
    scores = np.zeros(len(order))
    parts = range(0, len(order), SCORED_AT_ONCE)
    for first in track(parts, f"evaluate_reward: {label}", len(parts), f"x {SCORED_AT_ONCE} texts"):
        rows = order[first:first + SCORED_AT_ONCE]
        scores[rows] = score([starts[i] for i in rows], [ends[i] for i in rows])
    return scores
