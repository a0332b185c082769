"""Attention of a block in three Triton launches, whatever the context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oled_sim.hardware.place import Place
from oled_sim.hardware.static_attention import StaticAttention
from oled_sim.hardware.steps import power_of_two
from oled_sim.model.config import LLaDA2Config

CHUNK = 128
"""Keys of one program: many programs share a long context, few launches serve a short one."""

FEWEST_KEYS = 1024
"""What one captured pass covers at least; keys beyond the context are not read."""


class FusedAttention(StaticAttention):
    """As :class:`StaticAttention`; a pass of ``block`` tokens runs Triton's kernels.

    The number of keys is read on the device, so a captured pass serves every context up to its
    ``bucket``, a power of two.
    """

    def __init__(
        self, place: Place, config: LLaDA2Config, layers: int, block: int, max_context: int
    ) -> None:
        from oled_sim.hardware import layer_kernels  # needs Triton

        super().__init__(place, config, layers, block, max_context)
        self._kernels: Any = layer_kernels
        # fp32 products run without tensor cores: smaller tiles compile and run faster.
        self._most_rows = 64 if place.item_bytes == 2 else 16
        self._count = self.heads // self.kv_heads * block
        self._end = torch.zeros(1, device=place.device, dtype=torch.int32)
        chunks, device = -(-self.capacity // CHUNK), place.device
        shape = (chunks, self.kv_heads, self._count)
        self._sums = torch.empty(*shape, self.head_dim, device=device)
        self._peaks, self._totals = (torch.empty(shape, device=device) for _ in range(2))
        shape = (block, self.heads * self.head_dim)
        self._queries, self._mixed = (
            torch.empty(shape, device=device, dtype=place.dtype) for _ in range(2)
        )

    def bucket_of(self, end: int) -> int:
        """Return the largest context and pass that a captured pass of this end serves."""
        return max(FEWEST_KEYS, power_of_two(end))

    def begin(self, tokens: int, context: int) -> None:
        """See :class:`StaticAttention`."""
        super().begin(tokens, context)
        self._end.fill_(self.end)

    def turn(self) -> None:
        """See :class:`StaticAttention`; the kernels look up what they need."""
        if self.tokens != self.block:
            super().turn()

    def __call__(self, layer: int, qkv: Tensor, norms: Tensor) -> Tensor:
        """See :class:`StaticAttention`."""
        if self.tokens != self.block:
            return super().__call__(layer, qkv, norms)
        k, keys, values = self._kernels, self.keys[layer], self.values[layer]
        d, wide = self.head_dim, max(16, power_of_two(self.head_dim))
        cos, sin = self._tables
        k.place_heads[(self.heads + 2 * self.kv_heads, self.tokens)](
            qkv, norms, cos, sin, self.positions, self._queries, keys, values, self.tokens,
            keys.stride(0), self.eps, self.heads, self.kv_heads, d, cos.shape[1], wide,
        )  # fmt: skip
        chunks = -(-min(self.bucket_of(self.end), self.capacity) // CHUNK)
        rows = min(self._most_rows, max(16, power_of_two(self._count)))
        parts = (self._sums, self._peaks, self._totals)
        k.attend_chunk[(chunks, self.kv_heads, -(-self._count // rows))](
            self._queries, keys, values, self._end, *parts, self._count, keys.stride(0),
            d**-0.5, d, wide, rows, CHUNK, self._most_rows,
        )  # fmt: skip
        k.join_chunks[(self.heads, self.tokens)](
            *parts, self._end, self._mixed, self.tokens, self.heads, self.kv_heads, d, wide, CHUNK
        )
        return self._mixed
