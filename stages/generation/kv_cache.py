"""Keys and values of rows that grow token by token; each row begins at column 0, whatever the others' lengths.

Buffers hold GROWTH_COLUMNS columns more than are in use and are attended to whole, behind a mask: a part of them would
be copied by every product. They grow by the same number when they are full.

Shapes: B rows, H heads of keys, C columns, W width of a head, N prompt tokens of all rows.
"""

import torch
from torch.nn import functional

from stages.modeling.cpu_kernels import attention as native
from stages.modeling.cpu_kernels.build import takes
from stages.modeling.packed.sequences import PackedBatch, rounded_columns

GROWTH_COLUMNS = 32


class PackedKVCache:
    """What Transformers calls a cache, and the batch that attention.attend asks which keys a row's new token sees.

    The first forward pass is a Ragged batch of prompts; each one after it brings one token a row.
    """

    def __init__(self, prompts: PackedBatch):
        self.prompts: PackedBatch | None = prompts
        self.lengths, self.longest = prompts.lengths, int(prompts.lengths.max())
        self.columns = rounded_columns(self.longest)
        column = torch.arange(self.columns, device=prompts.starts.device)
        self._gather = torch.where(column < self.lengths[:, None], prompts.starts[:, None] + column, 0).flatten()
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.native = False  # laid out for our own kernels, which read no further than a row goes
        self._masks: dict[int | None, torch.Tensor] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Transformers asks in order to make positions; ours are given."""
        return 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Take a layer's new keys and values; what its queries may see comes back (Transformers' interface)."""
        if self.prompts is not None:
            self.native = takes(key, value) and not key.requires_grad  # these kernels have no backward pass
            self.layers.append(self._columns(key, value) if self.native else (self._buffer(key), self._buffer(value)))
            return key, value
        if self.native:
            native.append(key[:, :, 0], value[:, :, 0], *self.layers[layer_idx], self.lengths)
            return self.layers[layer_idx]
        row = torch.arange(len(self.lengths), device=key.device)
        for buffer, new in zip(self.layers[layer_idx], (key, value), strict=True):
            buffer[row, :, self.lengths - 1] = new[:, :, 0].to(buffer.dtype)
        return self.layers[layer_idx]

    def advance(self) -> torch.Tensor:
        """Make room for one token more in each row; their positions [B, 1]."""
        self.prompts, self.lengths, self.longest = None, self.lengths + 1, self.longest + 1
        self._masks = {}
        if self.longest > self.columns:
            self.columns += GROWTH_COLUMNS
            sizes = ((0, GROWTH_COLUMNS) if self.native else (0, 0, 0, GROWTH_COLUMNS)), (0, 0, 0, GROWTH_COLUMNS)
            for place, layer in enumerate(self.layers):  # one at a time: the old buffer goes before the next one comes
                self.layers[place] = tuple(functional.pad(x, size) for x, size in zip(layer, sizes, strict=True))
        return (self.lengths - 1)[:, None]

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these."""
        self.lengths = self.lengths[rows]
        for place, (key, value) in enumerate(self.layers):
            self.layers[place] = key[rows], value[rows]

    def mask(self, window: int | None) -> torch.Tensor:
        """[B, 1, 1, columns]: 0 where a row's newest token sees a key, -inf elsewhere; window: how far back it sees."""
        if window not in self._masks:
            column, last = torch.arange(self.columns, device=self.lengths.device), self.lengths[:, None]
            seen = column < last
            if window is not None:
                seen &= column >= last - window
            like = self.layers[0][0]
            bias = torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, float("-inf"))
            self._masks[window] = bias[:, None, None]
        return self._masks[window]

    def _columns(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As native.newest reads them."""
        filler = -value.shape[-1] % native.lanes()
        key = key.to(value.dtype)  # autocast leaves them apart
        return self._buffer(key).transpose(2, 3).contiguous(), functional.pad(self._buffer(value), (0, filler))

    def _buffer(self, packed: torch.Tensor) -> torch.Tensor:
        """Keys or values of the prompts, from [1, H, N, W] to [B, H, C, W]."""
        wide = packed[0].transpose(0, 1).index_select(0, self._gather)
        return wide.view(len(self.lengths), self.columns, *wide.shape[1:]).transpose(1, 2).contiguous()
