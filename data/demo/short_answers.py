"""Reward short answers that use the question's own words: an example of a reward of your own (docs/own_prompts.md)."""

import re

WORDS_WANTED = 30


def score(questions: list[str], answers: list[str]) -> list[float]:
    """Compute a reward for each answer: the share of the question's words in it, less what it has beyond 30 words."""
    return [_overlap(question, answer) - _excess(answer) for question, answer in zip(questions, answers, strict=True)]


def _overlap(question: str, answer: str) -> float:
    wanted, written = (set(re.findall(r"\w{4,}", text.lower())) for text in (question, answer))
    return len(wanted & written) / max(len(wanted), 1)


def _excess(answer: str) -> float:
    return max(len(answer.split()) - WORDS_WANTED, 0) / WORDS_WANTED
