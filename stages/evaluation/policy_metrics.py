"""Metrics of a policy's answers, and how they change from one policy to another.

An answer is a row of columns, each [N]. A metric is a function of the columns' sums, so that its interval, and that of
a change on the same prompts, comes from one bootstrap over questions. The columns of best-of-n are those of the
samples, each weighted by its probability of being the best. Shapes: N prompts, S samples a prompt.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.evaluation.policy_answers import Answers
from stages.evaluation.statistics import bootstrap_statistic, jackknife, pair_wins
from stages.generation import text_metrics
from stages.generation.best_of_n import best_of_n_weights
from stages.rewards.kl import kl_k1, kl_k3

Columns = dict[str, np.ndarray]
POLICY_COLUMNS = ("logprob", "kl_k1", "kl_k3")  # need the policy's own log-probabilities: best-of-n has none
DISTINCT = (1, 2, 3)
GOLD_PREFIX = "gold score: "  # of the columns of all gold scores: their names may be those of other columns


@dataclass(frozen=True)
class Metric:
    """A function of the sums of some columns."""

    columns: tuple[str, ...]
    statistic: Callable[..., np.ndarray]

    def interval(self, columns: Columns, estimate: Callable) -> dict | None:
        """Compute the value with a 95 % interval; None where it does not apply."""
        return self._estimate(lambda sums: self.statistic(*sums), [columns], estimate)

    def change(self, before: Columns, after: Columns, estimate: Callable) -> dict | None:
        """Compute the difference on the same prompts, with a 95 % interval."""
        count = len(self.columns)
        return self._estimate(lambda sums: self.statistic(*sums[count:]) - self.statistic(*sums[:count]),
                              [before, after], estimate)

    def _estimate(self, statistic: Callable, policies: list[Columns], estimate: Callable) -> dict | None:
        if any(name not in columns for columns in policies for name in self.columns):
            return None
        rows = np.stack([columns[name] for columns in policies for name in self.columns])
        return estimate(statistic, rows, np.arange(rows.shape[1]))  # each prompt is another question


def column_mean(column: str) -> Metric:
    """Return the metric that is the mean of a column."""
    return Metric((column, "one"), lambda value, one: value / one)


def correlation(one, x, y, xx, yy, xy):
    """Compute the correlation of x and y from sums over rows: of 1, x, y, x x, y y and x y."""
    return (one * xy - x * y) / np.sqrt((one * xx - x * x) * (one * yy - y * y))


INTERVAL_METRICS = {name: column_mean(column) for name, column in (
    ("reward", "reward"), ("reward_difference", "reward_difference"), ("win_rate", "win"), ("kl_k1", "kl_k1"),
    ("kl_k3", "kl_k3"), ("gold", "gold"), ("judge", "judge"))}
# To add a metric: a column in `answer_columns`, and a line here.
POINT_METRICS = {
    "response_tokens": column_mean("tokens"), "eos_rate": column_mean("ended"), "repetition": column_mean("repetition"),
    "code_share": column_mean("code"), "code_fences": column_mean("fences"),
    "entropy": Metric(("logprob", "tokens"), lambda logprob, tokens: -logprob / tokens),
    "perplexity_under_sft": Metric(("sft_logprob", "tokens"), lambda logprob, tokens: np.exp(-logprob / tokens)),
    "reward_length_correlation": Metric(
        ("one", "reward", "tokens", "reward_reward", "tokens_tokens", "reward_tokens"), correlation)}


def answer_columns(answers: Answers, reward: np.ndarray, sft_reward: np.ndarray, scores: Columns) -> Columns:
    """Compute the columns of one answer to each prompt.

    Rewards [N] are the reward model's own, whether or not an answer ended. Entropy is estimated from the sampled
    tokens: minus their mean log-probability.

    Args:
        sft_reward: reward of SFT's answer to the same prompt [N].
        scores: further scores [N] by name.
    """
    tokens = np.array([len(response) for response in answers.responses], float)
    columns = {"one": np.ones(len(tokens)), "reward": reward, "reward_difference": reward - sft_reward,
               "win": pair_wins(reward, sft_reward), "tokens": tokens, "ended": np.array(answers.ended, float),
               "repetition": np.array([text_metrics.repetition(response) for response in answers.responses]),
               "code": np.array([text_metrics.has_code(text) for text in answers.texts], float),
               "fences": np.array([text_metrics.count_fences(text) for text in answers.texts], float),
               "reward_reward": reward * reward, "tokens_tokens": tokens * tokens, "reward_tokens": reward * tokens}
    if answers.sft_logprobs is not None:
        columns["sft_logprob"] = np.array([float(row.sum()) for row in answers.sft_logprobs])
    if answers.logprobs is not None:
        columns |= {"logprob": np.array([float(row.sum()) for row in answers.logprobs]),
                    "kl_k1": sum_kl(kl_k1, answers), "kl_k3": sum_kl(kl_k3, answers)}
    return columns | scores


def sum_kl(estimator: Callable, answers: Answers) -> np.ndarray:
    """Sum a KL estimator, of two log-probabilities a token, over each response [N]: nats a response."""
    rows = zip(answers.logprobs, answers.sft_logprobs, strict=True)
    return np.array([float(estimator(*row).sum()) for row in rows])


def best_of_columns(samples: Columns, count: int, n: int) -> Columns:
    """Compute the expected columns [N] of best-of-n of `count` samples a prompt; samples: [N S], by prompt."""
    weights = best_of_n_weights(samples["reward"].reshape(-1, count), n)
    return {name: (weights * column.reshape(-1, count)).sum(1) for name, column in samples.items()
            if name not in POLICY_COLUMNS}


def best_of_responses(samples: Columns, responses: list[list[int]], count: int, n: int) -> list[list[int]]:
    """Select one response to each prompt by best-of-n: the best of its first n samples."""
    best = samples["reward"].reshape(-1, count)[:, :n].argmax(1)
    return [responses[prompt * count + index] for prompt, index in enumerate(best)]


def compute_policy_metrics(
    columns: Columns, responses: list[list[int]], scorers: Sequence[str], estimate: Callable
) -> dict:
    """Compute the metrics of one policy: with intervals (rewards, wins, KL in nats a response, gold) and without.

    A metric that does not apply is None. Entropy is in nats a token. `gold_scores`: the mean of every gold score.

    Args:
        responses: one to each prompt.
        scorers: names of further columns that are scores.
        estimate: (statistic, columns [K, N], groups [N]) to a value with its interval (statistics.bootstrap_statistic).
    """
    metrics = {name: metric.interval(columns, estimate) for name, metric in INTERVAL_METRICS.items()}
    metrics["scores"] = {name: column_mean(name).interval(columns, estimate) for name in scorers}
    metrics["gold_scores"] = {name: _point_value(column_mean(f"{GOLD_PREFIX}{name}"), columns)
                              for name in gold_score_names(columns)}
    metrics |= {name: _point_value(metric, columns) for name, metric in POINT_METRICS.items()}
    metrics |= {f"distinct_{n}": text_metrics.distinct(responses, n) for n in DISTINCT}
    return metrics | {"distinct_responses": len(set(map(tuple, responses))) / len(responses)}


def gold_columns(scores: dict[str, Sequence[float]]) -> Columns:
    """Name gold scores as columns: each by its name behind GOLD_PREFIX, the main one also as 'gold'."""
    columns = {f"{GOLD_PREFIX}{name}": np.array(values, float) for name, values in scores.items()}
    return columns | {"gold": columns[f"{GOLD_PREFIX}gold"]}


def gold_score_names(columns: Columns) -> list[str]:
    """List the gold scores among columns."""
    return [name.removeprefix(GOLD_PREFIX) for name in columns if name.startswith(GOLD_PREFIX)]


def metric_changes(before: Columns, after: Columns, estimate: Callable) -> dict[str, dict | None]:
    """Compute the change of each point metric, and of gold, on the same prompts, with its interval."""
    metrics = POINT_METRICS | {"gold": INTERVAL_METRICS["gold"]}
    return {name: metric.change(before, after, estimate) for name, metric in metrics.items()}


def distinct_change(before: list[list[int]], after: list[list[int]], n: int = 2) -> dict:
    """Compute the change of distinct-n, with an interval from the jackknife over prompts."""
    values = [(text_metrics.distinct(texts, n), text_metrics.distinct_leave_one_out(texts, n))
              for texts in (before, after)]
    return jackknife(values[1][0] - values[0][0], values[1][1] - values[0][1])


def gold_gain(before: dict, policy: dict, human: dict | None = None, *, estimate: Callable, start: str = "sft"
              ) -> dict | None:
    """Compute the means of each gold score and the paired difference policy minus `start`; None where nothing applies.

    before, policy, human: name to scores [N], NaN where the gold scorer does not know the question; of the model
    `start`, the policy and, if there are any, the best human answers.
    """
    sides = {start: before, "policy": policy} | ({"human": human} if human else {})
    gains = {}
    for name in before:
        scores = {side: np.array(values[name], float) for side, values in sides.items()}
        applies = ~np.isnan(scores[start]) & ~np.isnan(scores["policy"])
        if applies.any():
            difference = {"difference": scores["policy"] - scores[start], "one": np.ones(len(applies))}
            gains[name] = {side: _nan_mean(values[applies]) for side, values in scores.items()} | {
                "difference": column_mean("difference").interval(difference, estimate)}
    return gains or None


def _point_value(metric: Metric, columns: Columns) -> float | None:
    value = metric.interval(columns, _estimate_point)
    return None if value is None else value["mean"]


def _estimate_point(statistic: Callable, columns: np.ndarray, groups: np.ndarray) -> dict | None:
    """Estimate without an interval: with one group nothing is resampled."""
    return bootstrap_statistic(statistic, columns, np.zeros_like(groups), samples=0, seed=0)


def _nan_mean(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))
