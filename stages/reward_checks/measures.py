"""Measure on held-out pairs how much scores depend on the layout of answers, and what accuracy their votes allow; and
on sampled answers best-of-n by the reward model in gold, and how a policy moved.

Shapes: N pairs or prompts, M texts, S samples a prompt.
"""

import re
from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import betainc
from scipy.stats import rankdata

from stages.evaluation.pair_accuracy import SCORE_GAPS, HeldOutPairs
from stages.evaluation.policy_answers import Answers
from stages.evaluation.policy_metrics import correlation, sum_kl
from stages.generation.best_of_n import best_of_kl, best_of_n_weights
from stages.generation.text_metrics import FENCE
from stages.rewards.kl import kl_k1, kl_k3

PRIOR = 0.5  # of Jeffreys, on the rate of votes
# Markup -> the text that remains of it. Each pattern is linear in the text: posts are untrusted.
MARKUP = (
    (re.compile(r"^[ \t]{0,3}#{1,6}[ \t]+", re.MULTILINE), ""),  # headings
    (re.compile(r"^[ \t]{0,3}>[ \t]?", re.MULTILINE), ""),  # quotations
    (re.compile(r"^([ \t]*)(?:[-*+]|\d{1,9}[.)])[ \t]+", re.MULTILINE), r"\1"),  # list items
    (re.compile(r"!?\[([^\[\]]{0,500})\]\([^()\s]{0,2000}\)"), r"\1"),  # links and images
    (re.compile(r"(\*{1,3})(?=\S)([^*\n]{1,500})(?<=\S)\1"), r"\2"),  # emphasis
    (re.compile(r"`([^`\n]{1,500})`"), r"\1"),  # inline code
)


def remove_fences(text: str) -> str:
    """Drop the lines that open and close code blocks; the code stays."""
    return "\n".join(line for line in text.split("\n") if not line.lstrip().startswith(FENCE))


def strip_markdown(text: str) -> str:
    """Drop fences, headings, list markers, quotation marks, emphasis and links' addresses; the words stay."""
    text = remove_fences(text)
    for pattern, remainder in MARKUP:
        text = pattern.sub(remainder, text)
    return text


def normalise_whitespace(text: str) -> str:
    """Turn every run of white space into one space, or into one line feed if it has any."""
    return re.sub(r"\s+", lambda run: "\n" if "\n" in run[0] else " ", text.strip())


# To add a paraphrase: a line here, a function of the answer's text.
PARAPHRASES: dict[str, Callable[[str], str]] = {
    "markdown stripped": strip_markdown, "whitespace normalised": normalise_whitespace, "fences removed": remove_fences}


def measure_layout(pairs: HeldOutPairs, scores: np.ndarray, rescored: np.ndarray, changed: np.ndarray,
                   estimate_mean: Callable, estimate: Callable) -> dict:
    """Compare scores [M] with those of the same answers in another layout.

    Args:
        rescored: scores [M] of the answers in the other layout.
        changed: whether the layout differs [M].
        estimate_mean, estimate: statistics.bootstrap_mean and bootstrap_statistic with samples and seed.

    Returns: the share of answers that change; of these, the rank correlation (Spearman) of both scores, and the mean
        shift in standard deviations of all scores; of the pairs with one of these, the change of accuracy. An entry is
        None where it does not apply.
    """
    groups = np.zeros(len(scores), dtype=int)
    groups[pairs.better], groups[pairs.worse] = pairs.groups, pairs.groups
    spread = scores.std()
    shift = np.where(changed, rescored - scores, np.nan) / spread if spread > 0 else np.full(len(scores), np.nan)
    touched = changed[pairs.better] | changed[pairs.worse]
    gain = pairs.score_wins(rescored) - pairs.score_wins(scores)
    return {"changed_share": float(changed.mean()) if len(changed) else 0.0,
            "rank_correlation": _rank_correlation(scores[changed], rescored[changed], groups[changed], estimate),
            "shift_stds": estimate_mean(shift, groups),
            "accuracy_change": estimate_mean(np.where(touched, gain, np.nan), pairs.groups)}


def _rank_correlation(one: np.ndarray, other: np.ndarray, groups: np.ndarray, estimate: Callable) -> dict | None:
    if len(one) < 2:
        return None
    x, y = ((ranks - ranks.mean()) / len(ranks) for ranks in (rankdata(one), rankdata(other)))  # small sums of squares
    return estimate(lambda sums: correlation(*sums), np.stack([np.ones(len(x)), x, y, x * x, y * y, x * y]), groups)


def votes_of_scores(scores: np.ndarray) -> np.ndarray:
    """Invert a pair table's score, round(log2(1 + votes)), to votes; below 0: none. Acceptance counts as a doubling."""
    return np.exp2(np.maximum(np.asarray(scores, float), 0)) - 1


def probability_order_is_right(better_votes: np.ndarray, worse_votes: np.ndarray) -> np.ndarray:
    """Compute the probability [N] that the answer with more votes has the higher rate of votes.

    Model: readers of a question vote for each answer independently and at its own rate, so that vote counts are
    Poisson, and all answers are shown equally often. Given the counts v_j and v_k, the share of j in the sum of both
    rates has the posterior Beta(v_j + 1/2, v_k + 1/2) (Jeffreys' prior; the conditional test of two Poisson counts,
    Przyborowski and Wilenski 1940). A scorer that knows the rates then agrees with the votes with probability
    P(share > 1/2).
    """
    return betainc(np.asarray(worse_votes, float) + PRIOR, np.asarray(better_votes, float) + PRIOR, 0.5)


def estimate_noise_ceiling(pairs: HeldOutPairs, estimate_mean: Callable) -> dict:
    """Estimate the best accuracy that the votes allow: of all pairs, and by score gap.

    It is a bound: real votes are not independent (early and top answers collect more), which lowers what can be
    reached.

    estimate_mean: statistics.bootstrap_mean with samples and seed.
    """
    better, worse = (np.array([row[name] for row in pairs.rows], float) for name in ("score_j", "score_k"))
    right = probability_order_is_right(votes_of_scores(better), votes_of_scores(worse))
    return {"all": estimate_mean(right, pairs.groups), "by_score_gap": {
        name: estimate_mean(np.where((low <= better - worse) & (better - worse <= high), right, np.nan), pairs.groups)
        for name, (low, high) in SCORE_GAPS.items()}}


def best_of_n_curve(rewards: np.ndarray, gold: np.ndarray, counts: Sequence[int], estimate_mean: Callable
                    ) -> list[dict]:
    """Estimate learnt reward and gold of best-of-n, for n = 1 and each count, by the reward model's choice.

    Args:
        rewards, gold: of all samples [N, S]; gold is NaN where it knows none of a prompt.
        estimate_mean: statistics.bootstrap_mean with samples and seed.

    Returns: for each n its KL to SFT at most, in nats; `reward` and `gold` by the reward model's choice; `gold_gain`,
        gold minus that of one sample, paired; `best_gold`, where gold itself chooses: the most that n samples have.
    """
    questions = np.arange(len(rewards))
    known = ~np.isnan(gold).any(1, keepdims=True)
    best = np.where(known, gold, 0.0)
    curve = []
    for n in sorted({1, *counts}):
        weights = best_of_n_weights(rewards, n)
        chosen, reachable = ((each * gold).sum(1) for each in (weights, best_of_n_weights(best, n)))
        curve.append({"n": n, "kl": best_of_kl(n), "reward": estimate_mean((weights * rewards).sum(1), questions),
                      "gold": estimate_mean(chosen, questions),
                      "gold_gain": estimate_mean(chosen - gold.mean(1), questions),
                      "best_gold": estimate_mean(reachable, questions)})
    return curve


def compare_policy(answers: dict[str, Answers], rewards: dict[str, np.ndarray], gold: dict[str, np.ndarray],
                   estimate_mean: Callable) -> dict:
    """Estimate a policy's KL to SFT, and its differences in reward and in gold; gold is None where it is not known.

    All by writer, 'policy' and 'sft' among them: answers, their rewards [N], and their gold scores [N] or nothing.
    """
    values = {"kl_k1": sum_kl(kl_k1, answers["policy"]), "kl_k3": sum_kl(kl_k3, answers["policy"]),
              "reward_difference": rewards["policy"] - rewards["sft"]}
    if gold:
        values |= {"gold": gold["policy"], "gold_difference": gold["policy"] - gold["sft"]}
    return {"gold": None, "gold_difference": None} | {
        name: estimate_mean(each, np.arange(len(each))) for name, each in values.items()}
