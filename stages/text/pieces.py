"""Token ids to pieces of text as they come, each with its number: what is shown while an answer is being written.

A byte-level tokenizer may split a character over tokens, and another decodes a token differently at a text's start. A
piece is therefore as many tokens as it takes to end in a whole character, decoded behind the piece before it.
"""

from typing import NamedTuple

BROKEN = "\ufffd"  # what an unfinished character decodes to
MOST_TOKENS = 4  # bytes of a character in UTF-8: what is broken after as many tokens stays broken


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
        self._log_ratio = 0.0

    def add(self, token: int, log_ratio: float) -> None:
        """Take in the answer's next token."""
        self._waiting.append(token)
        self._log_ratio += log_ratio
        text = self._text()
        if not text.endswith(BROKEN) or len(self._waiting) >= MOST_TOKENS:
            self._take(text)

    def finish(self) -> None:
        """The answer is over: the beginning of a character whose rest does not come is left out."""
        if self._waiting:
            self._take(self._text().rstrip(BROKEN))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.done)

    def _take(self, text: str) -> None:
        self.done.append(Piece(text, self._log_ratio))
        self._before, self._waiting, self._log_ratio = self._waiting, [], 0.0

    def _text(self) -> str:
        return self._decoded(self._before + self._waiting)[len(self._decoded(self._before)):]

    def _decoded(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
