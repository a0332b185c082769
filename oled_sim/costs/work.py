"""Bytes and operations behind each table of a profile, by cost geometry and counts.

Weights are read once, activations and caches once more; a multiply-add is two operations.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from oled_sim.geometry import CostGeometry

FP32 = 4
"""Bytes of the router's weights and of the LM head's probabilities."""

BATCH_BLOCK = 32
"""Tokens of a block in the table ``block_attention``."""


class Work(NamedTuple):
    """What a kernel moves through GPU memory, and what it computes."""

    size_bytes: float
    flops: float


def gpu_experts(g: CostGeometry, experts: float, tokens: float) -> Work:
    """``tokens`` for each of some routed experts: weights, activations in and out."""
    rows = experts * tokens
    moved = experts * g.expert_bytes + rows * 2 * g.hidden_size * g.weight_bytes
    return Work(moved, rows * 6 * g.hidden_size * g.moe_intermediate_size)


def projections(g: CostGeometry, tokens: float, _: float = 0) -> Work:
    """QKV and output projection of one layer."""
    weights = g.hidden_size * g.head_dim * (2 * g.heads + 2 * g.kv_heads)
    moved = weights + tokens * (4 * g.hidden_size + 2 * (g.heads + g.kv_heads) * g.head_dim)
    return Work(moved * g.weight_bytes, 2 * tokens * weights)


def dense(g: CostGeometry, tokens: float, context: float) -> Work:
    """Projections, and the attention of one request over its context and itself."""
    first, second = projections(g, tokens), _attention(g, 1, tokens, context + tokens)
    return Work(first.size_bytes + second.size_bytes, first.flops + second.flops)


def block_attention(g: CostGeometry, requests: float, keys: float) -> Work:
    """The attention of a batch, a block and keys of its own per request."""
    return _attention(g, requests, BATCH_BLOCK, keys)


def _attention(g: CostGeometry, requests: float, tokens: float, keys: float) -> Work:
    cache = requests * keys * 2 * g.kv_heads * g.head_dim * g.weight_bytes
    return Work(cache, requests * tokens * keys * 4 * g.heads * g.head_dim)


def gate(g: CostGeometry, tokens: float, _: float = 0) -> Work:
    """The router, in fp32."""
    moved = g.hidden_size * g.experts * FP32 + tokens * g.hidden_size * g.weight_bytes
    return Work(moved, 2 * tokens * g.hidden_size * g.experts)


def shared_expert(g: CostGeometry, tokens: float, _: float = 0) -> Work:
    """The shared expert: as wide as so many routed ones."""
    return gpu_experts(g, g.shared_experts, tokens)


def dense_layer(g: CostGeometry, tokens: float, _: float = 0) -> Work:
    """The MLP of a dense layer."""
    weights = 3 * g.hidden_size * g.dense_intermediate_size
    return Work((weights + 2 * tokens * g.hidden_size) * g.weight_bytes, 2 * tokens * weights)


def lm_head(g: CostGeometry, rows: float, _: float = 0) -> Work:
    """LM head and softmax: logits are written, then read and written once more in fp32."""
    weights = g.hidden_size * g.vocabulary
    logits = rows * g.vocabulary * (2 * g.weight_bytes + 2 * FP32)
    return Work(weights * g.weight_bytes + logits, 2 * rows * weights)


def merge(g: CostGeometry, tokens: float, _: float = 0) -> Work:
    """Read k routed outputs, the shared one, the CPU's and the residual; write one."""
    return Work(tokens * (g.top_k + 4) * g.hidden_size * g.weight_bytes, 0)


def embedding(g: CostGeometry, tokens: float, _: float = 0) -> Work:
    """Read and write one row per token."""
    return Work(2 * tokens * g.hidden_size * g.weight_bytes, 0)


WORK: dict[str, Callable[[CostGeometry, float, float], Work]] = {
    "gpu_experts": gpu_experts,
    "dense": dense,
    "projections": projections,
    "block_attention": block_attention,
    "gate": gate,
    "shared_expert": shared_expert,
    "dense_layer": dense_layer,
    "lm_head": lm_head,
    "merge": merge,
    "embedding": embedding,
}
"""By the name of the table, of its two counts (a curve's second is ignored)."""


def link_bytes(table: str, g: CostGeometry, count: float) -> float:
    """Return what crosses the link: the copy itself, or ``count`` tokens to the host and back."""
    return 2 * count * g.hidden_size * g.weight_bytes if table == "cpu_link" else count
