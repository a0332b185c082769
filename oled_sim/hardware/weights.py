"""Weights of everything in a model that is no routed expert."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.place import Place
from oled_sim.hardware.shapes import cost_geometry, published_config
from oled_sim.model.checkpoint_reader import load_tensors
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.moe import LLaDA2MoeGate

Model = LLaDA2MoeModelLM | str | os.PathLike[str]
"""A model in memory, or a checkpoint folder."""


@dataclass(frozen=True)
class Mlp:
    """A SwiGLU MLP: ``up`` [2i, h], gate projection then up projection; ``down`` [h, i]."""

    up: Tensor
    down: Tensor

    @classmethod
    def empty(cls, place: Place, hidden: int, inner: int) -> Mlp:
        """Return one without values."""
        return cls(_empty(place, 2 * inner, hidden), _empty(place, hidden, inner))

    def named(self, stem: str) -> dict[str, Tensor]:
        """Return published name to tensor."""
        gate, up = self.up.chunk(2)
        parts = (("gate_proj", gate), ("up_proj", up), ("down_proj", self.down))
        return {f"{stem}.{name}.weight": tensor for name, tensor in parts}


@dataclass(frozen=True)
class LayerWeights:
    """One layer: attention, norms, and a dense MLP or a gate with its shared expert.

    Attributes:
        input_norm, post_norm: [h]. head_norms: [2, head_dim], of queries and of keys.
        qkv: [(heads + 2·kv heads)·head_dim, h]. dense: [h, heads·head_dim].
        mlp: the dense MLP, or the shared expert.
        gate: the router, fp32 weights; None in a dense layer.
    """

    input_norm: Tensor
    post_norm: Tensor
    head_norms: Tensor
    qkv: Tensor
    dense: Tensor
    mlp: Mlp
    gate: LLaDA2MoeGate | None

    @classmethod
    def empty(cls, place: Place, config: LLaDA2Config, layer: int) -> LayerWeights:
        """Return one without values; ``layer`` counts all layers."""
        h, d = config.hidden_size, config.head_dim
        heads, both = config.num_attention_heads, 2 * config.num_key_value_heads
        sparse = layer in config.moe_layers
        shared = config.moe_intermediate_size * config.num_shared_experts
        return cls(
            input_norm=_empty(place, h),
            post_norm=_empty(place, h),
            head_norms=_empty(place, 2, d),
            qkv=_empty(place, (heads + both) * d, h),
            dense=_empty(place, h, heads * d),
            mlp=Mlp.empty(place, h, shared if sparse else config.intermediate_size),
            gate=LLaDA2MoeGate(config).to(place.device).requires_grad_(False) if sparse else None,
        )

    def named(self, stem: str) -> dict[str, Tensor]:
        """Return published name to tensor."""
        parts = {
            f"{stem}.input_layernorm.weight": self.input_norm,
            f"{stem}.post_attention_layernorm.weight": self.post_norm,
            f"{stem}.attention.query_layernorm.weight": self.head_norms[0],
            f"{stem}.attention.key_layernorm.weight": self.head_norms[1],
            f"{stem}.attention.query_key_value.weight": self.qkv,
            f"{stem}.attention.dense.weight": self.dense,
        }
        if self.gate is None:
            return parts | self.mlp.named(f"{stem}.mlp")
        parts[f"{stem}.mlp.gate.weight"] = self.gate.weight.data
        parts[f"{stem}.mlp.gate.expert_bias"] = self.gate.expert_bias
        return parts | self.mlp.named(f"{stem}.mlp.shared_experts")


@dataclass(frozen=True)
class BackboneWeights:
    """The whole model but its routed experts.

    Attributes:
        config: constants. place: where the weights are; routers are fp32 whatever its dtype.
        embedding: [vocabulary, h]. head: likewise, the same tensor where the model ties them.
        norm: [h]. layers: all layers, dense ones first.
    """

    config: LLaDA2Config
    place: Place
    embedding: Tensor
    head: Tensor
    norm: Tensor
    layers: tuple[LayerWeights, ...]

    @property
    def cost(self) -> CostGeometry:
        """Sizes."""
        return cost_geometry(self.config, self.place.item_bytes)

    @classmethod
    def empty(cls, place: Place, config: LLaDA2Config, layers: int) -> BackboneWeights:
        """Return memory for the dense layers and the first ``layers`` MoE layers, no values."""
        vocabulary, h = config.vocab_size, config.hidden_size
        embedding = _empty(place, vocabulary, h)
        head = embedding if config.tie_word_embeddings else _empty(place, vocabulary, h)
        count = config.first_k_dense_replace + layers
        every = tuple(LayerWeights.empty(place, config, layer) for layer in range(count))
        return cls(config, place, embedding, head, _empty(place, h), every)

    @classmethod
    def random(cls, place: Place, cost: CostGeometry, layers: int, seed: int) -> BackboneWeights:
        """Return random weights: projections keep the size of what they map, norms are 1.

        They are drawn on the place's device, so they depend on its kind.
        """
        weights = cls.empty(place, published_config(cost), layers)
        generator = torch.Generator(place.device).manual_seed(seed)
        for name, tensor in weights.named().items():
            if name.endswith("expert_bias"):
                tensor.zero_()
            elif "norm" in name:
                tensor.fill_(1.0)
            elif name.startswith("model.word_embeddings"):
                tensor.normal_(generator=generator)
            else:
                tensor.normal_(0.0, tensor.shape[1] ** -0.5, generator=generator)
        return weights

    @classmethod
    def from_model(cls, source: Model, place: Place) -> BackboneWeights:
        """Return the weights of a model in memory, or of a checkpoint folder (read from disk).

        Raises:
            CheckpointError: the folder holds no such model.
        """
        loaded = isinstance(source, LLaDA2MoeModelLM)
        config = source.config if loaded else LLaDA2Config.from_file(source)
        weights = cls.empty(place, config, len(config.moe_layers))
        wanted = weights.named()
        if not loaded:
            load_tensors(source, wanted)
            return weights
        state = source.state_dict()
        for name, tensor in wanted.items():
            tensor.copy_(state[name])
        return weights

    def named(self) -> dict[str, Tensor]:
        """Return published name to tensor; a tied head is left out."""
        named = {"model.word_embeddings.weight": self.embedding, "model.norm.weight": self.norm}
        if self.head is not self.embedding:
            named["lm_head.weight"] = self.head
        for layer, weights in enumerate(self.layers):
            named |= weights.named(f"model.layers.{layer}")
        return named


def _empty(place: Place, *shape: int) -> Tensor:
    return torch.empty(*shape, device=place.device, dtype=place.dtype)
