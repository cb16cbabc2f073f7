"""Preference pairs as training examples, tokenised: each answer once, its pairs as indices; a split of the pairs.

With batching 'pair' an example is one pair. With 'question' it holds all pairs of a question, so that each answer is
forwarded once and all pairs of the question train in one step (InstructGPT, section 3.5).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from stages.stackexchange.pairs.table import first_question_keys, question_key, read_first_rows, read_pairs
from stages.stackexchange.prompt import answer_ids, prompt_ids

VALIDATION_QUESTIONS = 2000  # at most


@dataclass
class Example:
    """One question with some of its answers, as token ids."""

    question: tuple  # site, question id
    prompt: list[int]
    answers: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)  # indices of the better and the worse answer
    score_gaps: list[int] = field(default_factory=list)  # score of the better answer minus that of the worse
    answer_index: dict[str, int] = field(default_factory=dict)  # by the answer's text

    def add_pair(self, texts: tuple[str, str], answers: list[list[int]], score_gap: int) -> None:
        """Add a better and a worse answer; an answer that is there already is not added again."""
        for text, answer in zip(texts, answers, strict=True):
            if text not in self.answer_index:
                self.answer_index[text] = len(self.answers)
                self.answers.append(answer)
        self.pairs.append((self.answer_index[texts[0]], self.answer_index[texts[1]]))
        self.score_gaps.append(score_gap)


def build_examples(
    rows: Iterable[dict], tokenizer, *, max_length_tokens: int, by_question: bool, max_pairs: int
) -> tuple[list[Example], int]:
    """Build examples from rows of a pairs table, in their order; also count the pairs dropped as too long."""
    examples: list[Example] = []
    pairs = dropped = 0
    for row in rows:
        if pairs == max_pairs:
            break
        key, texts = question_key(row), (row["response_j"], row["response_k"])
        same_question = bool(examples) and examples[-1].question == key
        prompt = examples[-1].prompt if same_question else prompt_ids(tokenizer, row["question"])
        answers = [answer_ids(tokenizer, text) for text in texts]
        if len(prompt) + max(map(len, answers)) > max_length_tokens:
            dropped += 1
            continue
        if not (by_question and same_question):
            examples.append(Example(key, prompt))
        examples[-1].add_pair(texts, answers, row["score_j"] - row["score_k"])
        pairs += 1
    return examples, dropped


def collate_examples(items: list[Example]) -> dict:
    """Return the examples as they are, and count their pairs and each one's tokens."""
    return {"content": items, "items": sum(len(item.pairs) for item in items),
            "lengths": [len(item.prompt) + sum(map(len, item.answers)) for item in items]}


def pair_indices(items: list[Example]) -> tuple[list[int], list[int]]:
    """Index the better and the worse answer of each pair among the concatenated answers of all items."""
    better, worse, first = [], [], 0
    for item in items:
        better += [first + j for j, _ in item.pairs]
        worse += [first + k for _, k in item.pairs]
        first += len(item.answers)
    return better, worse


def select_reference_answers(
    items: list[Example], count: int, max_tokens: int, min_count: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Select the first answers that win a pair, with their prompts: their mean score becomes zero.

    At most `count` answers, and `max_tokens` tokens with their prompts; but `min_count` answers, however long.
    """
    winners = [(item.prompt, item.answers[j]) for item in items for j in sorted({j for j, _ in item.pairs})][:count]
    tokens = accumulate(len(prompt) + len(answer) for prompt, answer in winners)
    fitting = sum(number <= max_tokens for number in tokens)
    winners = winners[:max(fitting, min_count)]
    return [prompt for prompt, _ in winners], [answer for _, answer in winners]


class TooFewPairsError(ValueError):
    """A split has too few usable pairs to train on."""


class PairSplit:
    """A split of the pairs in the folder `pairs`, whose first questions are held out: the same ones for the same share.

    held_out: their (site, qid).
    """

    def __init__(self, pairs: Path, split: str, validation_share: float):
        self.pairs, self.split = pairs, split
        self.held_out = first_question_keys(pairs, split, validation_share, VALIDATION_QUESTIONS)

    def training_rows(self) -> Iterator[dict]:
        """Read the pairs to train on; each call reads them from the start."""
        return (row for row in read_pairs(self.pairs, self.split) if question_key(row) not in self.held_out)

    def validation_rows(self) -> Iterable[dict]:
        """Read the pairs of the held-out questions."""
        return read_first_rows(self.pairs, self.split, self.held_out)

    def training_examples(
        self, tokenizer, *, max_length_tokens: int, max_pairs: int, by_question: bool
    ) -> tuple[list[Example], int]:
        """Tokenise the pairs to train on, and count those dropped as too long.

        Raises TooFewPairsError if fewer than two questions are left.
        """
        examples, dropped = build_examples(self.training_rows(), tokenizer, max_length_tokens=max_length_tokens,
                                           by_question=by_question, max_pairs=max_pairs)
        if len({example.question for example in examples}) < 2:
            raise TooFewPairsError(f"{self.pairs} has hardly a usable pair in its {self.split} split ({dropped} are "
                                   f"over {max_length_tokens} tokens): there is nothing to learn from")
        return examples, dropped
