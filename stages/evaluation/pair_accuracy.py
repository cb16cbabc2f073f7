"""Evaluate the reward model on held-out pairs, beside cheap baselines on the same pairs.

A scorer gives every text a number. It is right on a pair when the better answer scores higher; ties count one half.
Shapes: N pairs, M distinct texts, K features of a text's surface.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.evaluation.statistics import flatten_estimates, pair_wins
from stages.generation.text_metrics import count_fences, has_code
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.reward_modeling.lexical_scorer import LinearScorer, fit_bradley_terry, fit_lexical_scorer
from stages.stackexchange.pairs.draw import better_is_later
from stages.stackexchange.pairs.table import group_numbers, question_key, sample_rows
from stages.stackexchange.prompt import answer_ids, prompt_ids

LONGER_ANSWER = "longer answer wins"
# To add a baseline that needs no model: a line here, a function of the answer's text.
TEXT_BASELINES: dict[str, Callable[[str], float]] = {LONGER_ANSWER: len, "has code": has_code}
SURFACE = "surface features (logistic)"
BAG_OF_WORDS = "bag of words (logistic)"
LOG_PROBABILITY = "SFT log-probability"
MAX_KINDS = 20  # sites, or tags, with an accuracy of their own: those with most pairs
EQUAL_LENGTH = 0.1  # a difference below this share of the longer answer
LENGTHS = {"much shorter": (-1.0, -0.5), "shorter": (-0.5, -EQUAL_LENGTH), "about equal": (-EQUAL_LENGTH, EQUAL_LENGTH),
           "longer": (EQUAL_LENGTH, 0.5), "much longer": (0.5, 1.01)}  # of the better answer, as a share of the longer
CONFIDENCE_BINS = 10
SCORE_GAPS = {"1": (1, 1), "2": (2, 2), "3+": (3, float("inf"))}
# To add a feature: a line here, a function of the answer's text.
FEATURES: dict[str, Callable[[str], float]] = {
    "log characters": lambda text: math.log1p(len(text)),
    "has code": has_code,
    "log code fences": lambda text: math.log1p(count_fences(text)),
    "log inline code": lambda text: math.log1p(len(re.findall(r"(?<!`)`[^`\n]+`", text))),
    "log links": lambda text: math.log1p(len(re.findall(r"https?://", text))),
    "log list items": lambda text: math.log1p(len(re.findall(r"^ *(?:[-*+]|\d+\.) ", text, re.MULTILINE))),
    "log paragraphs": lambda text: math.log1p(text.strip().count("\n\n")),
    "log headings": lambda text: math.log1p(len(re.findall(r"^#+ ", text, re.MULTILINE))),
    "has emphasis": lambda text: "**" in text,
    "question marks": lambda text: math.log1p(text.count("?")),
    "exclamation marks": lambda text: math.log1p(text.count("!")),
}
# Times |w|^2 / 2, added to the sum over pairs: keeps w finite where one feature separates all pairs.
SURFACE_PENALTY = 1.0


@dataclass(frozen=True)
class HeldOutPairs:
    """Pairs as indices into distinct (question, answer) texts."""

    rows: list[dict]  # [N] of the pairs table
    texts: list[tuple[str, str]]  # [M] question, answer
    prompts: list[list[int]]  # [M] token ids
    answers: list[list[int]]  # [M] token ids, closed by EOS
    better: np.ndarray  # [N] index of the better text
    worse: np.ndarray  # [N]
    groups: np.ndarray  # [N] number of the question
    dropped: int  # pairs over the length limit

    def score_wins(self, scores: np.ndarray) -> np.ndarray:
        """Return 1, 1/2 (tie) or 0 for each pair [N], given a score for each text [M]."""
        scores = np.asarray(scores, float)
        return pair_wins(scores[self.better], scores[self.worse])

    def write_scores(self, path: Path, scores: dict[str, np.ndarray | None]) -> None:
        """Write per_pair.parquet: scores [M] of each pair's two texts, by scorer; None: left out."""
        write_table(path, {name: [row[name] for row in self.rows] for name in ("site", "qid", "score_j", "score_k")}, {
            f"{name}_{side}": values[texts] for name, values in scores.items() if values is not None
            for side, texts in (("j", self.better), ("k", self.worse))})


def write_table(path: Path, columns: dict[str, list], numbers: dict[str, Sequence[float]]) -> None:
    """Write a Parquet file of columns and, after them, of numbers, in which NaN, "does not apply", becomes null."""
    table = columns | {name: pa.array(np.asarray(values, float), pa.float64(), from_pandas=True)
                       for name, values in numbers.items()}
    pq.write_table(pa.table(table), path, compression="zstd")


def draw_held_out_pairs(rows: Iterable[dict], tokenizer, *, max_pairs: int, max_tokens: int, seed: int) -> HeldOutPairs:
    """Draw at most `max_pairs` rows of a pairs table, seeded; drop those with a text over `max_tokens`."""
    prompts: dict[str, list[int]] = {}
    text_index: dict[tuple, int] = {}
    fitting, ids, better, worse = [], [], [], []
    drawn = sample_rows(rows, max_pairs, seed)
    for row in drawn:
        if row["question"] not in prompts:
            prompts[row["question"]] = prompt_ids(tokenizer, row["question"])
        prompt = prompts[row["question"]]
        answers = [answer_ids(tokenizer, row[name]) for name in ("response_j", "response_k")]
        if len(prompt) + max(map(len, answers)) > max_tokens:
            continue
        for name, answer, side in zip(("response_j", "response_k"), answers, (better, worse), strict=True):
            text = (row["question"], row[name])
            if text not in text_index:
                text_index[text] = len(ids)
                ids.append((prompt, answer))
            side.append(text_index[text])
        fitting.append(row)
    return HeldOutPairs(
        fitting, list(text_index), [prompt for prompt, _ in ids], [answer for _, answer in ids],
        np.array(better, dtype=int), np.array(worse, dtype=int), group_numbers(map(question_key, fitting)),
        len(drawn) - len(fitting))


def evaluate_pairs(
    pairs: HeldOutPairs, reward: np.ndarray, further: dict[str, np.ndarray], gold: np.ndarray | None,
    tags: dict[tuple, list[str]], estimate: Callable
) -> dict:
    """Compute the accuracy of the reward model and of the baselines, and the accuracy by kind of pair.

    Args:
        reward: scores of the reward model [M].
        further: scores [M] of the baselines beside TEXT_BASELINES, by name.
        gold: gold scores [M]; their accuracy is the ceiling.
        tags: of each question (site, qid).
        estimate: (values [N], groups [N]) to a mean with its interval (statistics.bootstrap_mean).
    """
    accuracy = partial(estimate, groups=pairs.groups)
    right = pairs.score_wins(reward)
    return {
        "pairs": len(pairs.rows), "questions": len(set(pairs.groups.tolist())), "texts": len(pairs.texts),
        "dropped_over_length": pairs.dropped,
        **accuracy_breakdown(pairs, reward, estimate),
        "by_site": _by_kind([[row["site"]] for row in pairs.rows], right, accuracy),
        "by_tag": _by_kind([tags.get(question_key(row), []) for row in pairs.rows], right, accuracy),
        **compare_with_baselines(pairs, reward, further, estimate),
        "oracle": None if gold is None else accuracy(pairs.score_wins(gold)),
        "oracle_both_have_code": None if gold is None else accuracy(
            np.where(_both_have_code(pairs), pairs.score_wins(gold), np.nan)),
    }


def compare_with_baselines(pairs: HeldOutPairs, scores: np.ndarray, further: dict[str, np.ndarray], estimate: Callable
                           ) -> dict:
    """Compute the accuracy of each cheap baseline, and how far scores [M] are above the best one, paired.

    further: scores [M] of the baselines beside TEXT_BASELINES, by name.
    """
    wins = {name: pairs.score_wins([score(answer) for _, answer in pairs.texts])
            for name, score in TEXT_BASELINES.items()}
    wins |= {name: pairs.score_wins(values) for name, values in further.items()}
    best = max(wins, key=lambda name: wins[name].mean()) if pairs.rows else None
    return {
        "baselines": {name: estimate(values, pairs.groups) for name, values in wins.items()},
        "best_cheap_baseline": best,
        "above_best_cheap_baseline": estimate(pairs.score_wins(scores) - wins[best], pairs.groups) if best else None,
    }


def score_fitted_baselines(pairs: HeldOutPairs, rows: Iterable[dict]) -> dict[str, np.ndarray]:
    """Score every text [M] with each logistic regression, fitted on other rows of a pairs table."""
    rows = list(rows)
    baselines = {SURFACE: fit_surface_baseline(rows), BAG_OF_WORDS: fit_lexical_scorer(rows)}
    return {name: baseline(answer for _, answer in pairs.texts) for name, baseline in baselines.items()}


def mean_logprobs(pairs: HeldOutPairs, model, label: str) -> np.ndarray:
    """Compute the mean log-probability of the tokens of every text [M] under a language model, in nats.

    label: name of the progress line.
    """
    rows = response_logprobs(model, pairs.prompts, pairs.answers, 1.0, label)
    return np.array([float(row.mean()) for row in rows])


def accuracy_breakdown(pairs: HeldOutPairs, scores: np.ndarray, estimate: Callable) -> dict:
    """Compute the accuracy of scores [M]: overall, by how the answers differ, and by confidence."""
    right, lengths = pairs.score_wins(scores), _length_differences(pairs)
    gaps = np.array([row["score_j"] - row["score_k"] for row in pairs.rows], dtype=float)

    def accuracy(where: np.ndarray) -> dict | None:
        return estimate(np.where(where, right, np.nan), pairs.groups)

    return {
        "accuracy": estimate(right, pairs.groups),
        "both_have_code": accuracy(_both_have_code(pairs)),
        "better_is_later": accuracy(np.array([better_is_later(row) for row in pairs.rows], dtype=bool)),
        "by_score_gap": {name: accuracy((low <= gaps) & (gaps <= high)) for name, (low, high) in SCORE_GAPS.items()},
        "by_length": {name: accuracy((low <= lengths) & (lengths < high)) for name, (low, high) in LENGTHS.items()},
        "calibration": calibration(scores[pairs.better] - scores[pairs.worse]),
    }


def validation_metrics(pairs: HeldOutPairs, scores: np.ndarray, breakdown: dict) -> dict[str, float]:
    """Compute the metrics of scores [M] for the history: accuracy, beside baselines, and the loss in nats a pair.

    breakdown: what `accuracy_breakdown` and `compare_with_baselines` return.
    """
    baselines = {name: estimate["mean"] for name, estimate in breakdown["baselines"].items()}
    gaps = np.asarray(scores[pairs.better] - scores[pairs.worse], float)
    numbers = {**flatten_estimates({"accuracy": breakdown["accuracy"]}),
               "longer_answer_accuracy": baselines[LONGER_ANSWER],
               "best_baseline_accuracy": baselines[breakdown["best_cheap_baseline"]],
               **flatten_estimates({"above_baseline": breakdown["above_best_cheap_baseline"]}),
               "loss": float(np.logaddexp(0, -gaps).mean()),
               "calibration_error": breakdown["calibration"]["expected_error"]}
    return {f"validation_{name}": value for name, value in numbers.items()}


def scored_pair_samples(pairs: HeldOutPairs, scores: np.ndarray, count: int) -> list[dict]:
    """List the first `count` pairs as text, with their scores."""
    return [{"question": row["question"], "better_answer": row["response_j"], "better_reward": float(scores[better]),
             "worse_answer": row["response_k"], "worse_reward": float(scores[worse]), "source": row["metadata"][0]}
            for row, better, worse in zip(pairs.rows[:count], pairs.better, pairs.worse, strict=False)]


def calibration(gaps: np.ndarray) -> dict:
    """Compute accuracy by confidence, sigmoid(|gap|), of score gaps [N], better minus worse.

    expected_error: the mean |accuracy - confidence| over bins of equal width, weighted by pairs (ECE, Guo et al. 2017).
    """
    gaps = np.asarray(gaps, float)
    confidence, right = 1 / (1 + np.exp(-np.abs(gaps))), pair_wins(gaps, np.zeros_like(gaps))
    bin_index = np.minimum((CONFIDENCE_BINS * (2 * confidence - 1)).astype(int), CONFIDENCE_BINS - 1)
    bins = [{"confidence": float(confidence[here].mean()), "accuracy": float(right[here].mean()),
             "pairs": int(here.sum())} for number in range(CONFIDENCE_BINS) if (here := bin_index == number).any()]
    error = sum(b["pairs"] * abs(b["confidence"] - b["accuracy"]) for b in bins) / max(1, len(gaps))
    return {"expected_error": error, "bins": bins}


def _by_kind(kinds: list[list[str]], right: np.ndarray, accuracy: Callable) -> dict[str, dict]:
    """Compute accuracy by kind of question, the most common first; kinds: those of each pair, one or several."""
    common = Counter(kind for names in kinds for kind in names).most_common(MAX_KINDS)
    return {kind: accuracy(np.where([kind in names for names in kinds], right, np.nan)) for kind, _ in common}


def _both_have_code(pairs: HeldOutPairs) -> np.ndarray:
    code = np.array([has_code(answer) for _, answer in pairs.texts], dtype=bool)
    return code[pairs.better] & code[pairs.worse]


def _length_differences(pairs: HeldOutPairs) -> np.ndarray:
    """Compute (better - worse) / longer [N], lengths in characters."""
    length = np.array([len(answer) for _, answer in pairs.texts], dtype=float)
    one, other = length[pairs.better], length[pairs.worse]
    return (one - other) / np.maximum(np.maximum(one, other), 1)


def extract_features(texts: Iterable[str]) -> np.ndarray:
    """Compute the features [M, K] of answers."""
    rows = [[float(feature(text)) for feature in FEATURES.values()] for text in texts]
    return np.array(rows).reshape(-1, len(FEATURES))


def fit_surface_baseline(rows: Iterable[dict]) -> LinearScorer:
    """Fit the baseline on rows of a pairs table; without rows it scores 0.

    Each feature is divided by its root mean square among the differences.

    The probability that answer j is better than k is sigmoid(w . (x_j - x_k)), without an intercept, so that the order
    of the two does not matter.
    """
    rows = list(rows)
    if not rows:
        return LinearScorer(extract_features, np.zeros(len(FEATURES)))
    better, worse = (extract_features(row[name] for row in rows) for name in ("response_j", "response_k"))
    scale = np.sqrt(((better - worse) ** 2).mean(0))
    scale[scale == 0] = 1.0
    weights = fit_bradley_terry((better - worse) / scale, SURFACE_PENALTY, solver="newton-cholesky")
    return LinearScorer(extract_features, weights / scale)
