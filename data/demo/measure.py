"""Measure a simulated site: how well pairs can be predicted from quality, and from surface features."""

import math
import re
from collections.abc import Callable
from itertools import combinations
from random import Random

from data.demo.facts import count_words, quality
from data.demo.simulate import Answer, Question

PAIRS_PER_QUESTION = 10  # as in StackLLaMA
Pair = tuple[Answer, Answer]  # (preferred, other)


def stackllama_score(answer: Answer) -> int:
    """Compute StackLLaMA's score: rounded log2(1 + votes), plus 1 if accepted; -1 for negative votes."""
    if answer.score < 0:
        return -1
    return round(math.log2(1 + answer.score)) + answer.accepted


def preference_pairs(question: Question, rng: Random) -> list[Pair]:
    """Draw pairs of answers with different scores, the better one first."""
    ordered = sorted(question.answers, key=stackllama_score, reverse=True)
    pairs = [pair for pair in combinations(ordered, 2) if stackllama_score(pair[0]) > stackllama_score(pair[1])]
    return rng.sample(pairs, min(PAIRS_PER_QUESTION, len(pairs)))


def accuracy(pairs: list[Pair], key: Callable[[Answer], float]) -> float:
    """Compute the share of pairs whose preferred answer has the higher key; a tie counts half."""
    return _mean(0.5 * ((key(good) > key(bad)) + (key(good) >= key(bad))) for good, bad in pairs)


def statistics(questions: list[Question]) -> dict[str, float]:
    """Compute counts, shares (0..1), pairwise accuracies (0..1) and means, by name."""
    rng = Random(0)
    answers = [answer for question in questions for answer in question.answers]
    pairs = [pair for question in questions for pair in preference_pairs(question, rng)]
    with_code = [pair for pair in pairs if _has_code(pair[0]) and _has_code(pair[1])]
    figures = {
        "questions": len(questions),
        "answers": len(answers),
        "pairs": len(pairs),
        "oracle accuracy": accuracy(pairs, _quality),
        "oracle accuracy, both with code": accuracy(with_code, _quality),
        "accuracy of correctness alone": accuracy(pairs, lambda answer: answer.features.correct),
        "accuracy of style alone": accuracy(pairs, lambda answer: quality(answer.features._replace(correct=0.0))),
        "accuracy of the longer answer": accuracy(pairs, _length),
        "accuracy of the answer with code": accuracy(pairs, _has_code),
        "pairs that differ in correctness": _mean(a.features.correct != b.features.correct for a, b in pairs),
        "two-fact questions": _mean(len(question.facts) == 2 for question in questions),
        "distinct question texts": len({question.html for question in questions}) / len(questions),
        "questions with an accepted answer": _mean(any(a.accepted for a in q.answers) for q in questions),
        "answers voted below zero": _mean(answer.score < 0 for answer in answers),
        "answers at zero votes": _mean(answer.score == 0 for answer in answers),
        "words a question": _mean(count_words(_plain(question.html)) for question in questions),
        "words an answer": _mean(answer.features.words for answer in answers),
        "gold of an answer": _mean(map(_quality, answers)),
        "gold of a question's best answer": _mean(max(map(_quality, question.answers)) for question in questions),
    }
    for name in ("correct", "code", "explanation", "filler", "rude", "off_topic"):
        figures[f"answers: {name}"] = _mean(getattr(answer.features, name) for answer in answers)
    return figures


def _quality(answer: Answer) -> float:
    return quality(answer.features)


def _has_code(answer: Answer) -> bool:
    return "<pre>" in answer.html


def _length(answer: Answer) -> int:
    return len(_plain(answer.html))


def _plain(html: str) -> str:
    return re.sub(r"<[^>]+>", "", html)


def _mean(values) -> float:
    values = list(values)
    return sum(values) / len(values) if values else math.nan
