"""Sample responses from a policy, token by token with a key-value cache.

Tokens are drawn from the whole softmax at a temperature and end at true stop ids: a filter that only the sampler
applies (repetition penalty, suppressed EOS, top-k) would bias ratios and KL estimates.

Shapes: B rows (prompts), R response tokens, V vocabulary, D hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import NamedTuple

import torch

from stages.distributed import group, sharding
from stages.distributed.units import own_units
from stages.generation.kv_cache import PackedKVCache
from stages.generation.rollout import Rollout
from stages.modeling.cpu_kernels.linear import packed_weights
from stages.modeling.load import autocast
from stages.modeling.output_layer import output_layer
from stages.modeling.packed.attention import NO_MASK
from stages.modeling.packed.forward import (
    chunk_by_length,
    packed_hidden_states,
    use_packed_attention,
    uses_cpu_kernels,
)
from stages.modeling.packed.sequences import distinct_rows, pack
from stages.modeling.packed.token_logprobs import entropy
from stages.modeling.torch_setup import allow_nondeterministic


class SampledTokens(NamedTuple):
    """The tokens of one step with their log-probabilities and entropies, all [B]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor


def sample_token(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> SampledTokens:
    """Sample one token per row from logits [B, V] by inverting the CDF at `uniform` [B].

    The cumulative sum over the vocabulary is in float64, since fp32 rounds it.
    """
    logits = logits if temperature in (0, 1) else logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    if temperature == 0:
        indices = logprobs.argmax(-1, keepdim=True)
    else:
        with allow_nondeterministic():  # of one row, a GPU's sums may differ in the last of 53 bits
            cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        indices = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        indices = indices.clamp(max=logprobs.shape[-1] - 1)
    return SampledTokens(indices.squeeze(-1), logprobs.gather(-1, indices).squeeze(-1),
                         entropy(probabilities, logprobs))


@contextmanager
def rollout_mode(model):
    """Turn dropout off while sampling, and restore the model's mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def sample(
    model, prompts: list[list[int]], *, generator: torch.Generator, units: int = 1, **options
) -> Rollout:
    """Sample one response per prompt; options: of `_sample_rows`. `value_fn` adds the statistics per token.

    The prompts are sampled in `units` parts of equal size, which the processes share. `generator` is not advanced.
    """
    limits, parts = options.pop("max_new_tokens"), []
    limits = [limits] * len(prompts) if isinstance(limits, int) else limits
    for rows in own_units(_slices(len(prompts), -(-len(prompts) // units))):
        numbers = torch.Generator().set_state(generator.get_state())  # all units draw from the same numbers
        parts.append(([*rows], _sample_rows(
            model, prompts[rows.start:rows.stop], max_new_tokens=limits[rows.start:rows.stop], generator=numbers,
            of_rows=(rows.start, len(prompts)), **options)))
    return _join_parts(prompts, parts, next(model.parameters()).device)


def sample_in_batches(
    model, prompts: list[list[int]], batch_prompts: int, seed: int,
    on_batch: Callable[[int], None] = lambda count: None, **options,
) -> Rollout:
    """Sample in batches of prompts of similar length, which the processes share; results in the order of `prompts`.

    on_batch is called after each batch of this process, with the number of prompts that all processes have then
    finished, if they are equally fast. Each batch has its own generator, seeded by its index: two models then get the
    same random numbers, however long their responses are.
    """
    parts = []
    chunks = list(chunk_by_length([len(prompt) for prompt in prompts], batch_prompts))
    own = own_units(enumerate(chunks))
    for finished, (index, rows) in enumerate(own):
        part = _sample_rows(model, [prompts[i] for i in rows],
                            generator=torch.Generator().manual_seed(seed * 1_000_003 + index), **options)
        parts.append((rows, part))
        on_batch(len(prompts) * (finished + 1) // len(own) - len(prompts) * finished // len(own))
    return _join_parts(prompts, parts, next(model.parameters()).device)


def _slices(count: int, size: int) -> Iterator[range]:
    return (range(first, min(first + size, count)) for first in range(0, count, size))


def _sample_rows(model, prompts: list[list[int]], *, precision: str = "fp32", **options) -> Rollout:
    """Sample one response per prompt in this process; options: of `generate_stepwise`."""
    with autocast(precision):
        *_, state = generate_stepwise(model, prompts, **options)
    return state.to_rollout(prompts, with_stats=options.get("value_fn") is not None)


def _join_parts(prompts: list[list[int]], parts: list[tuple[list[int], Rollout]], device: torch.device) -> Rollout:
    """Return the rollout of all prompts; parts: rows of this process's units with their rollouts."""
    sharding.join_other_passes()
    drawn = [(rows, part.responses, part.ended, part.logprobs is not None) for rows, part in parts]
    responses, ended, with_stats = [[]] * len(prompts), [False] * len(prompts), False
    for rows, unit_responses, unit_ended, has_stats in chain.from_iterable(group.gather(drawn)):
        with_stats |= has_stats
        for row, response, end in zip(rows, unit_responses, unit_ended, strict=True):
            responses[row], ended[row] = response, end
    if not with_stats:
        return Rollout(prompts, responses, ended)
    stats = torch.zeros(3, len(prompts), max(map(len, responses)), device=device)
    for rows, part in parts:
        stats[:, rows, : part.logprobs.shape[1]] = torch.stack([part.logprobs, part.values, part.entropy])
    return Rollout(prompts, responses, ended, *group.sum_tensor(stats))


@torch.no_grad()
def generate_stepwise(
    model, prompts: list[list[int]], *, max_new_tokens: int | Sequence[int], temperature: float,
    stop_ids: Sequence[int], generator: torch.Generator,
    value_fn: Callable[[torch.Tensor], torch.Tensor] | None = None, share_prefixes: bool = False,
    of_rows: tuple[int, int] | None = None,
) -> Iterator["GenerationState"]:
    """Sample a response per prompt, one token of every row per step; yield the same state after each step.

    Each row takes one uniform number per step from `generator`, so a row's tokens do not depend on which other rows
    have ended. Ended rows leave the batch. Runs under the caller's autocast: a context entered here would stay active
    in the caller between steps.

    Args:
        max_new_tokens: the limit of every row, or one per row.
        temperature: 0 is greedy. generator: on the CPU.
        value_fn: maps hidden states [B, D] to values [B]; if given, log-probabilities, values and entropies are stored.
        share_prefixes: compute rows that are equal so far once. For several samples of a prompt, above all at a low
            temperature; the tokens are the same, up to rounding.
        of_rows: (first, count): these rows begin at `first` of `count` rows that share the generator's numbers.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    first, count = of_rows or (0, len(prompts))
    device, head = next(model.parameters()).device, output_layer(model)
    with rollout_mode(model), packed_weights(model, enabled=uses_cpu_kernels(model)):
        decoder = (SharedPrefixState if share_prefixes else DecodeState)(model, prompts)
        state = GenerationState(limits, stop_ids, device)
        while True:
            uniform = torch.rand(count, generator=generator, dtype=torch.float64)
            uniform = uniform[first : first + len(prompts)][state.rows].to(device)
            drawn = sample_token(head(decoder.hidden).float(), temperature, uniform)
            remaining = state.append(drawn, value_fn(decoder.hidden) if value_fn else None)
            yield state
            if not len(state.rows):
                break
            tokens = drawn.tokens
            if remaining is not None:
                tokens = tokens[remaining]
                decoder.select_rows(remaining)
            decoder.step(tokens)


class DecodeState:
    """A model decoding rows of token ids; `hidden` [B, D] predicts the next token of each row."""

    def __init__(self, model, rows: list[list[int]]):
        batch = pack(rows, next(model.parameters()).device)
        self.backbone, self.cache = use_packed_attention(model), PackedKVCache(batch, uses_cpu_kernels(model))
        ends = batch.starts + batch.lengths - 1
        self.hidden = packed_hidden_states(model, batch, ends, past_key_values=self.cache, use_cache=True)

    def step(self, tokens: torch.Tensor) -> None:
        """Append one token [B] to each row."""
        self.hidden = self.backbone(
            input_ids=tokens[:, None], position_ids=self.cache.step(), attention_mask=NO_MASK, batch=self.cache,
            past_key_values=self.cache, use_cache=True,
        ).last_hidden_state[:, -1]

    def select_rows(self, rows: torch.Tensor) -> None:
        """Drop all other rows; `hidden` changes with the next step only."""
        self.cache.select_rows(rows)


class SharedPrefixState:
    """A model decoding rows of token ids, of which those that are equal so far are one row of the cache."""

    def __init__(self, model, rows: list[list[int]]):
        distinct, numbers = distinct_rows(rows)
        self.decoder = DecodeState(model, distinct)
        self.shared_rows = torch.tensor(numbers, device=self.decoder.hidden.device)

    @property
    def hidden(self) -> torch.Tensor:
        """Hidden states [B, D] of all rows."""
        return self.decoder.hidden[self.shared_rows]

    def step(self, tokens: torch.Tensor) -> None:
        """Append one token [B] to each row; shared rows whose tokens differ become several."""
        pairs, shared_rows = torch.stack([self.shared_rows, tokens]).unique(dim=1, return_inverse=True)
        parents, new_tokens = pairs
        if len(parents) != len(self.decoder.hidden) or (parents[1:] == parents[:-1]).any():
            self.decoder.select_rows(parents)
        self.decoder.step(new_tokens)
        self.shared_rows = shared_rows

    def select_rows(self, rows: torch.Tensor) -> None:
        """Drop all other rows; the next step drops what no row shares any more."""
        self.shared_rows = self.shared_rows[rows]


class GenerationState:
    """The responses of all rows so far, and which rows are still in the batch.

    rows: indices of those. steps: tokens drawn so far in rows that are not done. logprobs, values, entropy: of each
    token, [B, most tokens], written only if values are computed.
    """

    DROP_SHARE = 8  # rows leave once 1/8 of the batch has ended: dropping rows copies the keys and values of the rest

    def __init__(self, limits: list[int], stop_ids: Sequence[int], device: torch.device):
        self.limits, self.stop_ids = limits, set(stop_ids)
        self.rows = list(range(len(limits)))
        self.responses: list[list[int]] = [[] for _ in limits]
        self.done = [False] * len(limits)
        self._stats = torch.zeros(3, len(limits), max(limits), device=device)
        self.logprobs, self.values, self.entropy = self._stats
        self.steps = 0

    def append(self, drawn: SampledTokens, values: torch.Tensor | None) -> torch.Tensor | None:
        """Append one token to each row of the batch; return the batch's rows that remain, or None if all do."""
        if values is not None:
            with allow_nondeterministic():  # as in PackedKVCache.update
                self._stats[:, self.rows, self.steps] = torch.stack([drawn.logprobs, values.float(), drawn.entropy])
        self.steps += 1
        for row, token in zip(self.rows, drawn.tokens.tolist(), strict=True):
            if not self.done[row]:
                self.responses[row].append(token)
                self.done[row] = token in self.stop_ids or len(self.responses[row]) == self.limits[row]
        remaining = [i for i, row in enumerate(self.rows) if not self.done[row]]
        if remaining and (len(self.rows) - len(remaining)) * self.DROP_SHARE < len(self.rows):
            return None
        self.rows = [self.rows[i] for i in remaining]
        return torch.tensor(remaining, device=drawn.tokens.device)

    def to_rollout(self, prompts: list[list[int]], with_stats: bool) -> Rollout:
        ended = [response[-1] in self.stop_ids for response in self.responses]
        if not with_stats:
            return Rollout(prompts, self.responses, ended)
        columns = torch.arange(max(map(len, self.responses)), device=self._stats.device)
        lengths = torch.tensor([len(response) for response in self.responses], device=self._stats.device)
        inside = columns < lengths[:, None]
        return Rollout(prompts, self.responses, ended, *(self._stats[:, :, : len(columns)] * inside))
