"""Packed (variable-length) batches: rows of tokens are concatenated, so that no layer but attention computes padding.

Attention alone pads: it works on one `LengthBucket` of rows at a time. On a GPU, in bf16, it does not (varlen.py).

Shapes: B rows, N tokens of all rows, M response tokens, H heads, W width of a head.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from stages.modeling.packed.varlen import VarlenIndex, index_rows

COLUMNS_STEP = 16  # sizes are rounded up: oneDNN compiles a product for every new size
STEPS_PER_OCTAVE = 32
# Attention scores per head in one bucket. On a CPU, as many as its cache holds (a fifth less time for attention).
BUCKET_SCORES = {"cpu": 1 << 15, "cuda": 1 << 62}


@dataclass(frozen=True)
class LengthBucket:
    """Rows of similar length, to be padded to one length for attention.

    Its `num_tokens` tokens begin at `start` in the batch. gather_index [num_rows * num_columns]: the token in each
    column of each row, and an arbitrary one beyond the row's end. unpad_index [num_tokens]: the inverse. mask
    [num_rows, 1, num_columns, 1]: 1.0 within a row, 0.0 beyond its end.
    """

    start: int
    num_tokens: int
    num_rows: int
    num_columns: int
    gather_index: torch.Tensor
    unpad_index: torch.Tensor
    mask: torch.Tensor

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Pad [N, H, W] to [num_rows * H, num_columns, W]."""
        if self.num_rows == 1:
            return values[self.start : self.start + self.num_columns].transpose(0, 1).contiguous()
        return self.gather(values)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Pad like `pad`, for rows whose tokens are not contiguous in the batch."""
        padded = values.index_select(0, self.gather_index).view(self.num_rows, self.num_columns, *values.shape[1:])
        return padded.transpose(1, 2).flatten(0, 1)

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """Concatenate the rows of [num_rows * H, num_columns, W] to [num_tokens, H, W]."""
        if self.num_rows == 1:
            return padded.transpose(0, 1)[: self.num_tokens]
        return self.flatten_columns(padded).index_select(0, self.unpad_index)

    def flatten_columns(self, padded: torch.Tensor) -> torch.Tensor:
        """Rearrange [num_rows * H, num_columns, W] to [num_rows * num_columns, H, W]."""
        return padded.unflatten(0, (self.num_rows, -1)).transpose(1, 2).flatten(0, 1)

    def write(self, values: torch.Tensor, padded: torch.Tensor) -> None:
        """Write the bucket's padded results into `values` [N, H, W]."""
        values[self.start : self.start + self.num_tokens] = self.unpad(padded)

    add_gradients = write  # a token is in one row only: there is nothing to sum


class RowIndex(NamedTuple):
    """Tokens of each row as positions in the batch, on the CPU: row r is tokens[starts[r] : starts[r + 1]].

    first_queries [B]: how many of a row's first tokens are computed in an earlier row, and are only keys in this one.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    first_queries: torch.Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Concatenated rows, the shortest first, filled up to a round size; the filler is never read.

    input_ids, position_ids: [1, N]. num_tokens: without the filler. starts, lengths: [B], each row's first position
    and length, in the caller's order. shares_prefixes: a token may be in several rows (shared_prefix.py).
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    num_tokens: int
    starts: torch.Tensor
    lengths: torch.Tensor
    buckets: list[LengthBucket]
    row_index: RowIndex
    shares_prefixes: bool = False

    @cached_property
    def varlen_index(self) -> VarlenIndex:
        """Index the rows as torch's varlen kernel takes them, on the batch's device; built once for all layers."""
        return index_rows(*self.row_index, self.input_ids.device)


class PackedResponses(NamedTuple):
    """A packed batch of prompts with their responses, of which the longest has R tokens.

    positions [M]: of each response token in the batch. predictor_positions [M]: of the token before it. token_ids [M]:
    the response tokens. scatter_index [M]: their positions in the flat [B * R]. mask [B, R]: 1.0 at response tokens.
    last_positions [B]: of each row's last token in the batch.
    """

    batch: PackedBatch
    positions: torch.Tensor
    predictor_positions: torch.Tensor
    token_ids: torch.Tensor
    scatter_index: torch.Tensor
    mask: torch.Tensor
    last_positions: torch.Tensor


def distinct_rows(rows: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Return the rows without repetitions, in the order of their first, and the number of each row among them."""
    numbers = {row: number for number, row in enumerate(dict.fromkeys(map(tuple, rows)))}
    return [list(row) for row in numbers], [numbers[tuple(row)] for row in rows]


def pack(rows: list[list[int]], device: torch.device | None = None) -> PackedBatch:
    """Concatenate rows of token ids, none of them empty, into one batch."""
    device = torch.device("cpu") if device is None else device
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    lengths = [len(rows[row]) for row in order]
    firsts = [0, *accumulate(lengths)]
    num_tokens = firsts.pop()
    size = round_up_tokens(firsts[-1] + round_up_columns(lengths[-1]))  # room for the last row's columns

    def fill(values: list[int]) -> torch.Tensor:
        return torch.tensor(values + [0] * (size - num_tokens)).to(device)[None]

    starts = torch.empty(len(rows), dtype=torch.long)
    starts[torch.tensor(order)] = torch.tensor(firsts)
    spans = split_by_length(lengths, BUCKET_SCORES[device.type])
    no_shared_tokens = torch.zeros(len(rows), dtype=torch.long)
    return PackedBatch(
        input_ids=fill([token for row in order for token in rows[row]]),
        position_ids=fill([position for length in lengths for position in range(length)]),
        num_tokens=num_tokens,
        starts=starts.to(device),
        lengths=torch.tensor([len(row) for row in rows], device=device),
        buckets=[_bucket(firsts[span], lengths[span], device) for span in spans],
        row_index=RowIndex(torch.arange(num_tokens), torch.tensor([*firsts, num_tokens]), no_shared_tokens),
    )


def split_by_length(lengths: list[int], max_scores: int) -> list[slice]:
    """Split rows sorted by length into spans of at least one row and, padded, at most `max_scores` attention scores."""
    spans, first = [], 0
    for row, length in enumerate(lengths):
        if row > first and (row + 1 - first) * round_up_columns(length) ** 2 > max_scores:
            spans.append(slice(first, row))
            first = row
    return [*spans, slice(first, len(lengths))]


def _bucket(firsts: list[int], lengths: list[int], device: torch.device) -> LengthBucket:
    column = torch.arange(round_up_columns(lengths[-1]))
    inside = column < torch.tensor(lengths)[:, None]
    return LengthBucket(
        start=firsts[0],
        num_tokens=sum(lengths),
        num_rows=len(lengths),
        num_columns=len(column),
        gather_index=torch.where(inside, torch.tensor(firsts)[:, None] + column, firsts[0]).flatten().to(device),
        unpad_index=inside.flatten().nonzero().squeeze(-1).to(device),
        mask=inside[:, None, :, None].float().to(device),
    )


def pack_responses(prompts: list[list[int]], responses: list[list[int]], device: torch.device) -> PackedResponses:
    """Pack each prompt with its response, and index the response tokens."""
    batch = pack([prompt + response for prompt, response in zip(prompts, responses, strict=True)], device)
    first = batch.starts + torch.tensor([len(prompt) for prompt in prompts], device=device)
    return index_responses(batch, first, first - 1, [len(response) for response in responses])


def index_responses(
    batch: PackedBatch, first: torch.Tensor, prompt_end: torch.Tensor, lengths: list[int]
) -> PackedResponses:
    """Index responses of `lengths` tokens that begin at `first` [B] and follow the prompt token at `prompt_end` [B]."""
    device = batch.input_ids.device
    mask = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
    row, column = mask.nonzero(as_tuple=True)
    positions = first[row] + column
    return PackedResponses(
        batch=batch,
        positions=positions,
        predictor_positions=torch.where(column == 0, prompt_end[row], positions - 1),
        token_ids=batch.input_ids[0, positions],
        scatter_index=row * mask.shape[1] + column,
        mask=mask.float(),
        last_positions=first + torch.tensor(lengths, device=device) - 1,
    )


def scatter_to_rows(values: torch.Tensor, packed: PackedResponses) -> torch.Tensor:
    """Pad values of the response tokens, [M] to [B, R]."""
    return values.new_zeros(packed.mask.numel()).index_copy(0, packed.scatter_index, values).view(packed.mask.shape)


def round_up_columns(columns: int) -> int:
    """Round up to a multiple of COLUMNS_STEP."""
    return -(-columns // COLUMNS_STEP) * COLUMNS_STEP


def round_up_tokens(count: int) -> int:
    """Round up to a multiple of 1/32 of the octave, and of 16: few different sizes, little filler."""
    step = max(COLUMNS_STEP, (1 << (count - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return -(-count // step) * step
