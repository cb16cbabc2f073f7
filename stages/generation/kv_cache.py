"""Key-value cache for decoding rows of different lengths; each row starts at column 0 of its buffers.

Buffers grow by GROWTH_COLUMNS columns when they are full. Attention reads them whole, behind a mask: a slice would be
copied by every matrix product.

Shapes: B rows, H key heads, C columns, W head width, N prompt tokens of all rows.
"""

import torch
from torch.nn import functional

from stages.modeling.cpu_kernels import attention as kernels
from stages.modeling.cpu_kernels.build import supports
from stages.modeling.packed.sequences import PackedBatch, round_up_columns
from stages.modeling.torch_setup import allow_nondeterministic

GROWTH_COLUMNS = 32


class PackedKVCache:
    """A cache with Transformers' interface; also the batch from which attention learns which keys a new token sees.

    The first forward pass is a PackedBatch of prompts; each later one has one token per row. cpu_kernels: whether the
    model computes with the CPU kernels, which have another layout and read each row to its end only.
    """

    def __init__(self, prompts: PackedBatch, cpu_kernels: bool):
        self.prompts: PackedBatch | None = prompts
        self.lengths, self.longest = prompts.lengths, int(prompts.lengths.max())
        self._rows = torch.arange(len(self.lengths), device=self.lengths.device)
        self.columns = round_up_columns(self.longest)
        column = torch.arange(self.columns, device=prompts.starts.device)
        self._gather = torch.where(column < self.lengths[:, None], prompts.starts[:, None] + column, 0).flatten()
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.cpu_kernels = cpu_kernels
        self._masks: dict[int | None, torch.Tensor] = {}

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: Transformers asks in order to compute positions, and ours are given."""
        return 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Store a layer's new keys and values; return those that its queries may see (Transformers' interface)."""
        if self.prompts is not None:
            # These kernels have no backward pass.
            self.cpu_kernels = self.cpu_kernels and supports(key, value) and not key.requires_grad
            buffers = self._kernel_buffers(key, value) if self.cpu_kernels else (self._buffer(key), self._buffer(value))
            self.layers.append(buffers)
            return key, value
        if self.cpu_kernels:
            kernels.append_key_value(key[:, :, 0], value[:, :, 0], *self.layers[layer_idx], self.lengths)
            return self.layers[layer_idx]
        with allow_nondeterministic():  # each place is written once; the kernel for several sorts the indices first
            for buffer, new in zip(self.layers[layer_idx], (key, value), strict=True):
                buffer[self._rows, :, self._last] = new[:, :, 0].to(buffer.dtype)
        return self.layers[layer_idx]

    def step(self) -> torch.Tensor:
        """Make room for one more token in each row; return the tokens' positions [B, 1]."""
        self.prompts, self.lengths, self.longest = None, self.lengths + 1, self.longest + 1
        self._last, self._masks = self.lengths - 1, {}
        if self.longest > self.columns:
            self.columns += GROWTH_COLUMNS
            sizes = ((0, GROWTH_COLUMNS) if self.cpu_kernels else (0, 0, 0, GROWTH_COLUMNS)), (0, 0, 0, GROWTH_COLUMNS)
            for index, layer in enumerate(self.layers):  # one by one, to free each old buffer
                self.layers[index] = tuple(functional.pad(x, size) for x, size in zip(layer, sizes, strict=True))
        return self._last[:, None]

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep these rows only; one may become several."""
        self.lengths, self._rows = self.lengths[rows], torch.arange(len(rows), device=rows.device)
        for index, (key, value) in enumerate(self.layers):
            self.layers[index] = key[rows], value[rows]

    def mask(self, window: int | None) -> torch.Tensor:
        """Build the attention bias [B, 1, 1, C] of each row's newest token: 0 for a visible key, else -inf.

        window: how many tokens back a token sees (sliding-window attention); None: all.
        """
        if window not in self._masks:
            column, last = torch.arange(self.columns, device=self.lengths.device), self.lengths[:, None]
            visible = column < last
            if window is not None:
                visible &= column >= last - window
            key = self.layers[0][0]
            bias = torch.zeros(visible.shape, dtype=key.dtype, device=key.device).masked_fill_(~visible, float("-inf"))
            self._masks[window] = bias[:, None, None]
        return self._masks[window]

    def _kernel_buffers(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Lay out the prompts' keys and values as the kernel kernels.newest reads them."""
        filler = -value.shape[-1] % kernels.simd_width()
        key = key.to(value.dtype)  # they differ under autocast
        return self._buffer(key).transpose(2, 3).contiguous(), functional.pad(self._buffer(value), (0, filler))

    def _buffer(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpack the prompts' keys or values from [1, H, N, W] to [B, H, C, W]."""
        rows = packed[0].transpose(0, 1).index_select(0, self._gather)
        return rows.view(len(self.lengths), self.columns, *rows.shape[1:]).transpose(1, 2).contiguous()
