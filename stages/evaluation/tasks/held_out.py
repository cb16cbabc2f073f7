"""Evaluate on a dump's held-out questions, or on a user's own held-out prompts.

On a dump, a reward model and perhaps a judge score, and policies start from SFT. On own prompts, the reward scores that
policies were trained on, and they start from the base.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stages.evaluation.heldout_prompts import EvaluationPrompts, OwnEvaluationPrompts
from stages.evaluation.pair_accuracy import LOG_PROBABILITY, draw_held_out_pairs, evaluate_pairs, score_fitted_baselines
from stages.evaluation.policy_answers import (
    Answers,
    AnswerScorer,
    AnswerScores,
    repeat_each,
    score_by_functions,
    score_main_gold,
)
from stages.evaluation.tasks.trained_reward import PolicyTraining, TrainedReward
from stages.evaluation.tasks.wording import BASE, SFT
from stages.generation.text_metrics import has_code
from stages.modeling.tokenizer import same_tokenizer
from stages.reward_modeling.scoring_file import read_no_model
from stages.rewards.reward_functions import RewardFunction
from stages.runtime.stage_lines import print_line
from stages.stackexchange.pairs.table import question_key, read_pairs, sample_rows
from stages.stackexchange.questions.table import read_tags

SPLIT, BASELINE_SPLIT = "evaluation", "reward"
BASELINE_PAIRS = 5_000  # that cheap baselines learn from, at most


class DumpTask:
    """Held-out questions for the policies, and held-out pairs for the reward models.

    folders: of the models that answer, SFT last; the base is among them if it has SFT's tokenizer.
    """

    start, stop_ids = SFT, None

    def __init__(self, posts: Path, pairs: Path, tokenizer, *, base: Path, sft: Path, policies: dict[str, Path],
                 reward: Path, judge: Path | None, scorers: list[RewardFunction], answer_scorer: AnswerScorer,
                 max_pairs: int, longest: int, seed: int, **sizes: int):
        """scorers: further scores of the answers."""
        self.posts, self.pairs, self.tokenizer, self.reward, self.judge = posts, pairs, tokenizer, reward, judge
        self.scorers, self._answer_scorer, self._seed = scorers, answer_scorer, seed
        self.held_out = draw_held_out_pairs(
            read_pairs(pairs, SPLIT), tokenizer, max_pairs=max_pairs, max_tokens=longest, seed=seed)
        self.prompts = EvaluationPrompts(pairs, SPLIT, tokenizer, longest=longest, seed=seed, **sizes)
        self.folders = policies | _base_if_comparable(base, tokenizer) | {SFT: sft}

    def score(self, texts: dict) -> dict:
        """Compute rewards [N] by key; texts: lists of prompts and of responses, as token ids, by key."""
        return self._answer_scorer.score(self.reward, texts)

    def score_answers(self, answers: dict[str, Answers], pair_logprobs: np.ndarray | None,
                      gold_scorer: Callable | None) -> AnswerScores:
        """Score the answers of all policies and the best human ones, and the held-out texts [M] of the pairs.

        pair_logprobs: of the held-out texts [M], under SFT.
        """
        pair_rewards, rewards = self._score_all(self.reward, answers)
        pair_judge, judged = self._score_all(self.judge, answers) if self.judge else (None, {})
        functions = score_by_functions(self.scorers, self.prompts.questions, answers)
        gold = score_main_gold(gold_scorer, self.held_out.texts) if gold_scorer else None
        return AnswerScores(rewards, functions, judged, {
            "reward": pair_rewards, "judge": pair_judge, "log_probability": pair_logprobs, "gold": gold})

    def measure_rewards(self, scores: AnswerScores, estimate_mean: Callable) -> dict:
        """Measure the reward model and the judge on the held-out pairs."""
        rows = sample_rows(read_pairs(self.pairs, BASELINE_SPLIT), BASELINE_PAIRS, self._seed)
        tags = read_tags(self.posts, {question_key(row) for row in self.held_out.rows})
        judge = scores.pairs["judge"]
        baselines = score_fitted_baselines(self.held_out, rows) | {LOG_PROBABILITY: scores.pairs["log_probability"]}
        return {
            "reward_model": evaluate_pairs(self.held_out, scores.pairs["reward"], baselines, scores.pairs["gold"], tags,
                                           estimate_mean),
            "judge": None if judge is None else {
                "accuracy": estimate_mean(self.held_out.score_wins(judge), self.held_out.groups)}}

    def describe_prompts(self, scores: AnswerScores, estimate_mean: Callable) -> dict:
        """Measure the best human answers."""
        best = self.prompts.best_answers
        return {"best_human_answer": {
            "reward": estimate_mean(scores.rewards["human"], np.arange(len(self.prompts.rows))),
            "code_share": sum(map(has_code, best)) / len(best)}}

    def _score_all(self, model: Path, answers: dict[str, Answers]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Score the held-out texts [M], and the answers of each policy and of 'human'."""
        responses = {name: sampled.responses for name, sampled in answers.items()}
        responses |= {"human": self.prompts.best_answer_ids}
        scores = self._answer_scorer.score(model, {"": (self.held_out.prompts, self.held_out.answers)} | {
            name: (repeat_each(self.prompts.prompts, len(rows)), rows) for name, rows in responses.items()})
        return scores.pop(""), scores


def select_judge(judge: Path | None, reward: Path) -> Path | None:
    """Return the judge, or None if there is no model in its folder; ValueError if it is the reward model."""
    if judge is None:
        return None
    if reason := read_no_model(judge):
        print_line(f"evaluate: there is no judge: {reason}")
        return None
    if judge.resolve() == reward.resolve():
        raise ValueError(f"--judge {judge} is the reward model itself: a judge must be another one")
    return judge


def _base_if_comparable(base: Path, tokenizer) -> dict[str, Path]:
    if same_tokenizer(base, tokenizer):
        return {"base": base}
    print_line(f"evaluate: {base} has another tokenizer than SFT and is left out")
    return {}


class OwnPromptsTask:
    """Held-out prompts of a file, and the reward that training optimised; see DumpTask.

    folders: of the models that answer, the base last.
    """

    start, held_out = BASE, None

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
