"""Load the reward model to be judged, and score texts and sampled answers with it. Shapes: M texts."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from stages.evaluation.policy_answers import Answers
from stages.modeling import families
from stages.modeling.load import check_whole_model
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.load import load_reward_models
from stages.reward_modeling.scorer import combine_scores
from stages.reward_modeling.scoring_file import read_no_model
from stages.rewards.classifier import ClassifierScorer
from stages.rewards.reward_functions import is_reward_artifact
from stages.runtime.progress import track
from stages.stackexchange.prompt import encode_examples

SCORED_AT_ONCE = 512  # texts


class RewardUnderTest:
    """A merged reward artifact, of which several models are averaged, or any sequence classifier with one output.

    tokenizer: its own. max_tokens: of the longest question with its answer that it reads. All models are in fp32.

    Args:
        source: the folder, or a classifier's hub id.
        template: the input of a classifier; it says whether a token closes the answers.

    Raises ValueError, in one line, if it cannot be used.
    """

    def __init__(self, source: str, template: str, cpu_kernels: str):
        folder = Path(source)
        if reason := read_no_model(folder):
            raise ValueError(f"--reward {source}: there is no model: {reason}")
        check_whole_model(folder)
        self.reads_ids = is_reward_artifact(source)
        if self.reads_ids:
            self.tokenizer, self.max_tokens = load_tokenizer(folder), families.max_positions(folder)
            self._scorers = load_reward_models(folder, "fp32", cpu_kernels=cpu_kernels)
        elif "{response}" not in template:
            raise ValueError(f"--template must contain {{response}}, and {template!r} does not")
        else:
            self._scorers = [ClassifierScorer(source, template, "fp32")]
            self.tokenizer, self.max_tokens = self._scorers[0].tokenizer, self._scorers[0].max_tokens

    def score_texts(self, questions: Sequence[str], answers: Sequence[str], label: str) -> np.ndarray:
        """Compute the rewards [M] of complete answers, which EOS closes; label: name of the progress line."""
        if self.reads_ids:
            encoded = encode_examples(self.tokenizer, zip(questions, answers, strict=True))
            questions, answers = zip(*encoded, strict=True)
        return self._score(questions, answers, label)

    def score_sampled(self, questions: Sequence[str], prompts: list[list[int]], sampled: Answers, tokenizer, label: str
                      ) -> np.ndarray:
        """Compute the rewards [M] of the ids as sampled, or of the texts if it has another vocabulary or reads no ids.

        prompts, tokenizer: the policy's.
        """
        if self.reads_ids and tokenizer.get_vocab() == self.tokenizer.get_vocab():
            return self._score(prompts, sampled.responses, label)
        return self.score_texts(questions, sampled.texts, label)

    def _score(self, starts: Sequence, ends: Sequence, label: str) -> np.ndarray:
        """Score rows, texts or ids, in parts of similar length, with a progress line."""
        order = np.argsort([len(start) + len(end) for start, end in zip(starts, ends, strict=True)], kind="stable")
        scores = np.zeros(len(order))
        parts = range(0, len(order), SCORED_AT_ONCE)
        for first in track(parts, f"evaluate_reward: {label}", len(parts), f"x {SCORED_AT_ONCE} texts"):
            rows = order[first:first + SCORED_AT_ONCE]
            texts = [starts[i] for i in rows], [ends[i] for i in rows]
            scores[rows] = combine_scores([scorer(*texts) for scorer in self._scorers]).numpy()
        return scores
