"""Decode token ids to text while they are generated, each piece of text with the log-ratio of its tokens.

A byte-level tokenizer may split a character over several tokens, and other tokenizers decode a token differently at the
start of a text. A piece is therefore as many tokens as it takes to end in a whole character, decoded after the piece
before it.
"""

from typing import NamedTuple

REPLACEMENT = "\ufffd"  # what an incomplete character decodes to
MAX_PIECE_TOKENS = 4  # bytes of a UTF-8 character: none is split over more tokens


class TextPiece(NamedTuple):
    """The text of some tokens, and the sum of their log-ratios in nats."""

    text: str
    log_ratio: float


class StreamingDecoder:
    """Decode one answer token by token; `pieces` holds the complete pieces."""

    def __init__(self, tokenizer):
        self.tokenizer, self.pieces = tokenizer, []
        self._previous: list[int] = []  # tokens of the last piece
        self._pending: list[int] = []
        self._log_ratios: list[float] = []  # of the pending tokens

    def add(self, token: int, log_ratio: float) -> None:
        """Append the answer's next token."""
        self._pending.append(token)
        self._log_ratios.append(log_ratio)
        text = self._decode_after_previous(self._pending)
        if not text.endswith(REPLACEMENT):
            self._emit(len(self._pending), text)
        elif len(self._pending) == MAX_PIECE_TOKENS:
            self._emit_invalid(text)

    def finish(self) -> None:
        """Emit the rest, without the start of a character that was cut off."""
        self._emit(len(self._pending), self._decode_after_previous(self._pending).rstrip(REPLACEMENT))

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    def _emit_invalid(self, text: str) -> None:
        """Emit the first tokens, whose bytes make no character; the last ones may be the start of another."""
        for count in range(1, MAX_PIECE_TOKENS):
            first = self._decode_after_previous(self._pending[:count])
            if first + self._decode_after_previous(self._pending[count:]) == text:
                return self._emit(count, first)
        return self._emit(MAX_PIECE_TOKENS, text)

    def _emit(self, count: int, text: str) -> None:
        if count:
            self.pieces.append(TextPiece(text, sum(self._log_ratios[:count])))
            self._previous, self._pending = self._pending[:count], self._pending[count:]
            self._log_ratios = self._log_ratios[count:]

    def _decode_after_previous(self, tokens: list[int]) -> str:
        return self._decode(self._previous + tokens)[len(self._decode(self._previous)):]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
