"""Read a split of the pairs to train on, without some questions that are held out to select the best checkpoint."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stages.reward_modeling.dataset import Example, build_examples
from stages.stackexchange.pairs.table import first_question_keys, question_key, read_first_rows, read_pairs

VALIDATION_QUESTIONS = 2000  # at most


class TooFewPairsError(ValueError):
    """A split has too few usable pairs to train on."""


@dataclass(frozen=True)
class PairSplit:
    """A split of the pairs in the folder `pairs`, and the (site, qid) of the questions that are held out."""

    pairs: Path
    split: str
    held_out: set[tuple]

    @classmethod
    def open(cls, pairs: Path, split: str, validation_share: float) -> "PairSplit":
        """Hold out the first questions of a split: the same ones for the same share."""
        return cls(pairs, split, first_question_keys(pairs, split, validation_share, VALIDATION_QUESTIONS))

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
