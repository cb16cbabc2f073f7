"""Answers to one question in one batch: the question's tokens are computed once, and every answer attends to them.

Laid end to end (ragged.py) a question stands before all its answers; only attention puts it before each of them, so
that linear layers, three quarters of the work, meet its tokens once. Scores and gradients are those of separate texts.
Shapes: N tokens, H heads, W width of a head, B answers.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from stages.modeling.packed.sequences import (
    SIDE_BY_SIDE,
    LengthBucket,
    PackedBatch,
    PackedResponses,
    RowIndex,
    like_lengths,
    pack_texts,
    rounded,
    rounded_columns,
)


@dataclass(frozen=True)
class SharedPrefixBucket(LengthBucket):
    """Rows that may have tokens in common: each token is read from all its rows, and written from its first one.

    own [tokens]: the tokens that are written from here; seen: the tokens that stand here, and seen_place, where; each
    as often as it stands in a row.
    """

    own: torch.Tensor
    seen: torch.Tensor
    seen_place: torch.Tensor

    wide = LengthBucket.gathered

    def put(self, values: torch.Tensor, wide: torch.Tensor) -> None:
        values.index_copy_(0, self.own, self.beside(wide).index_select(0, self.place))

    def add(self, values: torch.Tensor, wide: torch.Tensor) -> None:
        """What was found for a token in each of its rows, summed into `values`."""
        values.index_add_(0, self.seen, self.beside(wide).index_select(0, self.seen_place))


def pack_with_shared_prefix(prompts: list[list[int]], answers: list[list[list[int]]], where: torch.device) -> PackedResponses:
    """Each prompt once, then its answers, end to end; rows are the answers, in the order given."""
    pieces = [piece for prompt, own in zip(prompts, answers, strict=True) for piece in (prompt, *own)]
    ends = [0, *accumulate(map(len, pieces))]
    begins, tokens, place = ends[:-1], ends[-1], 0
    rows, positions = [], []  # a row: its question's first token, tokens of the question, first token, tokens
    for prompt, own in zip(prompts, answers, strict=True):
        positions.append(np.arange(len(prompt)))
        for number, answer in enumerate(own, start=1):
            rows.append((begins[place], len(prompt), begins[place + number], len(answer)))
            positions.append(len(prompt) + np.arange(len(answer)))
        place += 1 + len(own)
    size = rounded(tokens)
    batch = PackedBatch(
        input_ids=_filled(np.concatenate([*map(np.asarray, pieces)]), size, where),
        positions=_filled(np.concatenate(positions), size, where),
        tokens=tokens,
        starts=torch.tensor([row[0] for row in rows], device=where),
        lengths=torch.tensor([row[1] + row[3] for row in rows], device=where),
        parts=_parts(rows, where),
        order=_order(rows),
        shares=True,
    )
    question, length, first, own = (torch.tensor(column, device=where) for column in zip(*rows, strict=True))
    return pack_texts(batch, first, question + length - 1, own.tolist())


def _filled(values: np.ndarray, size: int, where: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.pad(values, (0, size - len(values)))).to(where)[None]


def _order(rows: list[tuple]) -> RowIndex:
    """The rows of a question stand together: it is a query in the first of them."""
    pieces = [np.arange(begin, begin + count) for row in rows for begin, count in (row[:2], row[2:])]
    starts = [0, *accumulate(row[1] + row[3] for row in rows)]
    before = [None, *(row[0] for row in rows[:-1])]
    firsts = [row[1] if row[0] == one else 0 for row, one in zip(rows, before, strict=True)]
    return RowIndex(torch.from_numpy(np.concatenate(pieces)), torch.tensor(starts), torch.tensor(firsts))


def _parts(rows: list[tuple], where: torch.device) -> list[SharedPrefixBucket]:
    rows = sorted(rows, key=lambda row: row[1] + row[3])
    written: set[int] = set()
    spans = like_lengths([row[1] + row[3] for row in rows], SIDE_BY_SIDE[where.type])
    return [_part(rows[span], written, where) for span in spans]


def _part(rows: list[tuple], written: set[int], where: torch.device) -> SharedPrefixBucket:
    """written: first tokens of the questions that a row before has in charge."""
    columns = rounded_columns(max(row[1] + row[3] for row in rows))
    gather = np.zeros((len(rows), columns), int)
    inside, charge = np.zeros(gather.shape, bool), np.zeros(gather.shape, bool)
    for row, (question, length, first, own) in enumerate(rows):
        gather[row, :length] = question + np.arange(length)
        gather[row, length : length + own] = first + np.arange(own)
        inside[row, : length + own] = True
        charge[row, 0 if question not in written else length : length + own] = True
        written.add(question)
    place, seen = np.flatnonzero(charge), np.flatnonzero(inside)
    flat = gather.reshape(-1)
    return SharedPrefixBucket(
        first=0,
        tokens=len(place),
        rows=len(rows),
        columns=columns,
        gather=torch.from_numpy(flat).to(where),
        place=torch.from_numpy(place).to(where),
        inside=torch.from_numpy(charge[:, None, :, None].astype(np.float32)).to(where),
        own=torch.from_numpy(flat[place]).to(where),
        seen=torch.from_numpy(flat[seen]).to(where),
        seen_place=torch.from_numpy(seen).to(where),
    )
