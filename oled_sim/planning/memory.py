"""What GPU memory is spent on, part by part."""

from __future__ import annotations

from dataclasses import dataclass

from oled_sim.errors import CapacityError
from oled_sim.geometry import CostGeometry

LOGIT_BYTES = 4
"""Logits are compared in float32."""

RESIDENT_VECTORS = 4
"""Vectors of the model's width that a layer holds per token at once: the residual stream, its norm,
the attention's output and the sum of the experts."""


@dataclass(frozen=True)
class Serving:
    """What is served, besides the experts.

    Attributes:
        context: tokens of a request whose keys and values are kept: prompt and output.
        batch: requests that run together.
        block_length: tokens of a block; the LM head sees those of one block per request.
        staging: slots where transfers land.
        reserve_bytes: left to the driver, kernels' workspaces and the allocator; an assumption.
    """

    context: int
    batch: int = 1
    block_length: int = 32
    staging: int = 16
    reserve_bytes: int = 1 << 30


@dataclass(frozen=True)
class Bill:
    """GPU memory in bytes, by what it is for. ``cache``: experts per layer that it is for."""

    cache: int
    experts: int
    staging: int
    kv_cache: int
    layers: int
    embedding: int
    lm_head: int
    activations: int
    reserve: int

    @property
    def total(self) -> int:
        """All of it, bytes."""
        return self.experts + self.staging + self.without_experts

    @property
    def without_experts(self) -> int:
        """What is taken whatever the cache, staging apart, bytes."""
        weights = self.layers + self.embedding + self.lm_head
        return weights + self.kv_cache + self.activations + self.reserve


def memory_bill(model: CostGeometry, serving: Serving, cache: int) -> Bill:
    """Return the memory that a model takes with ``cache`` resident experts per MoE layer."""
    table = model.vocabulary * model.hidden_size * model.weight_bytes
    return Bill(
        cache=cache,
        experts=min(cache, model.experts) * model.moe_layers * model.expert_bytes,
        staging=serving.staging * model.expert_bytes,
        kv_cache=serving.batch * serving.context * model.kv_bytes_per_token,
        layers=model.resident_bytes - 2 * table,
        embedding=table,
        lm_head=table,
        activations=activation_bytes(model, serving),
        reserve=serving.reserve_bytes,
    )


def activation_bytes(model: CostGeometry, serving: Serving) -> int:
    """Return what the largest pass holds besides weights, keys and values: an estimate.

    As if a request's whole context were one prompt that is passed through at once: the vectors of
    one layer (:data:`RESIDENT_VECTORS`, queries, keys and values, and of each of a token's experts
    the input, both intermediate vectors and the output), and the logits of a block.
    """
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    of_expert = 2 * model.hidden_size + 2 * model.moe_intermediate_size
    routed = (model.top_k + model.shared_experts) * of_expert
    per_token = RESIDENT_VECTORS * model.hidden_size + heads + routed
    tokens = max(serving.context, serving.batch * serving.block_length)
    logits = serving.batch * serving.block_length * model.vocabulary * LOGIT_BYTES
    return tokens * per_token * model.weight_bytes + logits


def largest_cache(model: CostGeometry, serving: Serving, gpu_memory_bytes: int) -> int:
    """Return the most experts per MoE layer that fit; all of them if they do.

    Raises:
        CapacityError: not even a token's own experts fit in every layer.
    """
    empty = memory_bill(model, serving, 0)
    per_slot = model.moe_layers * model.expert_bytes
    fits = (gpu_memory_bytes - empty.total) // per_slot
    if fits < model.top_k:
        least = empty.total + model.top_k * per_slot
        raise CapacityError(
            f"{model.name} takes {_gib(empty.total)} without a resident expert and {_gib(least)}"
            f" with {model.top_k} per layer, but there are {_gib(gpu_memory_bytes)}: give more"
            " --gpu-memory, or a smaller --context, --batch, --staging or --reserve"
        )
    return min(int(fits), model.experts)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
