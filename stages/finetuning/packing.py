"""Pack documents into blocks of a fixed number of tokens, and compute the language-modelling loss of these.

Token ids stay on disk until a block is read. The loss is padding-free, with logits at labelled tokens only.

'wrapped' concatenates and cuts (StackLLaMA's ConstantLengthDataset): a block is one row, and attention crosses
documents. 'bfd' fits whole documents into blocks (best fit decreasing; Ding et al. 2024, arXiv 2404.10830): a block has
a row per document, and attention stays within each. No token is lost; documents longer than a block are cut.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from stages.finetuning.token_store import TokenizedDocuments
from stages.modeling import lora
from stages.modeling.load import autocast
from stages.modeling.packed import forward
from stages.modeling.packed.sequences import pack
from stages.modeling.packed.token_logprobs import logprobs_from_hidden


@dataclass(frozen=True)
class PackedRow:
    """A sequence for attention: token ids [T], and which of them are labels [T], never the first."""

    token_ids: np.ndarray
    is_label: np.ndarray


class PackedBlocks:
    """A map-style data set of blocks, each a list of rows.

    Args:
        order: document indices in the order to pack them in.
        answers_only: tokens of prompts are no labels.
    """

    def __init__(
        self, documents: TokenizedDocuments, order: np.ndarray, block_tokens: int, strategy: str, answers_only: bool
    ):
        self.documents, self.answers_only, self.row_per_document = documents, answers_only, strategy == "bfd"
        lengths = documents.lengths[order]
        if self.row_per_document:
            owner, starts, stops = _split_long(lengths, block_tokens)
            packed = best_fit_decreasing(stops - starts, block_tokens)
            self._pieces, self._ends = np.concatenate(packed or [np.zeros(0, int)]), np.cumsum([*map(len, packed)])
        else:
            owner, starts, stops, ends = _concatenate_and_cut(lengths, block_tokens)
            self._pieces, self._ends = np.arange(len(owner)), ends
        self._owner, self._starts, self._stops = order[owner], starts, stops

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, block: int) -> list[PackedRow]:
        first = self._ends[block - 1] if block else 0
        rows = [self._read(piece) for piece in self._pieces[first : self._ends[block]]]
        if not self.row_per_document:
            token_ids, is_label = zip(*((row.token_ids, row.is_label) for row in rows), strict=True)
            rows = [PackedRow(np.concatenate(token_ids), np.concatenate(is_label))]
        for row in rows:
            row.is_label[0] = False  # no token before it predicts it
        return rows

    def _read(self, piece: int) -> PackedRow:
        document, start, stop = int(self._owner[piece]), int(self._starts[piece]), int(self._stops[piece])
        is_label = np.ones(stop - start, bool)
        if self.answers_only:
            is_label[: max(0, int(self.documents.prompt_tokens[document]) - start)] = False
        return PackedRow(self.documents.tokens(document, start, stop), is_label)


def best_fit_decreasing(lengths: np.ndarray, block_tokens: int) -> list[list[int]]:
    """Assign pieces to blocks, longest first, each to the fullest block with room for it; return indices per block."""
    blocks: list[list[int]] = []
    blocks_by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of blocks_by_room, sorted
    for piece in np.argsort(-lengths, kind="stable"):
        length = int(lengths[piece])
        index = bisect_left(rooms, length)
        if index == len(rooms):
            blocks.append([])
            block, room = len(blocks) - 1, block_tokens
        else:
            room = rooms[index]
            block = blocks_by_room[room].pop()
            if not blocks_by_room[room]:
                del blocks_by_room[room], rooms[index]
        blocks[block].append(int(piece))
        if left := room - length:
            if left not in blocks_by_room:
                blocks_by_room[left] = []
                insort(rooms, left)
            blocks_by_room[left].append(block)
    return blocks


def _split_long(lengths: np.ndarray, block_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut documents into pieces no longer than a block; return each piece's owner, start and stop."""
    counts = -(-lengths // block_tokens)
    owner = np.repeat(np.arange(len(lengths)), counts)
    starts = block_tokens * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    return owner, starts, np.minimum(starts + block_tokens, lengths[owner])


def _concatenate_and_cut(lengths: np.ndarray, block_tokens: int) -> tuple[np.ndarray, ...]:
    """Cut concatenated documents at block boundaries; return each piece's owner, start and stop, and the number of
    pieces up to each block's end."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.union1d(ends, np.append(np.arange(block_tokens, total, block_tokens), total))
    firsts = np.concatenate([[0], cuts[:-1]])
    owner = np.searchsorted(ends, firsts, side="right")
    document_starts = (ends - lengths)[owner]
    last = np.flatnonzero((cuts % block_tokens == 0) | (cuts == total))
    return owner, firsts - document_starts, cuts - document_starts, last + 1


def collate_blocks(blocks: Iterable[list[PackedRow]]) -> dict:
    """Join the rows of all blocks, and count their labels."""
    rows = [row for block in blocks for row in block]
    return {"content": rows, "items": sum(int(row.is_label.sum()) for row in rows)}


def summed_lm_loss(model, rows: list[PackedRow], precision: str) -> torch.Tensor:
    """Sum the negative log-probabilities of all labelled tokens, in nats, as fp32."""
    model = lora.unwrap_peft(model)
    batch = pack([row.token_ids.tolist() for row in rows], model.device)
    columns = [np.flatnonzero(row.is_label) for row in rows]
    starts = torch.repeat_interleave(batch.starts, torch.tensor([*map(len, columns)], device=model.device))
    labels = starts + torch.from_numpy(np.concatenate(columns)).to(model.device)
    with autocast(precision):
        hidden = forward.packed_hidden_states(model, batch, labels - 1)
        return -logprobs_from_hidden(model, hidden, batch.input_ids[0, labels]).sum()
