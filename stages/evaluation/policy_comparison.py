"""Policies that were asked the same questions: what they wrote, all that it is scored by, and how they compare.

Shapes: N prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stages.evaluation import policy_metrics
from stages.evaluation.heldout_prompts import EvaluationPrompts
from stages.evaluation.policy_answers import Answers
from stages.evaluation.policy_metrics import Columns
from stages.generation.best_of_n import best_of_kl

SAMPLES = "samples"  # of SFT, several to a prompt, a prompt's together: for best-of-n
COMPARED_METRICS = ("reward_difference", "win_rate", "kl_k1", "kl_k3")


@dataclass(frozen=True)
class PolicyComparison:
    """answers: by policy, 'sft' and 'ppo' among them. Rewards [N], and numbers under the names that scorers give."""

    asked: EvaluationPrompts
    answers: dict[str, Answers]
    rewards: dict[str, np.ndarray]
    gold: dict[str, dict[str, list[float]]] = field(default_factory=dict)  # of the best human answers, too
    scores: dict[str, Columns] = field(default_factory=dict)  # any other scorers'

    def columns(self, name: str) -> Columns:
        """What is known of each of a policy's answers."""
        more = self.scores.get(name, {})
        if self.gold:
            more = more | {"gold": np.array(self.gold[name]["gold"], float)}
        sft = repeat_each(self.rewards["sft"], len(self.rewards[name]))
        return policy_metrics.answer_columns(self.answers[name], self.rewards[name], np.array(sft), more)

    def compared(self, best_of: Sequence[int], estimated: Callable) -> dict:
        """Every policy in numbers; what PPO gained over SFT; how each monitor and scorer changed between the two.

        estimated: see measures.policy_numbers. A best-of-n's `kl_formula` is its KL in nats a response (best_of.py).
        """
        columns = {name: self.columns(name) for name in self.answers}
        responses = {name: answers.responses for name, answers in self.answers.items()}
        scorers = list(self.scores.get("sft", {}))
        found = {name: policy_metrics.compute_policy_metrics(columns[name], responses[name], scorers, estimated)
                 for name in self.answers if name != SAMPLES}
        count = len(responses.get(SAMPLES, [])) // len(self.asked.rows)
        for n in best_of:
            drawn = policy_metrics.best_of_responses(columns[SAMPLES], responses[SAMPLES], count, n)
            of_prompts = policy_metrics.best_of_columns(columns[SAMPLES], count, n)
            found[f"best_of_{n}"] = policy_metrics.compute_policy_metrics(of_prompts, drawn, scorers, estimated) | {
                "kl_formula": best_of_kl(n)}
        changes = policy_metrics.metric_changes(columns["sft"], columns["ppo"], estimated)
        changes["distinct_2"] = policy_metrics.distinct_change(responses["sft"], responses["ppo"])
        return {"policies": found, "ppo_against_sft": {name: found["ppo"][name] for name in COMPARED_METRICS},
                "changes": changes,
                "score_changes": {name: policy_metrics.column_mean(name).change(columns["sft"], columns["ppo"], estimated)
                                  for name in scorers}}

    def gold_gain(self, means: Callable) -> dict | None:
        """What the gold scorer says of SFT's, PPO's and the best human answers; see measures.gold_gain."""
        sides = {name: self.gold[name] for name in ("sft", "ppo", "human")} if self.gold else None
        return policy_metrics.gold_gain(**sides, estimate=means) if sides else None

    def texts(self) -> dict[str, list[str]]:
        """One answer to each question, by writer."""
        return {name: answers.texts for name, answers in self.answers.items() if name != SAMPLES} | {
            "human": self.asked.human}


def repeat_each(items: Sequence, rows: int) -> list:
    """Each item as often as makes `rows` of them."""
    return [item for item in items for _ in range(rows // len(items))]
