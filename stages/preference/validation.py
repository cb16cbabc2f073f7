"""Measure a policy on preference pairs of held-out questions: loss, implicit rewards, log-probabilities, drift.

Shapes: N pairs, M distinct answers of these.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.evaluation.pair_accuracy import HeldOutPairs, scored_pair_samples
from stages.evaluation.statistics import bootstrap_mean
from stages.preference.logprobs import all_answer_logprobs
from stages.preference.loss import PreferenceLoss, preference_losses
from stages.preference.reference import compute_reference
from stages.reward_modeling.dataset import Example
from stages.stackexchange.pairs.table import question_key
from stages.training.callbacks import Evaluation
from stages.training.loggers import TrainingLogger

LOGGED_PAIRS = 8  # logged as text with their implicit rewards at every evaluation
ESTIMATE = partial(bootstrap_mean, samples=1000, seed=0)


class Validation:
    """Measure the model on held-out pairs; the state with the lowest loss is the best.

    Accuracy on pairs goes on rising where the policy's answers get worse (Rafailov et al. 2024, arXiv 2406.02900); the
    loss also counts how sure the policy is of the pairs that it has wrong.

    Args:
        model: not trained yet.
        file: where the reference's log-probabilities are stored.
    """

    def __init__(self, model, pairs: HeldOutPairs, loss: PreferenceLoss, precision: str, file: Path,
                 logger: TrainingLogger):
        self.model, self.pairs, self.loss, self.precision, self.logger = model, pairs, loss, precision, logger
        self.examples = group_answers(pairs)
        rows = compute_reference(model, self.examples, precision, file, f"{logger.stage}: validation reference")
        self.ref_logprobs = np.array([ref for row in rows for ref in row.ref_logprobs])
        self.tokens = np.array([len(answer) for answer in pairs.answers])

    def evaluation(self, every_steps: int) -> Evaluation:
        """Schedule `measure`, also of the untrained policy."""
        return Evaluation(self.measure, every_steps, lambda row: -row["validation_preference_loss"], at_start=True)

    def measure(self, step: int) -> dict[str, float]:
        """Compute the metrics, and log some pairs with their implicit rewards."""
        logprobs = all_answer_logprobs(self.model, self.examples, self.precision).double().numpy()
        self.logger.log_samples(
            step, scored_pair_samples(self.pairs, self.loss.beta * (logprobs - self.ref_logprobs), LOGGED_PAIRS))
        return preference_metrics(self.pairs, logprobs, self.ref_logprobs, self.tokens, self.loss)


def preference_metrics(
    pairs: HeldOutPairs, logprobs: np.ndarray, ref_logprobs: np.ndarray, tokens: np.ndarray, loss: PreferenceLoss
) -> dict[str, float]:
    """Compute the metrics from the log-probabilities [M] under policy and reference, and the answers' tokens [M]."""
    ratios, better, worse = logprobs - ref_logprobs, pairs.better, pairs.worse
    rewards = loss.beta * ratios
    right = ESTIMATE(pairs.score_wins(rewards), pairs.groups)
    ours, theirs = (torch.from_numpy(ratios[side]) for side in (better, worse))
    losses = preference_losses(ours, theirs, *(torch.from_numpy(tokens[side]) for side in (better, worse)),
                               **vars(loss))
    numbers = {
        "preference_loss": float(losses.mean()),
        "implicit_accuracy": right["mean"], "implicit_accuracy_low": right["low"],
        "implicit_accuracy_high": right["high"],
        "implicit_margin": float((rewards[better] - rewards[worse]).mean()),
        "better_logprob": float(logprobs[better].mean()), "worse_logprob": float(logprobs[worse].mean()),
        "drift_per_token": float(np.abs(ratios / tokens).mean())}
    return {f"validation_{name}": value for name, value in numbers.items() if value is not None}


def group_answers(pairs: HeldOutPairs) -> list[Example]:
    """Group the distinct answers [M] by question, in their order, so that they share its tokens."""
    questions = {}
    for row, *indices in zip(pairs.rows, pairs.better, pairs.worse, strict=True):
        questions |= {int(index): question_key(row) for index in indices}
    examples: list[Example] = []
    for index, (prompt, answer) in enumerate(zip(pairs.prompts, pairs.answers, strict=True)):
        if not examples or examples[-1].question != questions[index]:
            examples.append(Example(questions[index], prompt))
        examples[-1].answers.append(answer)
    return examples
