"""Compare policies that answered the same prompts: each in numbers, and each trained policy with SFT.

Shapes: N prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stages.evaluation import policy_metrics
from stages.evaluation.at_best import compare_at_best, list_compared
from stages.evaluation.gold_score import MAIN_KEY
from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.length_control.within_bins import compare_answers, gain_within_bins
from stages.evaluation.policy_answers import Answers, repeat_each
from stages.evaluation.policy_metrics import Columns
from stages.evaluation.summary import BEST, CONTROLS, SAMPLES
from stages.evaluation.tasks.wording import greedy_name
from stages.generation.best_of_n import best_of_kl, best_of_n_weights
from stages.rewards.kl import kl_k1

SAMPLE_SETS = (SAMPLES, SAMPLES + BEST)  # at the sampling temperature, and at SFT's best
GREEDY = (greedy_name("sft"), greedy_name("base"))
NOT_COMPARED = ("base", "sft", *GREEDY, SAMPLES)
COMPARED_METRICS = ("reward_difference", "win_rate", "kl_k1", "kl_k3")


@dataclass(frozen=True)
class PolicyComparison:
    """Answers, rewards [N], gold scores and other scores by policy, `start` among them.

    A policy at its best temperature is NAME_best. Its answers have no log-probabilities: a KL is between policies at
    one temperature.

    gold: score name to values, by policy and for 'human' (the best human answers). scores: those of further scorers.
    judge: scores of a held-out reward model, as `rewards`; empty: none. temperatures: by policy. start: the model that
    the policies are compared with, 'sft' or 'base'. 'human' is there if the prompts have best answers.
    """

    prompts: HeldOutPrompts
    answers: dict[str, Answers]
    rewards: dict[str, np.ndarray]
    gold: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    scores: dict[str, Columns] = field(default_factory=dict)
    judge: dict[str, np.ndarray] = field(default_factory=dict)
    temperatures: dict[str, float] = field(default_factory=dict)
    start: str = "sft"

    def compare(self, best_of: Sequence[int], estimate: Callable) -> dict:
        """Compute the metrics of each policy, and compare the trained policies with SFT and with cheaper policies.

        estimate: see policy_metrics.compute_policy_metrics. A best-of-n's `kl_formula` is in nats a response.

        Returns: `policies`, the metrics of each; `comparisons`, each trained policy against SFT at the sampling
            temperature; `at_best`, each at its best temperature minus cheaper policies (at_best.compare_at_best);
            `length_control`, of policies with a control, what they gained at equal length (_measure_length).
        """
        sampled = {name: self._columns(name) for name in self.answers}
        columns = {name: values for name, values in sampled.items() if name not in SAMPLE_SETS}
        responses = {name: self.answers[name].responses for name in columns}
        temperatures = dict(self.temperatures)
        for name, (source, n) in self._best_of_sets(best_of).items():
            columns[name], responses[name] = self._best_of_n(sampled[source], source, n)
            temperatures[name] = self.temperatures.get(source)
        policies = {name: {"temperature": temperatures.get(name)} | policy_metrics.compute_policy_metrics(
            columns[name], responses[name], self._scorers, estimate) for name in columns}
        for n in best_of:
            policies[f"best_of_{n}"]["kl_formula"] = best_of_kl(n)
        compared = [name for name in self.answers if name not in NOT_COMPARED and not name.endswith(BEST)]
        controlled = [name for name in compared if f"{CONTROLS.get(name)}{BEST}" in columns]
        length = {"length_control": {name: self._measure_length(name, columns, sampled, best_of, estimate)
                                     for name in controlled}} if controlled else {}
        return {"policies": policies, **length, "comparisons": {
            name: {metric: policies[name][metric] for metric in COMPARED_METRICS}
            | self._changes(name, columns, estimate) for name in compared},
            "at_best": {name: compare_at_best(columns, name, estimate, self._scorers_at_best) for name in compared
                        if f"{name}{BEST}" in columns}}

    def _measure_length(self, policy: str, columns: dict[str, Columns], sampled: dict[str, Columns],
                        best_of: Sequence[int], estimate: Callable) -> dict:
        """Measure what a policy and its control gained within bins of length, and how often the policy is preferred.

        All at their best temperatures. sampled: columns of every answer, the samples of best-of-n among them.
        """
        own, start, sets = columns[f"{policy}{BEST}"], columns[f"{self.start}{BEST}"], self._best_of_sets(best_of)
        preferred = {}
        for name in list_compared(columns, policy):
            source, n = sets.get(name, (None, 1))
            other = columns[name] if source is None else sampled[source]
            weights = best_of_n_weights(other["reward"].reshape(len(own["reward"]), -1), n)
            preferred[name] = compare_answers(own, other, weights, estimate)
        return {"within_bins": {name: gain_within_bins(start, columns[f"{name}{BEST}"], estimate)
                                for name in (policy, CONTROLS[policy])}, "preferred": preferred}

    def score_questions(self, best_of: Sequence[int]) -> dict[str, Columns]:
        """Return scores of every policy at the sampling temperature: reward, gold, judge and kl_k1 [N].

        What is not known is left out. Those of best-of-n are expected ones, and have no kl_k1.
        """
        at_temperature = [name for name in self.answers if name not in GREEDY and not name.endswith(BEST)]
        scores = {name: self._question_scores(name) for name in at_temperature}
        if samples := scores.pop(SAMPLES, None):
            count = len(samples["reward"]) // len(self.prompts.rows)
            scores |= {f"best_of_{n}": policy_metrics.best_of_columns(samples, count, n) for n in best_of}
        return scores

    def _question_scores(self, name: str) -> Columns:
        answers, scores = self.answers[name], {"reward": self.rewards[name]}
        if self.gold:
            scores["gold"] = np.array(self.gold[name][MAIN_KEY], float)
        if self.judge:
            scores["judge"] = self.judge[name]
        if answers.logprobs is not None:
            scores["kl_k1"] = policy_metrics.sum_kl(kl_k1, answers)
        return scores

    def texts(self) -> dict[str, list[str]]:
        """Return one answer to each prompt, by policy and for 'human'."""
        best_answers = {"human": self.prompts.best_answers} if self.prompts.best_answers else {}
        return {name: answers.texts for name, answers in self.answers.items()
                if name not in SAMPLE_SETS} | best_answers

    def score_columns(self, with_gold: bool) -> Columns:
        """Return the columns NAME_WRITER of samples.parquet: rewards, gold scores, the judge's and other scores."""
        writers = self.texts()
        columns = {f"{kind}_{name}": scores[name] for kind, scores in (
            ("reward", self.rewards), ("judge", self.judge)) if scores for name in writers}
        for name in writers:
            for key, values in (self.gold[name] if with_gold else {}).items():
                columns[f"{key}_{name}"] = np.array(values, float)
            columns |= {f"{key}_{name}": values for key, values in self.scores.get(name, {}).items()}
        return columns

    @property
    def _scorers(self) -> list[str]:
        return list(self.scores.get(self.start, {}))

    @property
    def _scorers_at_best(self) -> list[str]:
        return [] if self.start == "sft" else self._scorers  # a dump has gold or a judge there

    def _columns(self, name: str) -> Columns:
        scores = dict(self.scores.get(name, {}))
        if self.gold:
            scores |= policy_metrics.gold_columns(self.gold[name])
        if self.judge:
            scores["judge"] = self.judge[name]
        start = repeat_each(self.rewards[self.start], len(self.rewards[name]))
        return policy_metrics.answer_columns(self.answers[name], self.rewards[name], np.array(start), scores)

    def _best_of_sets(self, best_of: Sequence[int]) -> dict[str, tuple[str, int]]:
        """Return the samples and the n of each best-of-n; at SFT's best temperature the largest n only."""
        sets = {f"best_of_{n}": (SAMPLES, n) for n in best_of}
        if SAMPLES + BEST in self.answers:
            sets[f"best_of_{max(best_of)}{BEST}"] = (SAMPLES + BEST, max(best_of))
        return sets

    def _best_of_n(self, samples: Columns, source: str, n: int) -> tuple[Columns, list[list[int]]]:
        responses = self.answers[source].responses
        count = len(responses) // len(self.prompts.rows)
        drawn = policy_metrics.best_of_responses(samples, responses, count, n)
        return policy_metrics.best_of_columns(samples, count, n), drawn

    def _changes(self, name: str, columns: dict[str, Columns], estimate: Callable) -> dict:
        """Compute how metrics and scores changed from SFT to a policy."""
        both = columns[self.start], columns[name]
        writers = (self.start, name, "human")
        changes = policy_metrics.metric_changes(*both, estimate) | {
            "distinct_2": policy_metrics.distinct_change(*(self.answers[each].responses for each in writers[:2]))}
        scores = {scorer: policy_metrics.column_mean(scorer).change(*both, estimate) for scorer in self._scorers}
        gold = [self.gold[each] for each in writers if each in self.gold]
        judge = [{"judge": self.judge[each]} for each in writers if each in self.judge]
        gain = partial(policy_metrics.gold_gain, estimate=estimate, start=self.start)
        return {"changes": changes, "score_changes": scores, "gold": gain(*gold) if gold else None,
                "judge": (gain(*judge) or {}).get("judge") if judge else None}
