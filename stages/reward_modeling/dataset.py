"""Preference pairs as training examples: each answer once, its pairs as indices.

An example is one question with some of its answers (token ids, each forwarded once) and the pairs (better, worse) among
them. 'pair' batching makes one example a pair; 'question' gathers all pairs of a question, so that each of its answers
is forwarded once and all its pairs train in one step (InstructGPT, section 3.5).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from stages.stackexchange.pairs.table import key_of
from stages.stackexchange.prompt import answer_ids, prompt_ids


@dataclass
class Example:
    """One question, answers to it, pairs of them (index of the better, index of the worse) and their score gaps.

    given: what is in each answer's score already, which the head learns beside; none: 0.
    """

    question: tuple  # site, question id
    prompt: list[int]
    answers: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    gaps: list[int] = field(default_factory=list)
    places: dict[str, int] = field(default_factory=dict)  # answer's text to its index
    given: list[float] = field(default_factory=list)

    def add_pair(self, texts: tuple[str, str], answers: list[list[int]], gap: int) -> None:
        """A better and a worse answer; one that stands here already is not added again."""
        for text, answer in zip(texts, answers, strict=True):
            if text not in self.places:
                self.places[text] = len(self.answers)
                self.answers.append(answer)
        self.pairs.append((self.places[texts[0]], self.places[texts[1]]))
        self.gaps.append(gap)


def examples(
    rows: Iterable[dict], tokenizer, *, max_length_tokens: int, by_question: bool, max_pairs: int
) -> tuple[list[Example], int]:
    """Rows of a pairs table to examples, in their order; and how many pairs were dropped as over-long."""
    made: list[Example] = []
    kept = dropped = 0
    for row in rows:
        if kept == max_pairs:
            break
        key, texts = key_of(row), (row["response_j"], row["response_k"])
        same = bool(made) and made[-1].question == key
        prompt = made[-1].prompt if same else prompt_ids(tokenizer, row["question"])
        answers = [answer_ids(tokenizer, text) for text in texts]
        if len(prompt) + max(map(len, answers)) > max_length_tokens:
            dropped += 1
            continue
        if not (by_question and same):
            made.append(Example(key, prompt))
        made[-1].add_pair(texts, answers, row["score_j"] - row["score_k"])
        kept += 1
    return made, dropped


def collate_examples(items: list[Example]) -> dict:
    """Examples as they are, and the number of pairs in them."""
    return {"content": items, "items": sum(len(item.pairs) for item in items)}


def pair_indices(items: list[Example]) -> tuple[list[int], list[int]]:
    """Of each pair, the better and the worse answer's number among all the answers of the items, in order."""
    better, worse, first = [], [], 0
    for item in items:
        better += [first + j for j, _ in item.pairs]
        worse += [first + k for _, k in item.pairs]
        first += len(item.answers)
    return better, worse


def reference_answers(items: list[Example], count: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers of the first `count` that win a pair: what a reward's zero is set by."""
    winners = [(item.prompt, item.answers[j]) for item in items for j in sorted({j for j, _ in item.pairs})][:count]
    return [prompt for prompt, _ in winners], [answer for _, answer in winners]
