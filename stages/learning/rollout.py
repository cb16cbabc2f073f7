"""Sampling from a policy: the softmax at a temperature, true stop ids, nothing filtered, so that the distribution that
is scored is the one that was sampled (top-k, top-p, repetition penalties or a suppressed EOS bias the KL estimate).

Shapes: B rows (prompts), R response tokens, V vocabulary, D width.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from stages.learning.attention import NO_MASK
from stages.learning.key_values import KeyValues
from stages.learning.models import attended, autocast, chunks_by_length, ragged_states
from stages.learning.ragged import ragged


@dataclass(frozen=True)
class Rollout:
    """Responses as sampled: token ids with the stop id that ended them, if one did.

    log_p, values, entropy: of each sampled token, [B, R] fp32, 0 after a response's end; None unless asked for.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    ended: list[bool]
    log_p: torch.Tensor | None = None
    values: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

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
    max_new_tokens: int | Sequence[int],
    temperature: float,
    stop_ids: Sequence[int],
    generator: torch.Generator,
    precision: str = "fp32",
    value_of: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Rollout:
    """One response to each prompt; temperature 0 is greedy. max_new_tokens: of every row, or of each.

    Each row takes one uniform number a step from `generator` (a CPU generator), so that a row's tokens do not depend on
    which other rows have ended; rows that have ended leave the batch. value_of: hidden states [B, D] to values [B]; with
    it the rollout carries log-probabilities, values and entropies.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    where, head = next(model.parameters()).device, model.get_output_embeddings()
    batch = ragged(prompts, where)
    cache, record = KeyValues(batch), _Record(limits, stop_ids, where)
    with rollout_mode(model), autocast(precision):
        hidden = ragged_states(model, batch, past_key_values=cache, use_cache=True)[batch.starts + batch.lengths - 1]
        while True:
            uniform = torch.rand(len(prompts), generator=generator, dtype=torch.float64)
            drawn = _draw(head(hidden).float(), temperature, uniform[record.rows].to(where))
            values = value_of(hidden) if value_of else None
            kept = record.take(*drawn, values)
            if not len(record.rows):
                break
            tokens = drawn[0]
            if kept is not None:
                tokens = tokens[kept]
                cache.keep(kept)
            hidden = attended(model)(
                input_ids=tokens[:, None], position_ids=cache.advance(), attention_mask=NO_MASK, batch=cache,
                past_key_values=cache, use_cache=True,
            ).last_hidden_state[:, -1]
    return record.rollout(prompts, with_numbers=value_of is not None)


class _Record:
    """What was drawn, row by row; which rows are still in the batch."""

    DROP_SHARE = 8  # ended rows leave together, once they are this part of the batch: leaving copies keys and values

    def __init__(self, limits: list[int], stop_ids: Sequence[int], where: torch.device):
        self.limits, self.stop_ids = limits, set(stop_ids)
        self.rows = list(range(len(limits)))
        self.responses: list[list[int]] = [[] for _ in limits]
        self.done = [False] * len(limits)
        self.numbers = torch.zeros(3, len(limits), max(limits), device=where)
        self.step = 0

    def take(self, tokens, log_p, entropy, values) -> torch.Tensor | None:
        """Note one step of the batch; places in it of the rows that stay, or None when all do."""
        if values is not None:
            self.numbers[:, self.rows, self.step] = torch.stack([log_p, values.float(), entropy])
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
        return Rollout(prompts, self.responses, ended, *(self.numbers[:, :, : len(columns)] * inside))


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


def _draw(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tokens [B], their log-probabilities and the distributions' entropies, from logits [B, V], by the inverse CDF.

    The sum over the vocabulary is kept in float64: in fp32 it rounds.
    """
    logits = logits if temperature in (0, 1) else logits / temperature
    scores = torch.log_softmax(logits, dim=-1)
    shares = scores.exp()
    if temperature == 0:
        tokens = logits.argmax(-1)
    else:
        cumulative = shares.cumsum(-1, dtype=torch.float64)
        tokens = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True).squeeze(-1)
        tokens = tokens.clamp(max=logits.shape[-1] - 1)
    # 0 log 0 is 0: a logit of -inf has no part in the entropy
    entropy = -(shares * scores.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)
    return tokens, scores.gather(-1, tokens[:, None]).squeeze(-1), entropy
