"""Evaluate on a user's own held-out prompts, by the reward that policies were trained on; they start from the base."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.evaluation.heldout_prompts import OwnEvaluationPrompts
from stages.evaluation.policy_answers import Answers, AnswerScores, repeat_each, score_by_functions
from stages.evaluation.tasks.trained_policies import PolicyTraining
from stages.evaluation.tasks.trained_reward import TrainedReward
from stages.evaluation.tasks.wording import BASE
from stages.rewards.reward_functions import RewardFunction


class OwnPromptsTask:
    """Held-out prompts of a file, and the reward that training optimised; see DumpTask.

    folders: of the models that answer, the base last.
    """

    start, held_out, pair_count = BASE, None, 0

    def __init__(self, file: Path, tokenizer, *, base: Path, policies: dict[str, Path], training: PolicyTraining,
                 reward: TrainedReward, scorers: list[RewardFunction], **sizes: int):
        """scorers: of what training never saw."""
        self.tokenizer, self.reward, self.scorers, self.stop_ids = tokenizer, reward, scorers, training.stop_ids
        self.prompts = OwnEvaluationPrompts(
            file, tokenizer, column=training.prompt_column, template=training.prompt_template,
            held_out=training.evaluation_prompts, training_seed=training.seed, **sizes)
        self.folders = policies | {BASE: base}

    def score(self, texts: dict) -> dict:
        """Compute rewards [N] by key; texts: lists of prompts and of responses, as token ids, by key."""
        return self.reward.score(texts)

    def score_answers(self, answers: dict[str, Answers], *_: Any) -> AnswerScores:
        """Compute the rewards, and the scores of the reward's parts and of the scorers, by policy."""
        texts = {name: (repeat_each(self.prompts.prompts, len(sampled.responses)), sampled.responses)
                 for name, sampled in answers.items()}
        parts = self.reward.score_parts(texts)
        others = score_by_functions(self.scorers, self.prompts.questions, answers)
        return AnswerScores(self.reward.score(texts), {name: parts[name] | others[name] for name in answers}, {}, {})

    def measure_rewards(self, *_: Any) -> dict:
        """Name the functions of the reward with their weights, and the scores that training never saw."""
        return {"reward_functions": self.reward.weights, "unseen_scores": [scorer.name for scorer in self.scorers],
                "judge": None}

    def describe_prompts(self, *_: Any) -> dict:
        """Count the prompts of the file, and those that were held out."""
        return {"held_out_prompts": self.prompts.held_out, "file_prompts": self.prompts.file_prompts}


def check_unseen(scorers: Sequence[str], training: PolicyTraining) -> None:
    """Raise ValueError for a scorer that the policy was trained on."""
    trained_on = {entry["source"] for entry in training.rewards}
    if seen := next((name for name in scorers if name in trained_on), None):
        raise ValueError(f"evaluate.scorers names {seen!r}, which the policy was trained on and which is measured "
                         f"anyway: leave it out, or name a score that training never saw")
