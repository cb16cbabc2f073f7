"""Decode with a static cache, each step captured in a CUDA graph on a GPU; on a CPU the same steps run without one.

The interface is that of sampler.DecodeState. Rows that leave the batch still take part in the steps, until half of the
rows have left: so there are few numbers of rows, each with a graph. Rows with equal prompts compute them once, and are
rows of their own from then on.

Shapes: B rows of the batch, D hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from stages.generation.cuda_graphs import StepGraphs
from stages.generation.static_cache import StaticKVCache
from stages.modeling.families import check_length
from stages.modeling.packed.attention import NO_MASK
from stages.modeling.packed.forward import packed_hidden_states, use_packed_attention
from stages.modeling.packed.sequences import distinct_rows, pack

SMALLEST_BUCKET = 8  # rows: below it a step takes the time of reading the weights, whatever their number
COLUMNS_STEP = 128  # sizes are rounded up: a batch of slightly longer prompts uses the same buffers and graphs


class StaticDecoders:
    """The static decoder of a model, and its graphs, for as many batches as fit it; a larger one takes its place.

    For one call of the sampler, in which neither weights nor adapters change.
    """

    def __init__(self):
        self._decoder: StaticDecodeState | None = None

    def start(
        self, model, prompts: list[list[int]], max_new_tokens: int, share_prefixes: bool
    ) -> "StaticDecodeState":
        """Compute the prompts; return the decoder for their next tokens, at most `max_new_tokens` of each row."""
        longest = max(map(len, prompts)) + max_new_tokens - 1  # the last token is not decoded any further
        check_length(use_packed_attention(model).config, longest)
        if self._decoder is None or not self._decoder.fits(len(prompts), longest):
            self._decoder = None  # to free its buffers first
            self._decoder = StaticDecodeState(model, len(prompts), -(-longest // COLUMNS_STEP) * COLUMNS_STEP)
        self._decoder.start(prompts, share_prefixes)
        return self._decoder


class StaticDecodeState:
    """A model decoding rows of token ids; `hidden` [B, D] predicts the next token of each row."""

    def __init__(self, model, max_rows: int, columns: int):
        self.model, self.backbone = model, use_packed_attention(model)
        device = next(model.parameters()).device
        self.cache = StaticKVCache(max_rows, columns, device)
        self.hidden: torch.Tensor | None = None
        self._tokens = torch.zeros(max_rows, dtype=torch.long, device=device)
        self._output: torch.Tensor | None = None
        self._rows = torch.arange(max_rows, device=device)  # of the cache, for each row of the batch
        self._graphs = StepGraphs() if device.type == "cuda" else None

    def fits(self, rows: int, columns: int) -> bool:
        """Check whether the buffers are large enough."""
        return rows <= self.cache.max_rows and columns <= self.cache.columns

    def start(self, prompts: list[list[int]], share_prefixes: bool) -> None:
        """Compute a batch of prompts; share_prefixes: equal ones once."""
        distinct, numbers = distinct_rows(prompts) if share_prefixes else (prompts, range(len(prompts)))
        device, size = self._tokens.device, bucket_size(len(prompts), self.cache.max_rows)
        owners, batch = torch.tensor(numbers, device=device), pack(distinct, device)
        self._rows = torch.arange(len(prompts), device=device)
        self.cache.start(batch, _fill_up(owners, size))
        ends = batch.starts + batch.lengths - 1
        states = packed_hidden_states(self.model, batch, ends, past_key_values=self.cache, use_cache=True)
        self.cache.finish_prompts()
        self.hidden = states.index_select(0, owners)
        if self._output is None:
            self._output = self.hidden.new_empty(self.cache.max_rows, self.hidden.shape[1])
        if self._graphs is not None:
            self._graphs.check_weights(self.model)

    def step(self, tokens: torch.Tensor) -> None:
        """Append one token [B] to each row."""
        self._tokens.index_copy_(0, self._rows, tokens)
        if self._graphs is None:
            self._decode()
        else:
            self._graphs.run(self.cache.rows, self._decode)
        self.hidden = self._output.index_select(0, self._rows)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Drop all other rows; `hidden` changes with the next step only."""
        self._rows = self._rows[rows]
        size = bucket_size(len(rows), self.cache.max_rows)
        if size < self.cache.rows:
            self.cache.select_rows(_fill_up(self._rows, size))
            self._rows = torch.arange(len(rows), device=rows.device)

    def _decode(self) -> None:
        """Decode one token of each row of the cache, from `_tokens` to `_output`, by operations on the device alone."""
        rows = self.cache.rows
        with _uncached_autocast(self._tokens.device.type):
            states = self.backbone(
                input_ids=self._tokens[:rows, None], position_ids=self.cache.step(), attention_mask=NO_MASK,
                batch=self.cache, past_key_values=self.cache, use_cache=True).last_hidden_state
        self._output[:rows].copy_(states[:, -1])


def bucket_size(rows: int, max_rows: int) -> int:
    """Return the number of rows to compute: `max_rows`, halved while that is enough for `rows`."""
    size = max_rows
    while size > SMALLEST_BUCKET and (half := -(-size // 2)) >= rows:
        size = half
    return size


def _fill_up(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Repeat the last of some rows until there are `size`."""
    return rows[torch.arange(size, device=rows.device).clamp(max=len(rows) - 1)]


@contextmanager
def _uncached_autocast(device_type: str) -> Iterator[None]:
    """Go on with the caller's autocast, without its cache of converted weights: a graph must not point into it."""
    if not torch.is_autocast_enabled(device_type):
        yield
        return
    with torch.autocast(device_type, dtype=torch.get_autocast_dtype(device_type), cache_enabled=False):
        yield
