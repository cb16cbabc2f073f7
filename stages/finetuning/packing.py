"""Documents to blocks of a given size: which piece of which document stands where. No token moves before it is read.

'wrapped' concatenates and cuts (ConstantLengthDataset of StackLLaMA): a block is one row, and attention crosses
documents. 'bfd' fits whole documents into blocks (best fit decreasing; Ding et al. 2024, arXiv 2404.10830): a block is
a row for each document, and none sees another. Both lose no token; a document longer than a block is cut into pieces.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from stages.finetuning.token_store import Documents


@dataclass(frozen=True)
class Row:
    """What attends to itself: token ids [T], and which of them are to be predicted [T]; never the first."""

    ids: np.ndarray
    learnt: np.ndarray


class Blocks:
    """A map-style data set: a block's number to its rows.

    order: documents in the order to pack them in; answers_only: no label within prompts.
    """

    def __init__(self, documents: Documents, order: np.ndarray, block_tokens: int, strategy: str, answers_only: bool):
        self.documents, self.answers_only, self.apart = documents, answers_only, strategy == "bfd"
        lengths = documents.lengths[order]
        if self.apart:
            owner, starts, stops = _pieces(lengths, block_tokens)
            packed = best_fit(stops - starts, block_tokens)
            self._pieces, self._ends = np.concatenate(packed or [np.zeros(0, int)]), np.cumsum([*map(len, packed)])
        else:
            owner, starts, stops, ends = _cut(lengths, block_tokens)
            self._pieces, self._ends = np.arange(len(owner)), ends
        self._owner, self._starts, self._stops = order[owner], starts, stops

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, block: int) -> list[Row]:
        first = self._ends[block - 1] if block else 0
        pieces = [self._piece(piece) for piece in self._pieces[first : self._ends[block]]]
        if not self.apart:
            ids, learnt = zip(*((piece.ids, piece.learnt) for piece in pieces), strict=True)
            pieces = [Row(np.concatenate(ids), np.concatenate(learnt))]
        for row in pieces:
            row.learnt[0] = False  # nothing stands before it to predict it
        return pieces

    def _piece(self, piece: int) -> Row:
        document, start, stop = int(self._owner[piece]), int(self._starts[piece]), int(self._stops[piece])
        learnt = np.ones(stop - start, bool)
        if self.answers_only:
            learnt[: max(0, int(self.documents.prompt_tokens[document]) - start)] = False
        return Row(self.documents.tokens(document, start, stop), learnt)


def best_fit(lengths: np.ndarray, block_tokens: int) -> list[list[int]]:
    """Numbers of the pieces in each block: longest first, each into the fullest block that still holds it."""
    blocks: list[list[int]] = []
    open_blocks: dict[int, list[int]] = {}  # room left to the blocks that have just so much
    rooms: list[int] = []  # that occur, in order
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            blocks.append([])
            block, room = len(blocks) - 1, block_tokens
        else:
            room = rooms[place]
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                del open_blocks[room], rooms[place]
        blocks[block].append(int(piece))
        if left := room - length:
            if left not in open_blocks:
                open_blocks[left] = []
                insort(rooms, left)
            open_blocks[left].append(block)
    return blocks


def _pieces(lengths: np.ndarray, block_tokens: int) -> tuple[np.ndarray, ...]:
    """Owner, start and stop of the pieces of documents, none longer than a block."""
    counts = -(-lengths // block_tokens)
    owner = np.repeat(np.arange(len(lengths)), counts)
    starts = block_tokens * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    return owner, starts, np.minimum(starts + block_tokens, lengths[owner])


def _cut(lengths: np.ndarray, block_tokens: int) -> tuple[np.ndarray, ...]:
    """Owner, start and stop of the pieces of concatenated documents, and after how many pieces each block ends."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.append(np.arange(block_tokens, total, block_tokens), total))
    firsts = np.concatenate([[0], cuts[:-1]])
    owner = np.searchsorted(ends, firsts, side="right")
    begins = (ends - lengths)[owner]
    last = np.flatnonzero((cuts % block_tokens == 0) | (cuts == total))
    return owner, firsts - begins, cuts - begins, last + 1
