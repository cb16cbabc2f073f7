"""Measure sampled answers: best-of-n by the reward model in gold, whether SFT's answers fit, and how a policy moved.

Shapes: N prompts, S samples a prompt.
"""

from collections.abc import Callable, Sequence

import numpy as np

from stages.evaluation.policy_answers import Answers
from stages.evaluation.policy_metrics import sum_kl
from stages.generation.best_of_n import best_of_kl, best_of_n_weights
from stages.rewards.kl import kl_k1, kl_k3


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


def gold_above_other_answers(score: Callable, questions: list[str], answers: list[str], estimate_mean: Callable
                             ) -> dict | None:
    """Estimate how much more gold SFT's answers have than its answers to other questions have as answers to these.

    A model that knows nothing of a question answers it as it answers any other: the difference is then 0.

    score: (questions, answers) to gold [N], NaN where it is not known.
    """
    if len(questions) < 2:
        return None
    own, other = score(questions, answers), score(questions, answers[1:] + answers[:1])
    return estimate_mean(np.asarray(own, float) - np.asarray(other, float), np.arange(len(questions)))


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
