"""Layers that every LLaDA2 block has: normalisation, rotary embedding, attention, dense MLP.

The attention layer projects, normalises and rotates; which keys a query sees is decided by an
:class:`AttentionBackend`, so training, cached generation and full-window generation share one
model. Sources: ``modeling_llada2_moe.py`` of the published LLaDA2.0 / 2.1 checkpoints (module
names, order of operations, dtypes at each step).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from oled_sim.model.config import LLaDA2Config


class AttentionBackend(Protocol):
    """Softmax attention over keys that the backend chooses, scaled by ``1 / sqrt(head_dim)``."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend.

        Args:
            layer: index of the layer, 0 to ``num_hidden_layers - 1``.
            q: [B, query heads, S, head_dim], after QK norm and rotary embedding.
            k: [B, key/value heads, S, head_dim], likewise.
            v: [B, key/value heads, S, head_dim].

        Returns:
            [B, query heads, S, head_dim] in the dtype of ``q``.
        """
        ...


class LLaDA2MoeRMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x`` [..., width]; returns its dtype."""
        normed = functional.rms_norm(x.float(), self.weight.shape, eps=self.eps)
        return self.weight * normed.to(x.dtype)  # rounded before the weight, as published


class LLaDA2MoeRotaryEmbedding(nn.Module):
    """Angles of rotary position embedding; holds no state, so no dtype cast can harm it."""

    def __init__(self, config: LLaDA2Config) -> None:
        super().__init__()
        self.dim = config.rotary_dim
        self.theta = config.rope_theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, [..., S, rotary_dim / 2] in ``dtype``, of ``positions``.

        Angles are computed in fp32, which holds positions exactly.
        """
        steps = torch.arange(0, self.dim, 2, dtype=torch.float32, device=positions.device)
        inverse = 1.0 / self.theta ** (steps / self.dim)
        angles = positions.float().unsqueeze(-1) * inverse
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the leading dimensions of each head, pairing dimension i with i + rotary_dim / 2.

    Args:
        x: [B, heads, S, head_dim].
        cos, sin: [B, S, rotary_dim / 2], in the dtype of ``x``.

    Returns:
        ``x`` rotated; dimensions from rotary_dim on pass unchanged.
    """
    half = cos.shape[-1]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class LLaDA2MoeAttention(nn.Module):
    """Grouped-query attention with a per-head norm on queries and keys before rotation."""

    def __init__(self, config: LLaDA2Config, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = config.num_attention_heads
        self.kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        width = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.query_key_value = nn.Linear(config.hidden_size, width, bias=False)
        self.query_layernorm = LLaDA2MoeRMSNorm(self.head_dim, config.rms_norm_eps)
        self.key_layernorm = LLaDA2MoeRMSNorm(self.head_dim, config.rms_norm_eps)
        self.dense = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self, hidden: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionBackend
    ) -> Tensor:
        """Attend over ``hidden`` [B, S, hidden_size]; returns the same shape and dtype."""
        batch, length, _ = hidden.shape
        fused = self.query_key_value(hidden)
        heads = fused.view(batch, length, -1, self.head_dim).transpose(1, 2)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        turned = rotate(torch.cat((self.query_layernorm(q), self.key_layernorm(k)), 1), *rotary)
        q, k = turned.split((self.heads, self.kv_heads), dim=1)
        mixed = attention(self.layer, q, k, v)
        return self.dense(mixed.transpose(1, 2).reshape(batch, length, -1))


class LLaDA2MoeMLP(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``; the dense layer and the shared expert."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``x`` [..., hidden_size] to the same shape and dtype."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
