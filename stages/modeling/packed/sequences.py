"""Rows of different lengths laid end to end: no layer computes pads. Only attention sees rows side by side.

Shapes: B rows, N all their tokens, H heads, W width of a head.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch

COLUMNS_STEP = 16  # sizes are rounded up: a CPU compiles its products anew for every size it has not met
STEPS_AN_OCTAVE = 32
# Scores a head of rows that are side by side. On a CPU what stays in its cache (attention takes a fifth less time), and
# still so many short rows that calls do not outweigh the work.
SIDE_BY_SIDE = {"cpu": 1 << 15, "cuda": 1 << 62}


@dataclass(frozen=True)
class LengthBucket:
    """Rows of like length, side by side: `tokens` tokens from `first` on, and `columns` columns for each row.

    gather [rows * columns]: the token in a row's column, and any token beyond the row's end; place [tokens]: the way
    back; inside [rows, 1, columns, 1]: 1.0 within a row, 0.0 beyond its end.
    """

    first: int
    tokens: int
    rows: int
    columns: int
    gather: torch.Tensor
    place: torch.Tensor
    inside: torch.Tensor

    @property
    def span(self) -> slice:
        """Of its tokens in the batch."""
        return slice(self.first, self.first + self.tokens)

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        """[N, H, W] to [rows * H, columns, W]."""
        if self.rows == 1:
            return values[self.first : self.first + self.columns].transpose(0, 1).contiguous()
        return self.gathered(values)

    def gathered(self, values: torch.Tensor) -> torch.Tensor:
        """As `wide`, wherever the rows' tokens stand."""
        found = values.index_select(0, self.gather).view(self.rows, self.columns, *values.shape[1:])
        return found.transpose(1, 2).flatten(0, 1)

    def narrow(self, wide: torch.Tensor) -> torch.Tensor:
        """[rows * H, columns, W] to [tokens, H, W], the part's tokens end to end."""
        if self.rows == 1:
            return wide.transpose(0, 1)[: self.tokens]
        return self.beside(wide).index_select(0, self.place)

    def beside(self, wide: torch.Tensor) -> torch.Tensor:
        """[rows * H, columns, W] to [rows * columns, H, W]."""
        return wide.unflatten(0, (self.rows, -1)).transpose(1, 2).flatten(0, 1)

    def put(self, values: torch.Tensor, wide: torch.Tensor) -> None:
        """Write what was found for the part's tokens into `values` [N, H, W]."""
        values[self.span] = self.narrow(wide)

    add = put  # a token stands in one row: what comes from there is all


class RowIndex(NamedTuple):
    """Where each row's tokens stand in the batch, on the CPU: those of row r are tokens[starts[r] : starts[r + 1]].

    firsts [B]: how many of a row's tokens, at its beginning, stand in an earlier row as well.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    firsts: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """A batch of rows, the shortest first; what stands after `tokens` fills up to a round size and is never read.

    input_ids, positions: [1, N]. starts, lengths: [B], where each row begins and its tokens, in the order given.
    shares: a token may stand in several rows (branching.py).
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    tokens: int
    starts: torch.Tensor
    lengths: torch.Tensor
    parts: list[LengthBucket]
    order: RowIndex
    shares: bool = False


class PackedResponses(NamedTuple):
    """Prompts with responses, laid end to end; M response tokens, R in the longest response.

    own: [M], where each response token stands; before: [M], where the token before it does; chosen: [M], the response
    tokens; place: [M], where they stand in [B * R]; mask: [B, R], 1.0 at response tokens; last: [B], where each row
    ends.
    """

    batch: PackedBatch
    own: torch.Tensor
    before: torch.Tensor
    chosen: torch.Tensor
    place: torch.Tensor
    mask: torch.Tensor
    last: torch.Tensor


def pack(rows: list[list[int]], where: torch.device | None = None) -> PackedBatch:
    """Lay rows of token ids, none of them empty, end to end."""
    where = torch.device("cpu") if where is None else where
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    lengths = [len(rows[row]) for row in order]
    firsts = [0, *accumulate(lengths)]
    tokens = firsts.pop()
    size = rounded(firsts[-1] + rounded_columns(lengths[-1]))  # the last row's columns lie within

    def filled(values: list[int]) -> torch.Tensor:
        return torch.tensor(values + [0] * (size - tokens)).to(where)[None]

    starts = torch.empty(len(rows), dtype=torch.long)
    starts[torch.tensor(order)] = torch.tensor(firsts)
    return PackedBatch(
        input_ids=filled([token for row in order for token in rows[row]]),
        positions=filled([position for length in lengths for position in range(length)]),
        tokens=tokens,
        starts=starts.to(where),
        lengths=torch.tensor([len(row) for row in rows], device=where),
        parts=[_part(firsts[rows], lengths[rows], where) for rows in like_lengths(lengths, SIDE_BY_SIDE[where.type])],
        order=RowIndex(torch.arange(tokens), torch.tensor([*firsts, tokens]), torch.zeros(len(rows), dtype=torch.long)),
    )


def like_lengths(lengths: list[int], scores: int) -> list[slice]:
    """Neighbours among rows sorted by length, as many as keep their scores together within `scores`, at least one."""
    parts, first = [], 0
    for row, length in enumerate(lengths):
        if row > first and (row + 1 - first) * rounded_columns(length) ** 2 > scores:
            parts.append(slice(first, row))
            first = row
    return [*parts, slice(first, len(lengths))]


def _part(firsts: list[int], lengths: list[int], where: torch.device) -> LengthBucket:
    first, lengths_ = torch.tensor(firsts)[:, None], torch.tensor(lengths)[:, None]
    column = torch.arange(rounded_columns(lengths[-1]))
    inside = column < lengths_
    return LengthBucket(
        first=firsts[0],
        tokens=sum(lengths),
        rows=len(lengths),
        columns=len(column),
        gather=torch.where(inside, first + column, firsts[0]).flatten().to(where),
        place=inside.flatten().nonzero().squeeze(-1).to(where),
        inside=inside[:, None, :, None].float().to(where),
    )


def pack_responses(prompts: list[list[int]], responses: list[list[int]], where: torch.device) -> PackedResponses:
    """Lay prompts and responses end to end, with the places of the response tokens."""
    batch = pack([prompt + response for prompt, response in zip(prompts, responses, strict=True)], where)
    first = batch.starts + torch.tensor([len(prompt) for prompt in prompts], device=where)
    return pack_texts(batch, first, first - 1, [len(response) for response in responses])


def pack_texts(batch: PackedBatch, first: torch.Tensor, before_first: torch.Tensor, lengths: list[int]) -> PackedResponses:
    """Responses of `lengths` tokens that stand from `first` [B] on, each after the token `before_first` [B]."""
    where = batch.input_ids.device
    mask = torch.arange(max(lengths), device=where) < torch.tensor(lengths, device=where)[:, None]
    row, column = mask.nonzero(as_tuple=True)
    own = first[row] + column
    before = torch.where(column == 0, before_first[row], own - 1)
    last = first + torch.tensor(lengths, device=where) - 1
    return PackedResponses(batch, own, before, batch.input_ids[0, own], row * mask.shape[1] + column, mask.float(), last)


def by_row(values: torch.Tensor, texts: PackedResponses) -> torch.Tensor:
    """[M] to [B, R]."""
    return values.new_zeros(texts.mask.numel()).index_copy(0, texts.place, values).view(texts.mask.shape)


def rounded_columns(columns: int) -> int:
    return -(-columns // COLUMNS_STEP) * COLUMNS_STEP


def rounded(count: int) -> int:
    """Up to a multiple of a 32nd of its octave, at least of 16: few sizes, and few of them in vain."""
    step = max(COLUMNS_STEP, (1 << (count - 1).bit_length()) // (2 * STEPS_AN_OCTAVE))
    return -(-count // step) * step
