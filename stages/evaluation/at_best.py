"""Compare a trained policy with what costs less to make: SFT and best-of-n of SFT, each at its best temperature.

A temperature is chosen by the mean learnt reward on questions apart from those of the evaluation.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from stages.evaluation.gold_score import MAIN_KEY, score_gold
from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.policy_answers import Answers
from stages.evaluation.policy_metrics import GOLD_PREFIX, Columns, column_mean, gold_score_names
from stages.evaluation.summary import BEST, CONTROLS, SAMPLES, cheaper_policies, samples_per_answer
from stages.evaluation.tasks.wording import greedy_name


def measure_policies(
    swept: dict[str, dict[float, Answers]], prompts: HeldOutPrompts, score: Callable, gold_scorer: Callable | None,
    start: str
) -> dict[str, list[dict]]:
    """Measure the mean reward and gold of each policy at each temperature, on the selection's questions.

    score: (prompts, responses) by key to rewards [N] by key. start: the model that is listed first.
    """
    rows = {(name, at): answers for name, policy in swept.items() for at, answers in policy.items()}
    rewards = score({key: (prompts.selection_prompts, answers.responses) for key, answers in rows.items()})
    gold = {key: score_gold(gold_scorer, prompts.selection_questions, answers.texts)[MAIN_KEY]
            for key, answers in rows.items()} if gold_scorer else {}
    return {name: measure_temperatures(
        policy, *({at: values[name, at] for at in policy if (name, at) in values} for values in (rewards, gold)))
        for name, policy in sorted(swept.items(), key=lambda item: item[0] != start)}


def choose_temperatures(
    selection: dict[str, list[dict]], policies: Iterable[str], candidates: Sequence[float], default: float
) -> dict[str, float]:
    """Choose each policy's best temperature by reward, and that of the first one's repeated samples (SAMPLES).

    selection: of measure_policies. policies: SFT or base, and the trained ones. candidates: temperatures.
    """
    best = {name: choose_temperature(selection.get(name, []), default) for name in policies}
    return best | {SAMPLES: choose_best_of_n_temperature(next(iter(best.values())), candidates, default)}


def list_temperatures(answers: Iterable[str], best: dict[str, float], default: float, start: str) -> dict[str, float]:
    """List the temperature of each policy's answers; best: of choose_temperatures."""
    return dict.fromkeys(answers, default) | {greedy_name(start): 0.0} | {
        f"{name}{BEST}": temperature for name, temperature in best.items()}


def measure_temperatures(
    swept: dict[float, Answers], rewards: dict[float, np.ndarray], gold: dict[float, Sequence[float]]
) -> list[dict]:
    """List the mean reward at each temperature and, where it is known, the mean gold score; by falling temperature.

    swept: a policy's answers to the same questions. gold: gold scores, NaN where unknown; empty without a gold scorer.
    """
    return [{"temperature": temperature, "reward": float(np.mean(rewards[temperature])),
             "gold": _mean_where_known(gold.get(temperature, ())),
             "eos_rate": sum(swept[temperature].ended) / len(swept[temperature].ended)}
            for temperature in sorted(swept, reverse=True)]


def choose_temperature(curve: list[dict], default: float) -> float:
    """Choose the temperature of the highest mean reward, the higher one of equals; the default for an empty curve."""
    return max(curve, key=lambda row: (row["reward"], row["temperature"]))["temperature"] if curve else default


def choose_best_of_n_temperature(best: float, candidates: Sequence[float], default: float) -> float:
    """Return SFT's best temperature or, as greedy samples are all the same, the lowest candidate above 0."""
    return best or min((temperature for temperature in candidates if temperature), default=default)


def compare_at_best(columns: dict[str, Columns], policy: str, estimate: Callable, scores: Sequence[str] = ()
                    ) -> dict[str, dict]:
    """Compute the paired differences of a policy at its best temperature minus each cheaper policy and its control.

    Args:
        columns: of each policy, a row a question (policy_metrics.answer_columns, best_of_columns).
        estimate: (statistic, columns [K, N], groups [N]) to a value with its interval.
        scores: further columns to compare.

    Returns: by the other policy {samples_per_answer, reward, judge, gold, and scores if there are any}; gold is by
        score, over the questions that it applies to, and empty where it applies to none; judge is None without a judge.
    """
    after = columns[f"{policy}{BEST}"]
    return {name: {"samples_per_answer": samples_per_answer(name),
                   **{key: column_mean(key).change(columns[name], after, estimate) for key in ("reward", "judge")},
                   "gold": _gold_differences(columns[name], after, estimate)} | ({
                       "scores": {key: column_mean(key).change(columns[name], after, estimate) for key in scores}}
                       if scores else {})
            for name in list_compared(columns, policy)}


def list_compared(columns: Iterable[str], policy: str) -> list[str]:
    """List what a policy at its best temperature is compared with: the cheaper policies, and its control."""
    control = f"{CONTROLS.get(policy)}{BEST}"
    return [*cheaper_policies(columns), *([control] if control in columns else [])]


def _gold_differences(before: Columns, after: Columns, estimate: Callable) -> dict[str, dict]:
    changes = {name: column_mean(f"{GOLD_PREFIX}{name}").change(before, after, estimate)
               for name in gold_score_names(after)}
    return {name: change for name, change in changes.items() if change}


def _mean_where_known(values: Sequence[float]) -> float | None:
    known = [value for value in values if not np.isnan(value)]
    return sum(known) / len(known) if known else None
