"""Packed batches in which answers to one question share its tokens: the question is computed once.

In the packed batch a question precedes all its answers, and each answer attends to it. Linear layers, three quarters
of the work, process its tokens once. Scores and gradients equal those of separate sequences.

Shapes: N tokens, H heads, W width of a head, B answers.
"""

from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from stages.modeling.packed.sequences import (
    BUCKET_SCORES,
    LengthBucket,
    PackedBatch,
    PackedResponses,
    RowIndex,
    index_responses,
    pack_responses,
    round_up_columns,
    round_up_tokens,
    split_by_length,
)


@dataclass(frozen=True)
class SharedPrefixBucket(LengthBucket):
    """Rows that may share tokens: a shared token is a key in all its rows, and a query in the first one.

    query_positions [num_tokens]: positions in the batch of the tokens that are queries here. key_positions: those of
    all tokens of all rows, with repetition, and key_index, where these are in the padded rows.
    """

    query_positions: torch.Tensor
    key_positions: torch.Tensor
    key_index: torch.Tensor

    pad = LengthBucket.gather

    def write(self, values: torch.Tensor, padded: torch.Tensor) -> None:
        values.index_copy_(0, self.query_positions, self.unpad(padded))

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        return self.flatten_columns(padded).index_select(0, self.unpad_index)

    def add_gradients(self, values: torch.Tensor, padded: torch.Tensor) -> None:
        """Add each token's gradients, summed over its rows, to `values`."""
        values.index_add_(0, self.key_positions, self.flatten_columns(padded).index_select(0, self.key_index))


@dataclass(frozen=True)
class _Row:
    """A question and one of its answers, as spans of the packed batch."""

    question: int
    question_tokens: int
    answer: int
    answer_tokens: int

    @property
    def tokens(self) -> int:
        return self.question_tokens + self.answer_tokens

    def positions(self) -> np.ndarray:
        """Return the positions of the row's tokens in the batch."""
        return np.concatenate([self.question + np.arange(self.question_tokens),
                               self.answer + np.arange(self.answer_tokens)])


def pack_with_shared_prefix(
    prompts: list[list[int]], answers: list[list[list[int]]], device: torch.device
) -> PackedResponses:
    """Pack each prompt once, followed by its answers; a row of the batch is a prompt with one answer, in that order."""
    token_ids, position_ids, rows = [], [], []
    for prompt, own_answers in zip(prompts, answers, strict=True):
        question = len(token_ids)
        token_ids += prompt
        position_ids += range(len(prompt))
        for answer in own_answers:
            rows.append(_Row(question, len(prompt), len(token_ids), len(answer)))
            token_ids += answer
            position_ids += range(len(prompt), len(prompt) + len(answer))
    size = round_up_tokens(len(token_ids))

    def fill(values: list[int]) -> torch.Tensor:
        return torch.tensor(values + [0] * (size - len(values))).to(device)[None]

    batch = PackedBatch(
        input_ids=fill(token_ids),
        position_ids=fill(position_ids),
        num_tokens=len(token_ids),
        starts=torch.tensor([row.question for row in rows], device=device),
        lengths=torch.tensor([row.tokens for row in rows], device=device),
        buckets=_buckets(rows, device),
        row_index=_row_index(rows),
        shares_prefixes=True,
    )
    first = torch.tensor([row.answer for row in rows], device=device)
    prompt_end = torch.tensor([row.question + row.question_tokens - 1 for row in rows], device=device)
    return index_responses(batch, first, prompt_end, [row.answer_tokens for row in rows])


def pack_rows(
    prompts: list[list[int]], responses: list[list[int]], device: torch.device, share_prompts: bool
) -> PackedResponses:
    """Pack each prompt with its response.

    share_prompts: a prompt that comes several times is packed once, which changes the rounding of its rows. A method
    with one response per prompt does without: that a prompt comes twice would be chance.
    """
    return (pack_with_repeated_prompts if share_prompts else pack_responses)(prompts, responses, device)


def row_lengths(prompts: list[list[int]], responses: list[list[int]], share_prompts: bool) -> list[int]:
    """Return the tokens of each row, by which batches are formed; share_prompts: of the longest with its prompt."""
    if share_prompts:
        return longest_rows_by_prompt(prompts, responses)
    return [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]


def pack_with_repeated_prompts(
    prompts: list[list[int]], responses: list[list[int]], device: torch.device
) -> PackedResponses:
    """Pack each prompt with its response, as `pack_responses`; a prompt that comes several times is packed once."""
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    if len(rows_of) == len(prompts):
        return pack_responses(prompts, responses, device)
    groups = list(rows_of.values())
    packed = pack_with_shared_prefix(
        [prompts[rows[0]] for rows in groups], [[responses[row] for row in rows] for rows in groups], device)
    return _reorder_rows(packed, torch.tensor([row for rows in groups for row in rows], device=device))


def _reorder_rows(packed: PackedResponses, rows: torch.Tensor) -> PackedResponses:
    """Number the rows anew: `rows` [B] has the new number of each."""
    row, column = packed.scatter_index // packed.mask.shape[1], packed.scatter_index % packed.mask.shape[1]
    old, batch = rows.argsort(), packed.batch
    return packed._replace(
        batch=replace(batch, starts=batch.starts[old], lengths=batch.lengths[old]),
        scatter_index=rows[row] * packed.mask.shape[1] + column, mask=packed.mask[old],
        last_positions=packed.last_positions[old])


def longest_rows_by_prompt(prompts: list[list[int]], responses: list[list[int]]) -> list[int]:
    """Return, for each row, the tokens of the longest row with its prompt: sorted by it, such rows stay together."""
    longest: dict[tuple[int, ...], int] = {}
    keys = list(map(tuple, prompts))
    for key, response in zip(keys, responses, strict=True):
        longest[key] = max(longest.get(key, 0), len(key) + len(response))
    return [longest[key] for key in keys]


def _row_index(rows: list[_Row]) -> RowIndex:
    """Index the rows in the given order: a question's rows are neighbours, and its tokens are queries in the first."""
    starts = [0, *accumulate(row.tokens for row in rows)]
    previous = [None, *(row.question for row in rows[:-1])]
    first_queries = [row.question_tokens if row.question == q else 0 for row, q in zip(rows, previous, strict=True)]
    tokens = np.concatenate([row.positions() for row in rows])
    return RowIndex(torch.from_numpy(tokens), torch.tensor(starts), torch.tensor(first_queries))


def _buckets(rows: list[_Row], device: torch.device) -> list[SharedPrefixBucket]:
    rows = sorted(rows, key=lambda row: row.tokens)
    computed: set[int] = set()
    spans = split_by_length([row.tokens for row in rows], BUCKET_SCORES[device.type])
    return [_bucket(rows[span], computed, device) for span in spans]


def _bucket(rows: list[_Row], computed: set[int], device: torch.device) -> SharedPrefixBucket:
    """Build one bucket; `computed` holds the questions whose tokens are queries in an earlier row, and is extended."""
    columns = round_up_columns(max(row.tokens for row in rows))
    gather = np.zeros((len(rows), columns), int)
    is_key, is_query = np.zeros(gather.shape, bool), np.zeros(gather.shape, bool)
    for number, row in enumerate(rows):
        gather[number, : row.tokens] = row.positions()
        is_key[number, : row.tokens] = True
        is_query[number, row.question_tokens if row.question in computed else 0 : row.tokens] = True
        computed.add(row.question)
    queries, keys, flat = np.flatnonzero(is_query), np.flatnonzero(is_key), gather.reshape(-1)
    return SharedPrefixBucket(
        start=0,
        num_tokens=len(queries),
        num_rows=len(rows),
        num_columns=columns,
        gather_index=torch.from_numpy(flat).to(device),
        unpad_index=torch.from_numpy(queries).to(device),
        mask=torch.from_numpy(is_query[:, None, :, None].astype(np.float32)).to(device),
        query_positions=torch.from_numpy(flat[queries]).to(device),
        key_positions=torch.from_numpy(flat[keys]).to(device),
        key_index=torch.from_numpy(keys).to(device),
    )
