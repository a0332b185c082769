"""The GPU kernels of one LLaDA2 layer, as the unfused bf16 model launches them.

Weights are random and of the real size. Every part keeps several copies of its weights and takes
the next one at each call, so that the L2 cache never serves what a real pass would read from
memory: a pass walks through all layers before it comes back to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from oled_sim.geometry import CostGeometry

Call = Callable[[], object]
GROUPS, GROUPS_KEPT, SCALE = 8, 4, 2.5
ROTARY = 64
BLOCK = 32
L2_MULTIPLE_BYTES = 256 << 20
"""Rotated weights take at least this much: four times the 60 MB of L2 of the largest GPU."""


@dataclass(frozen=True)
class Place:
    """Where and how weights are held."""

    device: torch.device
    rotate_bytes: int = L2_MULTIPLE_BYTES
    dtype: torch.dtype = torch.bfloat16

    def random(self, *shape: int) -> Tensor:
        """Return values with the spread of a linear layer's weights."""
        return torch.randn(*shape, device=self.device, dtype=self.dtype) / math.sqrt(shape[-1])

    def copies(self, make: Callable[[], Tensor]) -> cycle[Tensor]:
        """Return an endless rotation over enough copies of one weight."""
        first = make()
        size = first.numel() * first.element_size()
        more = min(63, max(0, math.ceil(self.rotate_bytes / size) - 1))
        return cycle([first, *(make() for _ in range(more))])


def embedding(place: Place, cost: CostGeometry) -> Callable[[int], Call]:
    """Return the look-up of token embeddings by tokens."""
    table = place.random(cost.vocabulary, cost.hidden_size)

    def call(tokens: int) -> Call:
        ids = torch.randint(cost.vocabulary, (tokens,), device=place.device)
        return lambda: F.embedding(ids, table)

    return call


class Mlp:
    """A SwiGLU MLP with its input norm: the shared expert, or a dense layer's MLP."""

    def __init__(self, place: Place, hidden: int, width: int) -> None:
        self.place, self.hidden = place, hidden
        self.norm = torch.ones(hidden, device=place.device, dtype=place.dtype)
        self.up = place.copies(lambda: place.random(2 * width, hidden))
        self.down = place.copies(lambda: place.random(hidden, width))

    def call(self, tokens: int) -> Call:
        """Return the work for ``tokens`` tokens."""
        x = self.place.random(tokens, self.hidden)
        return lambda: self._forward(x)

    def _forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, next(self.up)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, next(self.down))


class DenseMlp(Mlp):
    """The MLP of a dense layer: norm, SwiGLU, residual."""

    def _forward(self, x: Tensor) -> Tensor:
        return x + super()._forward(F.rms_norm(x, (self.hidden,), self.norm, 1e-6))


class Attention:
    """Everything of a layer before its gate: norm, QKV, QK norm, RoPE, cache, SDPA, output, norm.

    Keys and values of the context are slices of one large random buffer, at the next offset in
    every call.
    """

    def __init__(self, place: Place, cost: CostGeometry, cache_elements: int) -> None:
        self.place, self.cost = place, cost
        self.norm = torch.ones(cost.hidden_size, device=place.device, dtype=place.dtype)
        self.head_norm = torch.ones(cost.head_dim, device=place.device, dtype=place.dtype)
        width = (cost.heads + 2 * cost.kv_heads) * cost.head_dim
        out = cost.heads * cost.head_dim
        self.qkv = place.copies(lambda: place.random(width, cost.hidden_size))
        self.out = place.copies(lambda: place.random(cost.hidden_size, out))
        self.cache = torch.randn(cache_elements, device=place.device, dtype=place.dtype)
        self.offset = 0

    def whole(self, tokens: int, context: int) -> Call:
        """One request: ``tokens`` new ones attend to ``context`` kept ones and themselves."""
        x = self.place.random(tokens, self.cost.hidden_size)
        angles = self._angles(tokens)

        def run() -> Tensor:
            q, k, v = self._project(x, angles)
            keys, values = self._append(context, k, v)
            attended = _attend(q[None], keys[None], values[None])[0]
            return self._finish(x, attended)

        return run

    def projections(self, tokens: int) -> Call:
        """The same without the attention kernel."""
        x = self.place.random(tokens, self.cost.hidden_size)
        angles = self._angles(tokens)

        def run() -> Tensor:
            q, k, v = self._project(x, angles)
            self._append(0, k, v)
            return self._finish(x, q)

        return run

    def block_attention(self, requests: int, keys: int) -> Call:
        """The attention kernel alone: a block of tokens each, over its own ``keys``."""
        q = self.place.random(requests, self.cost.heads, BLOCK, self.cost.head_dim)
        shape = (requests, self.cost.kv_heads, keys, self.cost.head_dim)

        def run() -> Tensor:
            return _attend(q, self._take(shape), self._take(shape))

        return run

    def _angles(self, tokens: int) -> tuple[Tensor, Tensor]:
        rotary = min(ROTARY, self.cost.head_dim)
        angle = self.place.random(tokens, rotary // 2).repeat(1, 2)
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


def _rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = angles
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((turned, kept), dim=-1)


def _attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


class Gate:
    """Router of one layer: fp32 scores, group-limited top-k, sort by expert, copy to the host."""

    def __init__(self, place: Place, cost: CostGeometry) -> None:
        self.place, self.cost = place, cost
        self.weight = place.copies(
            lambda: torch.randn(cost.experts, cost.hidden_size, device=place.device)
        )
        self.bias = torch.zeros(cost.experts, device=place.device)

    def call(self, tokens: int) -> Call:
        """Return the work for ``tokens`` tokens; it ends with ids and weights on the host."""
        k, pin = self.cost.top_k, self.place.device.type == "cuda"
        x = self.place.random(tokens, self.cost.hidden_size)
        ids_host = torch.empty(tokens, k, dtype=torch.int64, pin_memory=pin)
        weights_host = torch.empty(tokens, k, pin_memory=pin)
        every = torch.arange(self.cost.experts, device=self.place.device)

        def run() -> tuple[Tensor, Tensor]:
            ids, weights = self._select(x)
            ids_host.copy_(ids, non_blocking=True)
            weights_host.copy_(weights, non_blocking=True)
            ordered = ids.flatten().sort()
            return ordered.indices, torch.searchsorted(ordered.values, every, right=True)

        return run

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x.float(), next(self.weight)).sigmoid()
        biased = scores + self.bias
        grouped = biased.view(len(x), GROUPS, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        dropped = best.topk(GROUPS - GROUPS_KEPT, dim=-1, largest=False).indices
        grouped.scatter_(1, dropped.unsqueeze(-1).expand(-1, -1, grouped.shape[-1]), -torch.inf)
        ids = biased.topk(self.cost.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        return ids, weights * (SCALE / weights.sum(-1, keepdim=True))


def merge(place: Place, cost: CostGeometry, tokens: int) -> Call:
    """Sum routed outputs by slot, add shared expert, the CPU's sums and the residual."""
    slots = place.random(tokens, cost.top_k, cost.hidden_size)
    shared, from_cpu, residual = (place.random(tokens, cost.hidden_size) for _ in range(3))
    return lambda: slots.sum(1) + shared + from_cpu + residual


def lm_head(place: Place, cost: CostGeometry) -> Callable[[int], Call]:
    """Return the work of final norm, LM head, softmax, argmax and confidence by tokens."""
    weight = place.random(cost.vocabulary, cost.hidden_size)
    norm = torch.ones(cost.hidden_size, device=place.device, dtype=place.dtype)
    pin = place.device.type == "cuda"

    def call(tokens: int) -> Call:
        x = place.random(tokens, cost.hidden_size)
        ids_host = torch.empty(tokens, dtype=torch.int64, pin_memory=pin)
        confidence_host = torch.empty(tokens, pin_memory=pin)

        def run() -> None:
            logits = F.linear(F.rms_norm(x, (cost.hidden_size,), norm, 1e-6), weight)
            best = logits.float().softmax(-1).max(-1)
            ids_host.copy_(best.indices, non_blocking=True)
            confidence_host.copy_(best.values, non_blocking=True)

        return run

    return call


class GroupedExperts:
    """Grouped kernel over resident experts: gather rows, two grouped products, scatter to slots.

    Tokens are sorted by expert already (the gate does it once per event), so the experts of a
    call are one run of rows.
    """

    def __init__(self, place: Place, cost: CostGeometry, pool: int) -> None:
        self.place, self.cost, self.pool = place, cost, pool
        self.up = place.random(pool, 2 * cost.moe_intermediate_size, cost.hidden_size)
        self.down = place.random(pool, cost.hidden_size, cost.moe_intermediate_size)
        self.next = 0

    def call(self, experts: int, tokens_per_expert: int) -> Call:
        """Return the work for ``experts`` experts with ``tokens_per_expert`` rows each."""
        rows, hidden = experts * tokens_per_expert, self.cost.hidden_size
        tokens = max(tokens_per_expert, -(-rows // self.cost.top_k))
        device = self.place.device
        x = self.place.random(tokens, hidden)
        source = torch.arange(rows, device=device) % tokens
        weights = torch.rand(rows, 1, device=device).to(x.dtype)
        ends = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * tokens_per_expert
        slots = torch.empty(rows, hidden, device=device, dtype=x.dtype)
        target = torch.randperm(rows, device=device)

        def run() -> Tensor:
            first = self._advance(experts)
            up, down = self.up[first : first + experts], self.down[first : first + experts]
            gate, value = grouped(x.index_select(0, source), up, ends).chunk(2, dim=-1)
            out = grouped(F.silu(gate) * value, down, ends)
            return slots.index_copy_(0, target, out * weights)

        return run

    def _advance(self, experts: int) -> int:
        if self.next + experts > self.pool:
            self.next = 0
        first, self.next = self.next, self.next + experts
        return first


def grouped(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Multiply each run of rows [.., K] by its own weight [N, K]; ``ends`` int32 [experts]."""
    if x.device.type == "cuda":
        product: Callable[..., Tensor] = getattr(torch, "_grouped_mm")  # noqa: B009 - private name
        return product(x, weight.transpose(1, 2), offs=ends)
    starts = [0, *ends.tolist()]
    runs = zip(starts, starts[1:], weight, strict=False)
    return torch.cat([F.linear(x[a:b], w) for a, b, w in runs])
