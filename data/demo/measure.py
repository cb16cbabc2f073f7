"""Measure a simulated site: how well pairs can be predicted from quality, and from surface features."""

import math
import re
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from random import Random

from data.demo.facts import ATTRIBUTES, POPULAR_MISTAKES, TRUTH, Fact, Features, count_words, describe, quality
from data.demo.simulate import TRAIT_SHARES, WISH_SHARES, Answer, Question

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
    values = _value_counts(questions)
    likelihood = _log_frequencies(questions, values)
    contested = [answer for answer in answers if answer.features.contested_correct is not None]
    with_code = [pair for pair in pairs if _has_code(pair[0]) and _has_code(pair[1])]
    figures = {
        "questions": len(questions),
        "answers": len(answers),
        "pairs": len(pairs),
        "oracle accuracy": accuracy(pairs, _quality),
        "oracle accuracy, both with code": accuracy(with_code, _quality),
        "accuracy of correctness alone": accuracy(pairs, lambda answer: answer.features.correct),
        "accuracy of traits alone": accuracy(pairs, lambda answer: quality(answer.features._replace(correct=0.0))),
        "accuracy without the question": accuracy(pairs, _quality_without_question),
        "accuracy of the frequent answer": accuracy(pairs, lambda answer: likelihood[id(answer)]),
        "accuracy of the longer answer": accuracy(pairs, _length),
        "accuracy of the answer with code": accuracy(pairs, _has_code),
        "pairs that differ in correctness": _mean(a.features.correct != b.features.correct for a, b in pairs),
        "pairs of right and popular mistake": _mean(
            good.features.correct == 1 and bad.features.mistaken > 0 for good, bad in pairs
        ),
        "facts with a popular mistake": len(POPULAR_MISTAKES) / len(TRUTH),
        "answers with it, of those facts": _mean(answer.features.mistaken > 0 for answer in contested),
        "answers right, of those facts": _mean(answer.features.contested_correct for answer in contested),
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
    figures |= {f"gold of {name} answerer": gold for name, gold in _answerers(questions, values, rng).items()}
    for name in ("correct", "complete", "code", "explanation", "filler", "rude", "off_topic"):
        figures[f"answers: {name}"] = _mean(getattr(answer.features, name) for answer in answers)
    return figures


def _quality_without_question(answer: Answer) -> float:
    """Compute what is expected of an answer whose question is unknown: a trait is wanted as often as on the site."""
    given = frozenset(name for name in ("code", "explanation") if getattr(answer.features, name))
    return sum(
        share
        * quality(
            answer.features._replace(
                correct=0.0, off_topic=False, wanted=len(given & wish) / len(wish), unwanted=len(given - wish)
            )
        )
        for wish, share in WISH_SHARES.items()
    )


def _log_frequencies(questions: list[Question], values: dict[Fact, Counter]) -> dict[int, float]:
    """Compute how likely each answer is, by id: log frequency of its values for their facts, and of its traits."""
    answers = [(question, answer) for question in questions for answer in question.answers]
    traits = Counter(_traits(answer.features) for _, answer in answers)
    return {
        id(answer): math.log(traits[_traits(answer.features)] / len(answers))
        + sum(math.log(values[fact][answer.stated.get(fact)] / values[fact].total()) for fact in question.facts)
        for question, answer in answers
    }


def _value_counts(questions: list[Question]) -> dict[Fact, Counter]:
    """Count what the answers state for each fact; None: nothing."""
    counts = {fact: Counter() for fact in TRUTH}
    for question in questions:
        for fact in question.facts:
            counts[fact].update(answer.stated.get(fact) for answer in question.answers)
    return counts


def _traits(features: Features) -> frozenset[str]:
    return frozenset(name for name in TRAIT_SHARES if getattr(features, name))


def _answerers(questions: list[Question], values: dict[Fact, Counter], rng: Random) -> dict[str, float]:
    """Compute the mean gold of a perfect answerer, of the most frequent values and traits, and of random ones."""
    frequent = {name for name, share in TRAIT_SHARES.items() if share > 0.5}
    most = {fact: counts.most_common(1)[0][0] for fact, counts in values.items()}

    def mean_gold(value: Callable[[Fact], str], traits: Callable[[Question], set[str]]) -> float:
        """Compute the mean gold of answers with `value` of each asked fact and the `traits` of each question."""
        return _mean(
            quality(describe(set(q.facts), q.wish, {fact: {value(fact)} for fact in q.facts}, traits(q), words=0))
            for q in questions
        )

    return {
        "a perfect": mean_gold(TRUTH.get, lambda question: set(question.wish)),
        "a majority": mean_gold(most.get, lambda question: frequent),
        "a random": mean_gold(
            lambda fact: rng.choice(ATTRIBUTES[fact[1]].values),
            lambda question: {name for name, share in TRAIT_SHARES.items() if rng.random() < share},
        ),
    }


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
