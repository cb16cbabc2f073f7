"""Packed batches in which answers to one question share its tokens: the question is computed once.

In the packed batch a question precedes all its answers, and each answer attends to it. Linear layers, three quarters
of the work, process its tokens once. Scores and gradients equal those of separate sequences.

Shapes: B rows, each a prompt with one answer.
"""

from dataclasses import replace

import torch

from stages.modeling.packed.sequences import (
    PackedResponses,
    RowSpans,
    build_batch,
    index_responses,
    pack_responses,
    round_up_tokens,
)


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
            rows.append(RowSpans(question, len(prompt), len(token_ids), len(answer)))
            token_ids += answer
            position_ids += range(len(prompt), len(prompt) + len(answer))
    batch = build_batch(token_ids, position_ids, rows, round_up_tokens(len(token_ids)), device, shares_prefixes=True)
    first = torch.tensor([row.rest for row in rows], device=device)
    prompt_end = torch.tensor([row.prefix + row.prefix_tokens - 1 for row in rows], device=device)
    return index_responses(batch, first, prompt_end, [row.rest_tokens for row in rows])


def pack_rows(
    prompts: list[list[int]], responses: list[list[int]], device: torch.device, share_prompts: bool
) -> PackedResponses:
    """Pack each prompt with its response.

    share_prompts: a prompt that comes several times is packed once, which changes the rounding of its rows. A method
    with one response per prompt does without: that a prompt comes twice would be chance.
    """
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows_of.setdefault(tuple(prompt), []).append(row)
    if not share_prompts or len(rows_of) == len(prompts):
        return pack_responses(prompts, responses, device)
    groups = list(rows_of.values())
    packed = pack_with_shared_prefix(
        [prompts[rows[0]] for rows in groups], [[responses[row] for row in rows] for rows in groups], device)
    return _reorder_rows(packed, torch.tensor([row for rows in groups for row in rows], device=device))


def row_lengths(prompts: list[list[int]], responses: list[list[int]], share_prompts: bool) -> list[int]:
    """Return the tokens of each row, by which batches are formed.

    share_prompts: those of the longest row with its prompt; sorted by these, such rows stay together.
    """
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    if not share_prompts:
        return lengths
    longest: dict[tuple[int, ...], int] = {}
    for prompt, length in zip(map(tuple, prompts), lengths, strict=True):
        longest[prompt] = max(longest.get(prompt, 0), length)
    return [longest[tuple(prompt)] for prompt in prompts]


def _reorder_rows(packed: PackedResponses, rows: torch.Tensor) -> PackedResponses:
    """Number the rows anew: `rows` [B] has the new number of each."""
    row, column = packed.scatter_index // packed.mask.shape[1], packed.scatter_index % packed.mask.shape[1]
    old, batch = rows.argsort(), packed.batch
    return packed._replace(
        batch=replace(batch, starts=batch.starts[old], lengths=batch.lengths[old]),
        scatter_index=rows[row] * packed.mask.shape[1] + column, mask=packed.mask[old],
        last_positions=packed.last_positions[old])
