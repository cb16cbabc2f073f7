"""Packed (variable-length) batches: rows of tokens are concatenated, so that no layer but attention computes padding.

Attention alone pads: it works on one `LengthBucket` of rows at a time. On a GPU, in bf16, it does not (varlen.py).

Shapes: B rows, N tokens of all rows, M response tokens, H heads, W width of a head.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from stages.modeling.packed.varlen import VarlenIndex, index_rows

COLUMNS_STEP = 16  # sizes are rounded up: oneDNN compiles a product for every new size
STEPS_PER_OCTAVE = 32
# Attention scores per head in one bucket. On a CPU, as many as its cache holds (a fifth less time for attention).
BUCKET_SCORES = {"cpu": 1 << 15, "cuda": 1 << 62}


@dataclass(frozen=True)
class LengthBucket:
    """Rows of similar length, to be padded to one length for attention.

    A token that several rows share is a key in all of them, and a query in the first one. gather_index [num_rows *
    num_columns]: the token in each column of each row, and an arbitrary one beyond the row's end. query_positions [Q]:
    positions in the batch of the tokens that are queries here, and query_index [Q], where these are in the padded rows.
    key_positions, key_index: those of all tokens of all rows, with repetition; None if no token is shared. mask
    [num_rows, 1, num_columns, 1]: 1.0 at queries, else 0.0. Consecutive positions are a slice, which copies nothing.
    """

    num_rows: int
    num_columns: int
    gather_index: torch.Tensor | slice
    query_positions: torch.Tensor | slice
    query_index: torch.Tensor | slice
    key_positions: torch.Tensor | None
    key_index: torch.Tensor | None
    mask: torch.Tensor

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Pad [N, H, W] to [num_rows * H, num_columns, W]."""
        padded = _select(values, self.gather_index).unflatten(0, (self.num_rows, self.num_columns))
        padded = padded.transpose(1, 2).flatten(0, 1)
        return padded.contiguous() if isinstance(self.gather_index, slice) else padded

    def write(self, values: torch.Tensor, padded: torch.Tensor) -> None:
        """Write the results of the bucket's queries, padded, into `values` [N, H, W]."""
        values[self.query_positions] = _select(self._flatten_columns(padded), self.query_index)

    def add_gradients(self, values: torch.Tensor, padded: torch.Tensor) -> None:
        """Write each token's gradient into `values` [N, H, W]; add it, of a token that several rows may share."""
        if self.key_positions is None:
            self.write(values, padded)
        else:
            values.index_add_(0, self.key_positions, self._flatten_columns(padded).index_select(0, self.key_index))

    def _flatten_columns(self, padded: torch.Tensor) -> torch.Tensor:
        """Rearrange [num_rows * H, num_columns, W] to [num_rows * num_columns, H, W]."""
        return padded.unflatten(0, (self.num_rows, -1)).transpose(1, 2).flatten(0, 1)


def _select(values: torch.Tensor, index: torch.Tensor | slice) -> torch.Tensor:
    return values[index] if isinstance(index, slice) else values.index_select(0, index)


class RowSpans(NamedTuple):
    """A row as spans of the packed batch: a prefix, which other rows may share, and the rest; first positions."""

    prefix: int
    prefix_tokens: int
    rest: int
    rest_tokens: int

    @property
    def tokens(self) -> int:
        """Return the number of the row's tokens."""
        return self.prefix_tokens + self.rest_tokens


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

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate values [N, ...]: 0 in the filler, and everywhere if the rows of a token are summed."""
        if self.shares_prefixes:
            return like.new_zeros(like.shape)
        out = like.new_empty(like.shape)
        out[self.num_tokens :] = 0
        return out

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
    token_ids, position_ids, spans = [], [], {}
    for row in sorted(range(len(rows)), key=lambda row: len(rows[row])):
        spans[row] = RowSpans(len(token_ids), 0, len(token_ids), len(rows[row]))
        token_ids += rows[row]
        position_ids += range(len(rows[row]))
    longest = max(map(len, rows))
    size = round_up_tokens(len(token_ids) - longest + round_up_columns(longest))  # room for the last row's columns
    return build_batch(token_ids, position_ids, [spans[row] for row in range(len(rows))], size,
                       torch.device("cpu") if device is None else device, shares_prefixes=False)


def build_batch(token_ids: list[int], position_ids: list[int], rows: list[RowSpans], size: int, device: torch.device,
                shares_prefixes: bool) -> PackedBatch:
    """Build a batch of `size` tokens, with filler; rows: in the caller's order."""
    def fill(values: list[int]) -> torch.Tensor:
        return torch.tensor(values + [0] * (size - len(values))).to(device)[None]

    in_order = sorted(rows, key=lambda row: row.rest)
    by_length = sorted(in_order, key=lambda row: row.tokens)
    repeated = _count_repeated(by_length)
    return PackedBatch(
        input_ids=fill(token_ids),
        position_ids=fill(position_ids),
        num_tokens=len(token_ids),
        starts=torch.tensor([row.prefix for row in rows], device=device),
        lengths=torch.tensor([row.tokens for row in rows], device=device),
        buckets=[_bucket(by_length[span], repeated[span], device, shares_prefixes)
                 for span in split_by_length([row.tokens for row in by_length], BUCKET_SCORES[device.type])],
        row_index=_row_index(in_order),
        shares_prefixes=shares_prefixes,
    )


def _count_repeated(rows: list[RowSpans]) -> list[int]:
    """Return how many of each row's first tokens are queries in an earlier one of these rows."""
    seen, counts = set(), []
    for row in rows:
        counts.append(row.prefix_tokens if row.prefix in seen else 0)
        seen.add(row.prefix)
    return counts


def _row_index(rows: list[RowSpans]) -> RowIndex:
    tokens = np.concatenate([np.arange(first, first + count) for row in rows for first, count in (row[:2], row[2:])])
    starts = [0, *accumulate(row.tokens for row in rows)]
    return RowIndex(torch.from_numpy(tokens), torch.tensor(starts), torch.tensor(_count_repeated(rows)))


def split_by_length(lengths: list[int], max_scores: int) -> list[slice]:
    """Split rows sorted by length into spans of at least one row and, padded, at most `max_scores` attention scores."""
    spans, first = [], 0
    for row, length in enumerate(lengths):
        if row > first and (row + 1 - first) * round_up_columns(length) ** 2 > max_scores:
            spans.append(slice(first, row))
            first = row
    return [*spans, slice(first, len(lengths))]


def _bucket(rows: list[RowSpans], repeated: list[int], device: torch.device, shares_prefixes: bool) -> LengthBucket:
    """Build one bucket; repeated: how many of each row's first tokens are queries in an earlier row."""
    column = np.arange(round_up_columns(rows[-1].tokens))
    prefix, prefix_tokens, rest, rest_tokens = np.array(rows).T[..., None]
    is_key = column < prefix_tokens + rest_tokens
    is_query = is_key & (column >= np.array(repeated)[:, None])
    positions = np.where(column < prefix_tokens, prefix + column, rest + column - prefix_tokens)
    positions = np.where(is_key, positions, 0).reshape(-1)
    queries, keys = np.flatnonzero(is_query), np.flatnonzero(is_key)
    first, count = rows[0].rest, len(queries)
    is_one_span = not shares_prefixes and len(rows) == 1

    def index(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return LengthBucket(
        num_rows=len(rows),
        num_columns=len(column),
        gather_index=slice(first, first + len(column)) if is_one_span else index(positions),
        query_positions=index(positions[queries]) if shares_prefixes else slice(first, first + count),
        query_index=slice(count) if is_one_span else index(queries),
        key_positions=index(positions[keys]) if shares_prefixes else None,
        key_index=index(keys) if shares_prefixes else None,
        mask=index(is_query[:, None, :, None].astype(np.float32)),
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
