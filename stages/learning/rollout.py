"""Sampling from a policy: plain softmax at a temperature, true EOS, nothing filtered, so that the scored distribution
is the sampled one (top-k, top-p, repetition penalties or a suppressed EOS bias the KL estimate below 0).

Shapes: B rows (prompts), P longest prompt, V vocabulary.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import DynamicCache

from stages.learning.models import autocast, batched, chunks_by_length, positions


@dataclass(frozen=True)
class Rollout:
    """Responses as sampled: token ids with the EOS that ended them, if one did."""

    prompts: list[list[int]]
    responses: list[list[int]]
    ended: list[bool]

    def texts(self, tokenizer) -> list[str]:
        return tokenizer.batch_decode(self.responses, skip_special_tokens=True)

    def numbers(self) -> dict[str, float]:
        """Mean length, share that ended, share of distinct responses."""
        count = len(self.responses)
        return {
            "response_tokens": sum(map(len, self.responses)) / count,
            "eos_rate": sum(self.ended) / count,
            "distinct_responses": len({tuple(response) for response in self.responses}) / count,
        }


@contextmanager
def rollout_mode(model):
    """Dropout off for sampling; the model's mode is restored whatever happens."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def sample(
    model,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    eos_id: int,
    generator: torch.Generator,
    precision: str = "fp32",
) -> Rollout:
    """One response to each prompt; temperature 0 is greedy.

    Each row takes one uniform number a step from `generator` (a CPU generator), so that a row's tokens do not depend on
    which other rows have ended; rows that have ended leave the batch.
    """
    where = next(model.parameters()).device
    responses: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    input_ids, keep_mask = batched(prompts, side="left", where=where)
    step_ids, cache, place = input_ids, DynamicCache(), positions(keep_mask)
    with rollout_mode(model):
        for _ in range(max_new_tokens):
            uniform = torch.rand(len(prompts), generator=generator, dtype=torch.float64)
            with autocast(precision):
                logits = model(
                    input_ids=step_ids,
                    attention_mask=keep_mask,
                    position_ids=place,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                ).logits[:, -1]
            chosen = _choose(logits.float(), temperature, uniform[rows].to(where))
            for row, token in zip(rows, chosen.tolist(), strict=True):
                responses[row].append(token)
            alive = (chosen != eos_id).nonzero().squeeze(-1)
            if not len(alive):
                break
            if len(alive) < len(rows):
                rows, chosen, keep_mask, place = (
                    [rows[i] for i in alive.tolist()],
                    chosen[alive],
                    keep_mask[alive],
                    place[alive],
                )
                cache.batch_select_indices(alive)
            step_ids, place = chosen[:, None], place[:, -1:] + 1
            keep_mask = torch.cat([keep_mask, keep_mask.new_ones(len(rows), 1)], dim=1)
    return Rollout(prompts, responses, [response[-1] == eos_id for response in responses])


def sample_in_batches(
    model,
    prompts: list[list[int]],
    batch_prompts: int,
    seed: int,
    advance: Callable[[int], None] = lambda count: None,
    **settings,
) -> Rollout:
    """`sample` in batches of prompts of like length, results in the order given; `advance` counts prompts done.

    Each batch has a generator of its own, seeded by its place: two models then meet the same random numbers, however
    long either one's answers are.
    """
    responses: list = [None] * len(prompts)
    ended: list = [None] * len(prompts)
    for place, chunk in enumerate(chunks_by_length([len(prompt) for prompt in prompts], batch_prompts)):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + place)
        part = sample(model, [prompts[i] for i in chunk], generator=generator, **settings)
        for i, response, end in zip(chunk, part.responses, part.ended, strict=True):
            responses[i], ended[i] = response, end
        advance(len(chunk))
    return Rollout(prompts, responses, ended)


def _choose(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF sampling [B, V] -> [B]; float64, since a cumulative sum over a large vocabulary rounds."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.double() / temperature, dim=-1).cumsum(-1)
    return (
        torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:])
        .squeeze(-1)
        .clamp(max=logits.shape[-1] - 1)
    )
