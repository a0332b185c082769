"""Attention of several requests at once, which the hardware layer (batch 1) does not run.

Unfused kernels with random weights of the real size. Every part keeps several copies of its
weights and takes the next one at each call, so that the L2 cache never serves what a real pass
would read from memory: a pass walks through all layers before it comes back to one.
"""

from __future__ import annotations

import math
from itertools import cycle

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.graphs import Graphs
from oled_sim.hardware.measuring.rig import Rig
from oled_sim.hardware.measuring.sweep import Sweep
from oled_sim.hardware.measuring.timing import Call
from oled_sim.hardware.place import Place

CALLS = 8
"""Calls in one graph of short ones."""
SHORT_TOKENS, SHORT_KEYS = 1 << 10, 1 << 17
"""Tokens, and keys of all requests, up to which a call is short."""
ROTARY = 64
BLOCK = 32
L2_MULTIPLE_BYTES = 256 << 20
"""Rotated weights take at least this much: four times the 60 MB of L2 of the largest GPU."""


class Attention:
    """Everything of a layer before its gate: norm, QKV, QK norm, RoPE, cache, SDPA, output, norm.

    Keys and values of the context are slices of one large random buffer, at the next offset in
    every call.
    """

    def __init__(
        self, place: Place, cost: CostGeometry, cache_elements: int, rotate_bytes: int
    ) -> None:
        self.place, self.cost, self.rotate_bytes = place, cost, rotate_bytes
        self.norm = torch.ones(cost.hidden_size, device=place.device, dtype=place.dtype)
        self.head_norm = torch.ones(cost.head_dim, device=place.device, dtype=place.dtype)
        width = (cost.heads + 2 * cost.kv_heads) * cost.head_dim
        out = cost.heads * cost.head_dim
        self.qkv = self._copies(width, cost.hidden_size)
        self.out = self._copies(cost.hidden_size, out)
        self.cache = torch.randn(cache_elements, device=place.device, dtype=place.dtype)
        self.offset = 0

    def projections(self, tokens: int) -> Call:
        """All of it but the attention kernel, for ``tokens`` tokens of all requests."""
        x = self._random(tokens, self.cost.hidden_size)
        angles = self._angles(tokens)

        def run() -> Tensor:
            q, k, v = self._project(x, angles)
            self._append(0, k, v)
            return self._finish(x, q)

        return run

    def block_attention(self, requests: int, keys: int) -> Call:
        """The attention kernel alone: a block of tokens each, over its own ``keys``."""
        q = self._random(requests, self.cost.heads, BLOCK, self.cost.head_dim)
        shape = (requests, self.cost.kv_heads, keys, self.cost.head_dim)

        def run() -> Tensor:
            return _attend(q, self._take(shape), self._take(shape))

        return run

    def _random(self, *shape: int) -> Tensor:
        """Return values with the spread of a linear layer's weights."""
        place = self.place
        return torch.randn(*shape, device=place.device, dtype=place.dtype) / math.sqrt(shape[-1])

    def _copies(self, rows: int, columns: int) -> cycle[Tensor]:
        """Return an endless rotation over enough copies of one weight."""
        first = self._random(rows, columns)
        size = first.numel() * first.element_size()
        more = min(63, max(0, math.ceil(self.rotate_bytes / size) - 1))
        return cycle([first, *(self._random(rows, columns) for _ in range(more))])

    def _angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        rotary = min(ROTARY, self.cost.head_dim)
        angle = self._random(tokens, rotary // 2).repeat(1, 2)
        return angle.cos(), angle.sin()

    def _project(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [heads, T, d], keys and values [kv heads, T, d]."""
        c = self.cost
        qkv = F.linear(F.rms_norm(x, (c.hidden_size,), self.norm, 1e-6), next(self.qkv))
        heads = qkv.view(len(x), -1, c.head_dim).transpose(0, 1)
        q, k, v = heads.split((c.heads, c.kv_heads, c.kv_heads))
        q = _rotate(F.rms_norm(q, (c.head_dim,), self.head_norm, 1e-6), angles)
        k = _rotate(F.rms_norm(k, (c.head_dim,), self.head_norm, 1e-6), angles)
        return q, k, v

    def _append(self, context: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        shape = (self.cost.kv_heads, context + k.shape[1], self.cost.head_dim)
        keys, values = self._take(shape), self._take(shape)
        keys[:, context:] = k
        values[:, context:] = v
        return keys, values

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        mixed = attended.transpose(0, 1).reshape(len(x), -1)
        y = x + F.linear(mixed, next(self.out))
        return F.rms_norm(y, (self.cost.hidden_size,), self.norm, 1e-6)

    def _take(self, shape: tuple[int, ...]) -> Tensor:
        """Return the next slice of the cache buffer in a shape."""
        size = math.prod(shape)
        if self.offset + size > self.cache.numel():
            self.offset = 0
        piece = self.cache[self.offset : self.offset + size].view(shape)
        self.offset += -(-size // 128) * 128
        return piece


def measure_batches(sweep: Sweep, rig: Rig, cache_bytes: int, rotate_bytes: int) -> None:
    """The dense part of several requests: what they share, and the attention of each.

    On CUDA as graphs of several calls, so that no launch is counted: a runtime of batches would
    replay graphs as the one of single requests does.
    """
    a, clock, place = rig.axes, sweep.clock, rig.place
    attention = Attention(place, rig.cost, cache_bytes // place.item_bytes, rotate_bytes)

    def times(call: Call, short: bool) -> list[float]:
        if not clock.cuda:
            return clock.device_times(call)
        graphs, count = Graphs(place.device), CALLS if short else 1
        graphs.capture("calls", lambda: [call() for _ in range(count)])
        return [us / count for us in clock.device_times(lambda: graphs.replay("calls"))]

    def block(requests: int, keys: int) -> list[float]:
        size = requests * keys * rig.cost.kv_heads * rig.cost.head_dim
        if size > attention.cache.numel() // 2:
            return []
        return times(attention.block_attention(requests, keys), requests * keys <= SHORT_KEYS)

    sweep.curve(
        "projections", a.tokens, lambda t: times(attention.projections(t), t <= SHORT_TOKENS)
    )
    sweep.grid("block_attention", a.requests, a.keys, block)


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
