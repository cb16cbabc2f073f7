"""Compare policies that answered the same prompts: each in numbers, and each trained policy with SFT.

Shapes: N prompts.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from stages.evaluation import policy_metrics
from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.length_bins import compare_answers, gain_within_bins
from stages.evaluation.pair_accuracy import write_table
from stages.evaluation.policy_answers import Answers, repeat_each
from stages.evaluation.policy_metrics import GOLD_PREFIX, Columns, column_mean
from stages.evaluation.summary import BEST, CONTROLS, SAMPLES, cheaper_policies, samples_per_answer
from stages.evaluation.tasks.wording import greedy_name
from stages.generation.best_of_n import best_of_kl, best_of_n_weights

SAMPLE_SETS = (SAMPLES, SAMPLES + BEST)  # at the sampling temperature, and at SFT's best
GREEDY = (greedy_name("sft"), greedy_name("base"))
NOT_COMPARED = ("base", "sft", *GREEDY, SAMPLES)
COMPARED_METRICS = ("reward_difference", "win_rate", "kl_k1", "kl_k3")
QUESTION_SCORES = ("reward", "gold", "judge", "kl_k1")


@dataclass(frozen=True)
class PolicyComparison:
    """Answers, rewards [N], gold scores and other scores by policy, `start` among them.

    A policy at its best temperature is NAME_best. Its answers have no log-probabilities: a KL is between policies at
    one temperature.

    gold: score name to values, by policy and for 'human' (the best human answers). scores: those of further scorers.
    judge: scores of a held-out reward model, as `rewards`; empty: none. start: the model that the policies are compared
    with, 'sft' or 'base'. 'human' is there if the prompts have best answers.
    """

    prompts: HeldOutPrompts
    answers: dict[str, Answers]
    rewards: dict[str, np.ndarray]
    gold: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    scores: dict[str, Columns] = field(default_factory=dict)
    judge: dict[str, np.ndarray] = field(default_factory=dict)
    start: str = "sft"

    def compare(self, best_of: Sequence[int], estimate: Callable) -> dict:
        """Compute the metrics of each policy, and compare the trained policies with SFT and with cheaper policies.

        estimate: see policy_metrics.compute_policy_metrics. A best-of-n's `kl_formula` is in nats a response.

        Returns: `policies`, the metrics of each; `comparisons`, each trained policy against SFT at the sampling
            temperature; `at_best`, each at its best temperature minus cheaper policies (_compare_at_best);
            `length_control`, of policies with a control, what they gained at equal length (_measure_length).
        """
        columns = {name: values for name, values in self._sampled.items() if name not in SAMPLE_SETS}
        responses = {name: self.answers[name].responses for name in columns}
        temperatures = {name: self.answers[name].temperature for name in columns}
        for name, (source, n) in self._best_of_sets(best_of).items():
            columns[name], responses[name] = self._best_of_n(source, n)
            temperatures[name] = self.answers[source].temperature
        policies = {name: {"temperature": temperatures[name]} | policy_metrics.compute_policy_metrics(
            columns[name], responses[name], self._scorers, estimate) for name in columns}
        for n in best_of:
            policies[f"best_of_{n}"]["kl_formula"] = best_of_kl(n)
        compared = [name for name in self.answers if name not in NOT_COMPARED and not name.endswith(BEST)]
        controlled = [name for name in compared if f"{CONTROLS.get(name)}{BEST}" in columns]
        length = {"length_control": {name: self._measure_length(name, columns, best_of, estimate)
                                     for name in controlled}} if controlled else {}
        return {"policies": policies, **length, "comparisons": {
            name: {metric: policies[name][metric] for metric in COMPARED_METRICS}
            | self._changes(name, columns, estimate) for name in compared},
            "at_best": {name: self._compare_at_best(name, columns, estimate) for name in compared
                        if f"{name}{BEST}" in columns}}

    def _compare_at_best(self, policy: str, columns: dict[str, Columns], estimate: Callable) -> dict[str, dict]:
        """Compute the paired differences of a policy at its best temperature minus each cheaper policy and its control.

        Returns: by the other policy {samples_per_answer, reward, judge, gold, and scores if there are any}; gold is by
            score, over the questions that it applies to, and empty where it applies to none; judge is None without a
            judge.
        """
        after = columns[f"{policy}{BEST}"]
        gold = policy_metrics.gold_score_names(after)
        scores = [] if self.start == "sft" else self._scorers  # a dump has gold or a judge there
        compared = {}
        for name in list_compared(columns, policy):
            def change(column: str, before: Columns = columns[name]) -> dict | None:
                return column_mean(column).change(before, after, estimate)

            changes = {key: change(f"{GOLD_PREFIX}{key}") for key in gold}
            compared[name] = {"samples_per_answer": samples_per_answer(name), "reward": change("reward"),
                              "judge": change("judge"), "gold": {key: each for key, each in changes.items() if each},
                              **({"scores": {key: change(key) for key in scores}} if scores else {})}
        return compared

    def _measure_length(self, policy: str, columns: dict[str, Columns], best_of: Sequence[int], estimate: Callable
                        ) -> dict:
        """Measure what a policy and its control gained within bins of length, and how often the policy is preferred.

        All at their best temperatures.
        """
        own, start, sets = columns[f"{policy}{BEST}"], columns[f"{self.start}{BEST}"], self._best_of_sets(best_of)
        preferred = {}
        for name in list_compared(columns, policy):
            source, n = sets.get(name, (name, 1))
            other = self._sampled[source]
            weights = best_of_n_weights(other["reward"].reshape(len(own["reward"]), -1), n)
            preferred[name] = compare_answers(own, other, weights, estimate)
        return {"within_bins": {name: gain_within_bins(start, columns[f"{name}{BEST}"], estimate)
                                for name in (policy, CONTROLS[policy])}, "preferred": preferred}

    def score_questions(self, best_of: Sequence[int]) -> dict[str, Columns]:
        """Return scores of every policy at the sampling temperature: QUESTION_SCORES [N].

        What is not known is left out. Those of best-of-n are expected ones, and have no kl_k1.
        """
        columns = {name: values for name, values in self._sampled.items()
                   if name not in (*GREEDY, SAMPLES) and not name.endswith(BEST)}
        columns |= {f"best_of_{n}": self._best_of_n(SAMPLES, n)[0] for n in best_of if SAMPLES in self._sampled}
        return {name: {key: values[key] for key in QUESTION_SCORES if key in values}
                for name, values in columns.items()}

    def write_samples(self, path: Path, with_gold: bool) -> None:
        """Write samples.parquet: each question with one answer of each writer, 'human' among them, and its scores.

        A score is in the column NAME_WRITER: rewards, gold scores, the judge's and those of further scorers.
        """
        rows = self.prompts.rows
        texts = {name: answers.texts for name, answers in self.answers.items() if name not in SAMPLE_SETS}
        texts |= {"human": self.prompts.best_answers} if self.prompts.best_answers else {}
        scores = {f"{kind}_{name}": values[name] for kind, values in (
            ("reward", self.rewards), ("judge", self.judge)) if values for name in texts}
        for name in texts:
            own = (self.gold[name] if with_gold else {}) | self.scores.get(name, {})
            scores |= {f"{key}_{name}": values for key, values in own.items()}
        write_table(path, {
            "site": [row["site"] for row in rows], "qid": [row["qid"] for row in rows],
            "question": [row["question"] for row in rows], "url": [row["metadata"][0] for row in rows],
            **{name: [row.get(name, [])[:2] for row in rows]  # of the question, of the best answer
               for name in ("authors", "author_urls", "licenses")}, **texts}, scores)

    def write_question_scores(self, path: Path, best_of: Sequence[int]) -> None:
        """Write per_question.parquet: a row for each policy and question, with the scores that are known."""
        rows, scores = self.prompts.rows, self.score_questions(best_of)
        unknown = np.full(len(rows), np.nan)
        write_table(path, {"policy": [policy for policy in scores for _ in rows],
                           **{key: [row[key] for _ in scores for row in rows] for key in ("site", "qid")}}, {
            name: np.concatenate([columns.get(name, unknown) for columns in scores.values()])
            for name in dict.fromkeys(name for columns in scores.values() for name in columns)})

    @property
    def _scorers(self) -> list[str]:
        return list(self.scores.get(self.start, {}))

    @cached_property
    def _sampled(self) -> dict[str, Columns]:
        """Columns of all answers, SFT's repeated samples among them."""
        columns = {}
        for name, answers in self.answers.items():
            scores = dict(self.scores.get(name, {}))
            if self.gold:
                scores |= policy_metrics.gold_columns(self.gold[name])
            if self.judge:
                scores["judge"] = self.judge[name]
            start = repeat_each(self.rewards[self.start], len(self.rewards[name]))
            columns[name] = policy_metrics.answer_columns(answers, self.rewards[name], np.array(start), scores)
        return columns

    def _best_of_sets(self, best_of: Sequence[int]) -> dict[str, tuple[str, int]]:
        """Return the samples and the n of each best-of-n; at SFT's best temperature the largest n only."""
        sets = {f"best_of_{n}": (SAMPLES, n) for n in best_of}
        if SAMPLES + BEST in self.answers:
            sets[f"best_of_{max(best_of)}{BEST}"] = (SAMPLES + BEST, max(best_of))
        return sets

    def _best_of_n(self, source: str, n: int) -> tuple[Columns, list[list[int]]]:
        samples, responses = self._sampled[source], self.answers[source].responses
        count = len(responses) // len(self.prompts.rows)
        drawn = policy_metrics.best_of_responses(samples, responses, count, n)
        return policy_metrics.best_of_columns(samples, count, n), drawn

    def _changes(self, name: str, columns: dict[str, Columns], estimate: Callable) -> dict:
        """Compute how metrics and scores changed from SFT to a policy."""
        both = columns[self.start], columns[name]
        writers = (self.start, name, "human")
        changes = policy_metrics.metric_changes(*both, estimate) | {
            "distinct_2": policy_metrics.distinct_change(*(self.answers[each].responses for each in writers[:2]))}
        scores = {scorer: column_mean(scorer).change(*both, estimate) for scorer in self._scorers}
        gold = [self.gold[each] for each in writers if each in self.gold]
        judge = [{"judge": self.judge[each]} for each in writers if each in self.judge]
        gain = partial(policy_metrics.gold_gain, estimate=estimate, start=self.start)
        return {"changes": changes, "score_changes": scores, "gold": gain(*gold) if gold else None,
                "judge": (gain(*judge) or {}).get("judge") if judge else None}


def list_compared(columns: Iterable[str], policy: str) -> list[str]:
    """List what a policy at its best temperature is compared with: the cheaper policies, and its control."""
    control = f"{CONTROLS.get(policy)}{BEST}"
    return [*cheaper_policies(columns), *([control] if control in columns else [])]
