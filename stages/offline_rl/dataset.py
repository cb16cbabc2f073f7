"""Scored answers of a pairs table as offline experience: each answer once, its normalised score as the reward."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from stages.stackexchange.prompt import encode_examples


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer to a prompt as token ids, and its reward, in standard deviations of the scores."""

    prompt: list[int]
    answer: list[int]
    reward: float


def tokenize_answers(
    rows: Iterable[tuple[str, str, int]], tokenizer, max_length_tokens: int
) -> tuple[list[ScoredAnswer], int]:
    """Tokenise (question, answer, score) rows, with the score as the reward; also count those that are too long."""
    rows = list(rows)
    encoded = encode_examples(tokenizer, ((question, answer) for question, answer, _ in rows))
    examples = [ScoredAnswer(prompt, answer, float(score))
                for (prompt, answer), (*_, score) in zip(encoded, rows, strict=True)]
    fitting = [example for example in examples if len(example.prompt) + len(example.answer) <= max_length_tokens]
    return fitting, len(examples) - len(fitting)


def measure_scale(answers: list[ScoredAnswer]) -> tuple[float, float]:
    """Measure the mean and the unbiased standard deviation of the scores; ValueError if they are all equal."""
    scores = torch.tensor([answer.reward for answer in answers], dtype=torch.float64)
    std = float(scores.std()) if len(scores) > 1 else 0.0
    if not std > 0 or not math.isfinite(std):
        raise ValueError(f"the {len(answers)} answers to train on have one score: there is nothing to learn from")
    return float(scores.mean()), std


def normalise_rewards(answers: list[ScoredAnswer], scale: tuple[float, float]) -> list[ScoredAnswer]:
    """Return the answers with rewards of mean 0 and standard deviation 1; scale: of measure_scale."""
    mean, std = scale
    return [replace(answer, reward=(answer.reward - mean) / std) for answer in answers]


def collate_answers(rows: list[ScoredAnswer]) -> dict:
    """Return the rows as they are, and count their actions."""
    return {"content": rows, "items": sum(len(row.answer) for row in rows)}
