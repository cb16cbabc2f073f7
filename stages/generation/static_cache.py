"""Key-value cache of one size, for decoding that is captured in a CUDA graph.

Buffers are allocated once, for the longest prompt and all new tokens. A step changes lengths, keys and values in place,
by operations on tensors alone: it reads no number on the host, and its shapes depend on no number. Rows that have ended
stay, until the rows in use shrink to the next bucket; then the others are moved to the front of the same buffers.

Shapes: R rows of the buffers, B rows in use, H key heads, C columns, W head width, N prompt tokens of all rows.
"""

import torch

from stages.generation.kv_cache import PackedKVCache
from stages.modeling.packed.sequences import PackedBatch
from stages.modeling.torch_setup import allow_nondeterministic


class StaticKVCache(PackedKVCache):
    """A PackedKVCache that never allocates after its first prompts, with R rows of C columns for any batches that fit.

    positions_checked: the backbone's forward pass need not read the largest position (families.check_positions).
    """

    positions_checked = True

    def __init__(self, max_rows: int, columns: int, device: torch.device):
        self.max_rows, self.columns, self.cpu_kernels = max_rows, columns, False
        self.prompts: PackedBatch | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer, [R, H, C, W]
        self._lengths = torch.ones(max_rows, dtype=torch.long, device=device)
        self._use(max_rows)

    def start(self, prompts: PackedBatch, owners: torch.Tensor) -> None:
        """Take as many rows as `owners` [B] has, each for the prompt with its index, in the next forward pass."""
        self._use(len(owners))
        self.prompts = prompts
        self.lengths.copy_(prompts.lengths[owners])
        column = torch.arange(self.columns, device=owners.device)
        first = prompts.starts[owners][:, None]
        self._gather = torch.where(column < self.lengths[:, None], first + column, 0).flatten()

    def finish_prompts(self) -> None:
        """From now on, each forward pass has one token a row."""
        self.prompts = None
        self._use(self.rows)

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Store a layer's new keys and values; return those that its queries may see (Transformers' interface)."""
        if self.prompts is not None:
            if layer_idx == len(self._buffers):
                self._buffers.append((self._allocate(key), self._allocate(value)))
            for buffer, packed in zip(self._buffers[layer_idx], (key, value), strict=True):
                buffer[: self.rows].copy_(self._buffer(packed))
            return key, value
        with allow_nondeterministic():  # no two rows write to one place; torch's deterministic kernel sorts them
            for buffer, new in zip(self.layers[layer_idx], (key, value), strict=True):
                buffer.flatten(0, 2).index_copy_(0, self._places(key.shape[1]), new.flatten(0, 2).to(buffer.dtype))
        return self.layers[layer_idx]

    def step(self) -> torch.Tensor:
        """Count one more token in each row; return the tokens' positions [B, 1]."""
        self._masks, self._indices = {}, {}
        self.lengths.add_(1)
        return (self.lengths - 1)[:, None]

    def select_rows(self, rows: torch.Tensor) -> None:
        """Move these rows [B] to the front, and use no others."""
        for buffer in (self._lengths, *(x for layer in self._buffers for x in layer)):
            buffer[: len(rows)] = buffer[rows]
        self._use(len(rows))

    def _use(self, rows: int) -> None:
        self.rows = rows
        self.lengths = self._lengths[:rows]
        self.layers = [(key[:rows], value[:rows]) for key, value in self._buffers]
        self._masks, self._indices = {}, {}

    def _allocate(self, packed: torch.Tensor) -> torch.Tensor:
        """Allocate a buffer for keys or values like the prompts' [1, H, N, W]."""
        return packed.new_empty(self.max_rows, packed.shape[1], self.columns, packed.shape[3])

    def _places(self, heads: int) -> torch.Tensor:
        """Index the newest column of each row and head, [B * H], in buffers flattened to [B * H * C, W]."""
        if heads not in self._indices:
            first = torch.arange(self.rows * heads, device=self.lengths.device) * self.columns
            self._indices[heads] = (first.view(-1, heads) + self.lengths[:, None] - 1).flatten()
        return self._indices[heads]
