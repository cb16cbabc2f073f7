"""Token ids to pieces of text as they come, each with its number: what is shown while an answer is being written.

A byte-level tokenizer may split a character over tokens, and another decodes a token differently at a text's start. A
piece is therefore as many tokens as it takes to end in a whole character, decoded behind the piece before it.
"""

from typing import NamedTuple

BROKEN = "\ufffd"  # what an unfinished character decodes to
MOST_TOKENS = 4  # bytes of a character in UTF-8: no character is split over more


class Piece(NamedTuple):
    """Some tokens' text, and the sum of their log-ratios in nats."""

    text: str
    log_ratio: float


class Pieces:
    """Of one answer, token by token; `done` is what is whole."""

    def __init__(self, tokenizer):
        self.tokenizer, self.done = tokenizer, []
        self._before: list[int] = []  # tokens of the last piece
        self._waiting: list[int] = []
        self._log_ratios: list[float] = []  # of those that wait

    def add(self, token: int, log_ratio: float) -> None:
        """Take in the answer's next token."""
        self._waiting.append(token)
        self._log_ratios.append(log_ratio)
        text = self._text(self._waiting)
        if not text.endswith(BROKEN):
            self._take(len(self._waiting), text)
        elif len(self._waiting) == MOST_TOKENS:
            self._take_broken(text)

    def finish(self) -> None:
        """The answer is over: the beginning of a character whose rest does not come is left out."""
        self._take(len(self._waiting), self._text(self._waiting).rstrip(BROKEN))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.done)

    def _take_broken(self, text: str) -> None:
        """The first token's bytes make no character; the last ones may be the beginning of another."""
        for count in range(1, MOST_TOKENS):
            first = self._text(self._waiting[:count])
            if first + self._text(self._waiting[count:]) == text:
                return self._take(count, first)
        return self._take(MOST_TOKENS, text)

    def _take(self, count: int, text: str) -> None:
        if count:
            self.done.append(Piece(text, sum(self._log_ratios[:count])))
            self._before, self._waiting = self._waiting[:count], self._waiting[count:]
            self._log_ratios = self._log_ratios[count:]

    def _text(self, tokens: list[int]) -> str:
        return self._decoded(self._before + tokens)[len(self._decoded(self._before)):]

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
