"""Rows of different lengths laid end to end: no layer computes pads. Only attention sees rows side by side.

Shapes: B rows, N all their tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

TOKENS_STEP = 64  # N is rounded up: a CPU compiles its products anew for every size it has not met
COLUMNS_STEP = 16


@dataclass(frozen=True)
class Ragged:
    """A batch of rows; what stands after `tokens` fills up to a round size and is never read.

    input_ids, positions: [1, N]. `gather` [B * columns] says which token stands in a row's column (token 0 beyond its
    end, which is `beyond`); `place` [N] is the way back. `starts`, `lengths` [B]: where each row begins, its tokens.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    rows: int
    columns: int
    tokens: int
    starts: torch.Tensor
    lengths: torch.Tensor
    gather: torch.Tensor
    beyond: torch.Tensor
    place: torch.Tensor


class Texts(NamedTuple):
    """Prompts with responses, laid end to end; M response tokens, R in the longest response.

    before: [M], where the token before each response token stands; chosen: [M], the response tokens; place: [M], where
    they stand in [B * R]; mask: [B, R], 1.0 at response tokens.
    """

    batch: Ragged
    before: torch.Tensor
    chosen: torch.Tensor
    place: torch.Tensor
    mask: torch.Tensor


def ragged(rows: list[list[int]], where: torch.device | None = None) -> Ragged:
    """Lay rows of token ids, none of them empty, end to end."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens, columns = int(lengths.sum()), _rounded(int(lengths.max()), COLUMNS_STEP)
    ends = lengths.cumsum(0)
    starts = ends - lengths
    filler = _rounded(tokens, TOKENS_STEP) - tokens
    row = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    positions = torch.arange(tokens) - starts[row]
    inside = torch.arange(columns) < lengths[:, None]
    gather = torch.where(inside, starts[:, None] + torch.arange(columns), 0)

    def filled(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, filler)).to(where)

    ids = torch.tensor([token for ids in rows for token in ids])
    return Ragged(
        input_ids=filled(ids)[None],
        positions=filled(positions)[None],
        rows=len(rows),
        columns=columns,
        tokens=tokens,
        starts=starts.to(where),
        lengths=lengths.to(where),
        gather=gather.flatten().to(where),
        beyond=(~inside).flatten().nonzero().squeeze(-1).to(where),
        place=filled(row * columns + positions),
    )


def response_tokens(prompts: list[list[int]], responses: list[list[int]], where: torch.device) -> Texts:
    """Lay prompts and responses end to end, with the places of the response tokens."""
    batch = ragged([prompt + response for prompt, response in zip(prompts, responses, strict=True)], where)
    lengths = torch.tensor([len(response) for response in responses], device=where)
    first = batch.starts + torch.tensor([len(prompt) - 1 for prompt in prompts], device=where)
    mask = torch.arange(max(map(len, responses)), device=where) < lengths[:, None]
    row, column = mask.nonzero(as_tuple=True)
    before = first[row] + column
    chosen = batch.input_ids[0, before + 1]
    return Texts(batch, before, chosen, row * mask.shape[1] + column, mask.float())


def by_row(values: torch.Tensor, texts: Texts) -> torch.Tensor:
    """[M] to [B, R]."""
    return values.new_zeros(texts.mask.numel()).index_copy(0, texts.place, values).view(texts.mask.shape)


def _rounded(count: int, step: int) -> int:
    return -(-count // step) * step
