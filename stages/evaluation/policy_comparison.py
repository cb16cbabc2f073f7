"""Compare policies that answered the same prompts: each in numbers, and each trained policy with SFT.

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

SAMPLES = "samples"  # several answers of SFT to each prompt, those of a prompt together: for best-of-n
NOT_COMPARED = ("base", "sft", SAMPLES)
COMPARED_METRICS = ("reward_difference", "win_rate", "kl_k1", "kl_k3")


@dataclass(frozen=True)
class PolicyComparison:
    """Answers, rewards [N], gold scores and other scores by policy, 'sft' among them.

    gold: score name to values, by policy and for 'human' (the best human answers). scores: those of further scorers.
    """

    prompts: EvaluationPrompts
    answers: dict[str, Answers]
    rewards: dict[str, np.ndarray]
    gold: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    scores: dict[str, Columns] = field(default_factory=dict)

    def compare(self, best_of: Sequence[int], estimate: Callable) -> dict:
        """Compute `policies`, the metrics of each policy, and `comparisons`, each trained policy against SFT.

        estimate: see policy_metrics.compute_policy_metrics. A best-of-n's `kl_formula` is in nats a response.
        """
        columns = {name: self._columns(name) for name in self.answers}
        policies = {name: policy_metrics.compute_policy_metrics(
            columns[name], self.answers[name].responses, self._scorers, estimate)
            for name in self.answers if name != SAMPLES}
        policies |= {f"best_of_{n}": self._best_of_n(columns[SAMPLES], n, estimate) for n in best_of}
        compared = [name for name in self.answers if name not in NOT_COMPARED]
        return {"policies": policies, "comparisons": {
            name: {metric: policies[name][metric] for metric in COMPARED_METRICS}
            | self._changes(name, columns, estimate) for name in compared}}

    def texts(self) -> dict[str, list[str]]:
        """Return one answer to each prompt, by policy and for 'human'."""
        return {name: answers.texts for name, answers in self.answers.items() if name != SAMPLES} | {
            "human": self.prompts.best_answers}

    @property
    def _scorers(self) -> list[str]:
        return list(self.scores.get("sft", {}))

    def _columns(self, name: str) -> Columns:
        scores = dict(self.scores.get(name, {}))
        if self.gold:
            scores["gold"] = np.array(self.gold[name]["gold"], float)
        sft = repeat_each(self.rewards["sft"], len(self.rewards[name]))
        return policy_metrics.answer_columns(self.answers[name], self.rewards[name], np.array(sft), scores)

    def _best_of_n(self, samples: Columns, n: int, estimate: Callable) -> dict:
        responses = self.answers[SAMPLES].responses
        count = len(responses) // len(self.prompts.rows)
        drawn = policy_metrics.best_of_responses(samples, responses, count, n)
        columns = policy_metrics.best_of_columns(samples, count, n)
        return policy_metrics.compute_policy_metrics(columns, drawn, self._scorers, estimate) | {
            "kl_formula": best_of_kl(n)}

    def _changes(self, name: str, columns: dict[str, Columns], estimate: Callable) -> dict:
        """Compute how metrics and scores changed from SFT to a policy."""
        both = columns["sft"], columns[name]
        changes = policy_metrics.metric_changes(*both, estimate) | {
            "distinct_2": policy_metrics.distinct_change(*(self.answers[each].responses for each in ("sft", name)))}
        scores = {scorer: policy_metrics.column_mean(scorer).change(*both, estimate) for scorer in self._scorers}
        gold = [self.gold[each] for each in ("sft", name, "human")] if self.gold else None
        return {"changes": changes, "score_changes": scores,
                "gold": policy_metrics.gold_gain(*gold, estimate) if gold else None}


def repeat_each(items: Sequence, rows: int) -> list:
    """Repeat each item so that there are `rows` of them."""
    return [item for item in items for _ in range(rows // len(items))]
