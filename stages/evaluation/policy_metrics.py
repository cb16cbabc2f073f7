"""What a policy's answers are like, in numbers, and how these changed from one policy to another.

An answer is a row of columns, all [N]; a policy's measure is a function of their sums, so that its interval, and that
of a change on the same prompts, comes from one bootstrap by question. Best-of-n's columns are its samples', each
weighted by its chance to be the best. Shapes: N prompts, S samples of each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from stages.evaluation.policy_answers import Answers
from stages.evaluation.statistics import bootstrap_statistic, jackknife, pair_wins
from stages.generation import text_metrics
from stages.generation.best_of_n import best_of_n_weights
from stages.rl.kl import kl_k1, kl_k3

Columns = dict[str, np.ndarray]
OWN = ("log_p", "kl_k1", "kl_k3")  # need the policy's own log-probabilities, which best-of-n has none of
DISTINCT = (1, 2, 3)


@dataclass(frozen=True)
class Metric:
    """A function of the sums of some columns."""

    columns: tuple[str, ...]
    of: Callable[..., np.ndarray]

    def interval(self, columns: Columns, estimated: Callable) -> dict | None:
        """Its value with a 95 % interval; None where it does not apply."""
        return self._estimated(lambda sums: self.of(*sums), [columns], estimated)

    def change(self, before: Columns, after: Columns, estimated: Callable) -> dict | None:
        """The difference it makes, prompt by prompt, with a 95 % interval."""
        count = len(self.columns)
        return self._estimated(lambda sums: self.of(*sums[count:]) - self.of(*sums[:count]), [before, after],
                               estimated)

    def _estimated(self, statistic: Callable, policies: list[Columns], estimated: Callable) -> dict | None:
        if any(name not in columns for columns in policies for name in self.columns):
            return None
        rows = np.stack([columns[name] for columns in policies for name in self.columns])
        return estimated(statistic, rows, np.arange(rows.shape[1]))  # every prompt is a question of its own


def column_mean(column: str) -> Metric:
    return Metric((column, "one"), lambda value, one: value / one)


def _correlation(one, x, y, xx, yy, xy):
    return (one * xy - x * y) / np.sqrt((one * xx - x * x) * (one * yy - y * y))


INTERVAL_METRICS = {"reward": column_mean("reward"), "reward_difference": column_mean("reward_difference"), "win_rate": column_mean("win"),
             "kl_k1": column_mean("kl_k1"), "kl_k3": column_mean("kl_k3"), "gold": column_mean("gold")}
# To add a measure of answers: a column of `columns_of`, and a line here.
POINT_METRICS = {
    "response_tokens": column_mean("tokens"), "eos_rate": column_mean("ended"), "repetition": column_mean("repetition"),
    "code_share": column_mean("code"), "code_fences": column_mean("fences"),
    "entropy": Metric(("log_p", "tokens"), lambda log_p, tokens: -log_p / tokens),
    "perplexity_under_sft": Metric(("log_ref", "tokens"), lambda log_ref, tokens: np.exp(-log_ref / tokens)),
    "reward_length_correlation": Metric(
        ("one", "reward", "tokens", "reward_reward", "tokens_tokens", "reward_tokens"), _correlation)}


def answer_columns(answers: Answers, reward: np.ndarray, sft_reward: np.ndarray, more: Columns) -> Columns:
    """An answer a row; rewards [N] as the reward model gives them, whether or not an answer ended.

    sft_reward: of SFT's answer to the same prompt. more: further scores [N]. Entropy is read off the sampled tokens:
    minus their log-probability, on average.
    """
    tokens = np.array([len(response) for response in answers.responses], float)
    found = {"one": np.ones(len(tokens)), "reward": reward, "reward_difference": reward - sft_reward,
             "win": pair_wins(reward, sft_reward), "tokens": tokens, "ended": np.array(answers.ended, float),
             "repetition": np.array([text_metrics.repetition(response) for response in answers.responses]),
             "code": np.array([text_metrics.has_code(text) for text in answers.texts], float),
             "fences": np.array([text_metrics.count_fences(text) for text in answers.texts], float),
             "reward_reward": reward * reward, "tokens_tokens": tokens * tokens, "reward_tokens": reward * tokens,
             "log_ref": np.array([float(row.sum()) for row in answers.log_ref])}
    if answers.log_p is not None:
        rows = list(zip(answers.log_p, answers.log_ref, strict=True))
        found |= {"log_p": np.array([float(p.sum()) for p, _ in rows]),
                  "kl_k1": np.array([float(kl_k1(p, ref).sum()) for p, ref in rows]),
                  "kl_k3": np.array([float(kl_k3(p, ref).sum()) for p, ref in rows])}
    return found | more


def best_of_columns(samples: Columns, count: int, n: int) -> Columns:
    """A prompt a row: what best-of-n of its `count` samples is like on average; samples: [N S], a prompt's together."""
    weights = best_of_n_weights(samples["reward"].reshape(-1, count), n)
    return {name: (weights * column.reshape(-1, count)).sum(1) for name, column in samples.items() if name not in OWN}


def best_of_responses(samples: Columns, responses: list[list[int]], count: int, n: int) -> list[list[int]]:
    """One response to each prompt, drawn by best-of-n: of its first n samples the best."""
    best = samples["reward"].reshape(-1, count)[:, :n].argmax(1)
    return [responses[prompt * count + place] for prompt, place in enumerate(best)]


def compute_policy_metrics(columns: Columns, responses: list[list[int]], scorers: Sequence[str], estimated: Callable) -> dict:
    """One policy in numbers: estimates (rewards, wins, KL in nats a response, gold) and plain ones; None: not known.

    responses: one to each prompt. scorers: names of further columns that are scores. entropy is in nats a token.
    estimated: (statistic, columns [K, N], groups [N]) to a number with its interval (statistics.estimate_of).
    """
    found = {name: measure.interval(columns, estimated) for name, measure in INTERVAL_METRICS.items()}
    found["scores"] = {name: column_mean(name).interval(columns, estimated) for name in scorers}
    found |= {name: _plain(measure, columns) for name, measure in POINT_METRICS.items()}
    found |= {f"distinct_{n}": text_metrics.distinct(responses, n) for n in DISTINCT}
    return found | {"distinct_responses": len(set(map(tuple, responses))) / len(responses)}


def metric_changes(before: Columns, after: Columns, estimated: Callable) -> dict[str, dict | None]:
    """How each plain measure changed on the same prompts, with its interval; and gold, where it is known."""
    measures = POINT_METRICS | {"gold": INTERVAL_METRICS["gold"]}
    return {name: measure.change(before, after, estimated) for name, measure in measures.items()}


def distinct_change(before: list[list[int]], after: list[list[int]], n: int = 2) -> dict:
    """How distinct-n changed, with an interval from leaving each prompt out."""
    ends = [(text_metrics.distinct(texts, n), text_metrics.distinct_leave_one_out(texts, n))
            for texts in (before, after)]
    return jackknife(ends[1][0] - ends[0][0], ends[1][1] - ends[0][1])


def gold_gain(sft: dict, ppo: dict, human: dict, estimate: Callable) -> dict | None:
    """Each gold number's means and the paired difference PPO minus SFT, where it applies; None where nothing does.

    sft, ppo, human: name to numbers [N], NaN where the gold scorer knows nothing of the question.
    """
    found = {}
    for name in sft:
        numbers = [np.array(side[name], float) for side in (sft, ppo, human)]
        applies = ~np.isnan(numbers[0]) & ~np.isnan(numbers[1])
        if applies.any():
            means = dict(zip(("sft", "ppo", "human"), (_mean(values[applies]) for values in numbers), strict=True))
            found[name] = means | {"difference": estimate(numbers[1] - numbers[0], np.arange(len(applies)))}
    return found or None


def _plain(measure: Metric, columns: Columns) -> float | None:
    found = measure.interval(columns, _as_one_group)
    return None if found is None else found["mean"]


def _as_one_group(statistic: Callable, columns: np.ndarray, groups: np.ndarray) -> dict | None:
    return bootstrap_statistic(statistic, columns, np.zeros_like(groups), samples=0, seed=0)  # no interval, and no time


def _mean(values: np.ndarray) -> float | None:
    return None if np.isnan(values).all() else float(np.nanmean(values))
