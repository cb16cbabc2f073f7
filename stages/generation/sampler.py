"""Sampling from a policy: the softmax at a temperature, true stop ids, nothing filtered unless what was kept is known
to those who score (filtering.py): repetition penalties, a suppressed EOS or a silent top-k bias the KL estimate.

Shapes: B rows (prompts), R response tokens, V vocabulary, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from stages.generation.kv_cache import PackedKVCache
from stages.generation.rollout import Rollout
from stages.modeling.load import autocast
from stages.modeling.packed.attention import NO_MASK
from stages.modeling.packed.forward import chunks_by_length, packed_hidden_states, use_packed_attention
from stages.modeling.packed.sequences import pack
from stages.modeling.packed.token_logprobs import logprobs_among


@contextmanager
def rollout_mode(model):
    """Dropout off for sampling; the model's mode is restored whatever happens."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def sample(model, prompts: list[list[int]], *, precision: str = "fp32", **how) -> Rollout:
    """One response to each prompt; how: as `steps` takes it. With `value_of` the rollout carries its numbers."""
    with autocast(precision):
        *_, record = generate_stepwise(model, prompts, **how)
    return record.rollout(prompts, with_numbers=how.get("value_of") is not None)


@torch.no_grad()
def generate_stepwise(
    model,
    prompts: list[list[int]],
    *,
    max_new_tokens: int | Sequence[int],
    temperature: float,
    stop_ids: Sequence[int],
    generator: torch.Generator,
    value_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
    top_k: int = 0,
    top_p: float = 1.0,
) -> Iterator["GenerationState"]:
    """Draw a response to each prompt, a token of every row a step; the one record of what was drawn, after each step.

    temperature: 0 is greedy. max_new_tokens: of every row, or of each. Each row takes one uniform number a step from
    `generator` (a CPU generator), so that a row's tokens do not depend on which other rows have ended; rows that have
    ended leave the batch. value_of: hidden states [B, D] to values [B]; with it log-probabilities, values and entropies
    are noted. top_k: 0 is none; top_p counts within it.
    Runs under the caller's autocast: one made here would still be on while the caller does other things between steps.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    where, head = next(model.parameters()).device, model.get_output_embeddings()
    with rollout_mode(model):
        growing, record = DecodeState(model, prompts), GenerationState(limits, stop_ids, where, top_k)
        while True:
            uniform = torch.rand(len(prompts), generator=generator, dtype=torch.float64)
            drawn = sample_token(head(growing.hidden).float(), temperature, uniform[record.rows].to(where), top_k, top_p)
            values = value_of(growing.hidden) if value_of else None
            staying = record.take(drawn, values)
            yield record
            if not len(record.rows):
                break
            tokens = drawn.tokens
            if staying is not None:
                tokens = tokens[staying]
                growing.keep(staying)
            growing.add(tokens)


class DecodeState:
    """Rows of token ids that grow under a model; `hidden` [B, D]: the states that tell each row's next token."""

    def __init__(self, model, rows: list[list[int]]):
        batch = pack(rows, next(model.parameters()).device)
        self.inner, self.cache = use_packed_attention(model), PackedKVCache(batch)
        ends = batch.starts + batch.lengths - 1
        self.hidden = packed_hidden_states(model, batch, ends, past_key_values=self.cache, use_cache=True)

    def add(self, tokens: torch.Tensor) -> None:
        """One token more in each row, [B]."""
        self.hidden = self.inner(
            input_ids=tokens[:, None], position_ids=self.cache.advance(), attention_mask=NO_MASK, batch=self.cache,
            past_key_values=self.cache, use_cache=True,
        ).last_hidden_state[:, -1]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these; `hidden` stays as it is until the next token."""
        self.cache.keep(rows)


class _Drawn(NamedTuple):
    """One step: tokens, log_p, entropy [B], and the ids [B, K] that were kept by a filter."""

    tokens: torch.Tensor
    log_p: torch.Tensor
    entropy: torch.Tensor
    kept: torch.Tensor | None


class GenerationState:
    """What was drawn, row by row; which rows are still in the batch.

    responses, done: of every row. numbers [3, B, most tokens]: log-probability, value, entropy of each token, where
    values are asked for. step: tokens drawn so far in rows that are not done.
    """

    DROP_SHARE = 8  # ended rows leave together, once they are this part of the batch: leaving copies keys and values

    def __init__(self, limits: list[int], stop_ids: Sequence[int], where: torch.device, top_k: int):
        self.limits, self.stop_ids = limits, set(stop_ids)
        self.rows = list(range(len(limits)))
        self.responses: list[list[int]] = [[] for _ in limits]
        self.done = [False] * len(limits)
        self.numbers = torch.zeros(3, len(limits), max(limits), device=where)
        self.kept = torch.full((len(limits), max(limits), top_k), -1, device=where) if top_k else None
        self.step = 0

    def take(self, drawn: _Drawn, values: torch.Tensor | None) -> torch.Tensor | None:
        """Note one step of the batch; places in it of the rows that stay, or None when all do."""
        tokens = drawn.tokens
        if values is not None:
            self.numbers[:, self.rows, self.step] = torch.stack([drawn.log_p, values.float(), drawn.entropy])
        if self.kept is not None:
            self.kept[self.rows, self.step, : drawn.kept.shape[1]] = drawn.kept
        self.step += 1
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            if not self.done[row]:
                self.responses[row].append(token)
                self.done[row] = token in self.stop_ids or len(self.responses[row]) == self.limits[row]
        alive = [place for place, row in enumerate(self.rows) if not self.done[row]]
        if alive and (len(self.rows) - len(alive)) * self.DROP_SHARE < len(self.rows):
            return None
        self.rows = [self.rows[place] for place in alive]
        return torch.tensor(alive, device=tokens.device)

    def rollout(self, prompts: list[list[int]], with_numbers: bool) -> Rollout:
        ended = [response[-1] in self.stop_ids for response in self.responses]
        if not with_numbers:
            return Rollout(prompts, self.responses, ended)
        columns = torch.arange(max(map(len, self.responses)), device=self.numbers.device)
        lengths = torch.tensor([len(response) for response in self.responses], device=self.numbers.device)
        inside = columns < lengths[:, None]
        kept = None if self.kept is None else self.kept[:, : len(columns)]
        return Rollout(prompts, self.responses, ended, *(self.numbers[:, :, : len(columns)] * inside), kept)


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


def sample_token(logits: torch.Tensor, temperature: float, uniform: torch.Tensor, top_k: int, top_p: float) -> _Drawn:
    """Draw from logits [B, V] by the inverse CDF.

    The sum over the vocabulary is kept in float64: in fp32 it rounds.
    """
    logits = logits if temperature in (0, 1) else logits / temperature
    scores = torch.log_softmax(logits, dim=-1)
    kept = allowed_token_ids(scores, top_k, top_p) if top_k else None
    scores = scores if kept is None else logprobs_among(scores, kept)
    shares = scores.exp()
    if temperature == 0:
        places = scores.argmax(-1, keepdim=True)
    else:
        cumulative = shares.cumsum(-1, dtype=torch.float64)
        places = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        places = places.clamp(max=scores.shape[-1] - 1)
    # 0 log 0 is 0: a logit of -inf has no part in the entropy
    entropy = -(shares * scores.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)
    tokens = places if kept is None else kept.gather(-1, places)
    return _Drawn(tokens.squeeze(-1), scores.gather(-1, places).squeeze(-1), entropy, kept)


def allowed_token_ids(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Ids [M, K] of the top_k likeliest tokens, by log-probabilities [M, V]; of these, -1 for what lies beyond the
    likeliest that together hold top_p of the k's probability (the first is always kept)."""
    likeliest = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    shares = likeliest.values.softmax(-1)
    before = shares.cumsum(-1) - shares
    return torch.where(before < top_p, likeliest.indices, -1)
