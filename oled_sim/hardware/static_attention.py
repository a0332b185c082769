"""Attention of one request over a static cache, in static buffers that a graph can refer to."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from torch import Tensor

from oled_sim.hardware.place import Place
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.layers import LLaDA2MoeRotaryEmbedding

FINE, FINE_KEYS = 64, 512
"""Keys are padded to multiples of 64 up to 512, from there to eighths of a power of two."""


def padded_keys(keys: int) -> int:
    """Return the number of keys a block-sized pass attends to, padding included."""
    step = FINE if keys <= FINE_KEYS else max(FINE, (1 << (keys - 1).bit_length()) // 8)
    return -(-keys // step) * step


class StaticAttention:
    """Keys and values of one request, and softmax attention over them.

    Queries of a key/value head's group are folded into rows of one attention, so keys are never
    repeated and a masked memory-efficient kernel serves. A pass of exactly ``block`` tokens is
    one block: it sees everything before it and itself, keys padded as :func:`padded_keys` says
    and hidden by a mask. Any other pass attends to exactly its keys, block-causally, blocks being
    counted from position 0.

    Args:
        place: dtype and device of the cache.
        config: heads and rotary embedding.
        layers: number of layers.
        block: tokens per block.
        max_context: most tokens before and in a pass.

    Attributes:
        keys, values: [layers, kv heads, capacity, head_dim]. Zero at first: what a mask hides must
            be finite.
        positions: int64 [T] of the pass begun last.
        tokens: T.
        end: context + T.
    """

    def __init__(
        self, place: Place, config: LLaDA2Config, layers: int, block: int, max_context: int
    ) -> None:
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.block = block
        self.capacity = padded_keys(max_context)
        shape = (layers, self.kv_heads, self.capacity, self.head_dim)
        self.keys = torch.zeros(shape, device=place.device, dtype=place.dtype)
        self.values = torch.zeros_like(self.keys)
        self.tokens, self.end = block, block
        self._all_positions = torch.zeros(max_context, device=place.device, dtype=torch.int64)
        self._padding = torch.zeros(self.capacity, device=place.device, dtype=place.dtype)
        self._mask: Tensor | None = None
        self._tables = _rotary_tables(place, config, self.capacity)
        self._turns = [table[:max_context].clone() for table in self._tables]

    @property
    def positions(self) -> Tensor:
        """Absolute positions of the pass, int64 [T]."""
        return self._all_positions[: self.tokens]

    @property
    def bucket(self) -> int:
        """Keys that the attention of this pass reads: padded for a block, exact otherwise."""
        return self.bucket_of(self.end) if self.tokens == self.block else self.end

    def bucket_of(self, end: int) -> int:
        """Return the keys that a block reads which ends at position ``end``."""
        return padded_keys(end)

    def begin(self, tokens: int, context: int) -> None:
        """Prepare a pass of ``tokens`` tokens after ``context`` kept ones.

        Raises:
            ValueError: together they exceed what the cache was made for.
        """
        if context + tokens > len(self._all_positions):
            raise ValueError(
                f"{context} + {tokens} tokens exceed max_context {len(self._all_positions)}"
            )
        self.tokens, self.end = tokens, context + tokens
        torch.arange(context, self.end, out=self.positions)
        self._mask = None
        if tokens == self.block:
            self._padding[: self.end].zero_()
            self._padding[self.end :].fill_(-torch.inf)
        elif tokens > self.block:
            self._mask = self._block_causal()

    def turn(self) -> None:
        """Look up the pass's rotary embedding, for all layers."""
        for table, turns in zip(self._tables, self._turns, strict=True):
            torch.index_select(table, 0, self.positions, out=turns[: self.tokens])

    def __call__(self, layer: int, qkv: Tensor, norms: Tensor) -> Tensor:
        """Normalise and rotate, keep keys and values, attend.

        Args:
            layer: counted from 0 over all layers.
            qkv: [T, (heads + 2·kv heads)·head_dim], projected.
            norms: [2, head_dim], weights of the norm of queries and of keys.

        Returns:
            [T, heads·head_dim].
        """
        fused = qkv.view(len(qkv), -1, self.head_dim).transpose(0, 1)
        q, k, v = fused.split((self.heads, self.kv_heads, self.kv_heads))
        self.keys[layer].index_copy_(1, self.positions, self._rotated(k, norms[1]))
        self.values[layer].index_copy_(1, self.positions, v)
        return self._attend(layer, self._rotated(q, norms[0]))

    def _rotated(self, x: Tensor, norm: Tensor) -> Tensor:
        """Normalise heads [n, T, d] and turn them; see :func:`oled_sim.model.layers.rotate`."""
        x = F.rms_norm(x, norm.shape, norm, self.eps)
        cos, sin = (turns[: self.tokens] for turns in self._turns)
        half = sin.shape[-1] // 2
        first, second, rest = x.split((half, half, self.head_dim - 2 * half), dim=-1)
        turned = torch.cat((second, first), dim=-1) * sin
        turned.addcmul_(x[..., : 2 * half], cos)
        return torch.cat((turned, rest), dim=-1)

    def _attend(self, layer: int, q: Tensor) -> Tensor:
        """Attend from q [heads, T, d] to the layer's keys; returns [T, heads·d]."""
        keys, values = (x[layer, :, : self.bucket].unsqueeze(0) for x in (self.keys, self.values))
        folded = q.reshape(1, self.kv_heads, -1, self.head_dim)
        mask = self._mask
        if self.tokens == self.block:
            mask = self._padding[: self.bucket].expand(1, 1, folded.shape[2], self.bucket)
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        # [kv heads, share, T, d]; which dimension lies where in memory is the kernel's choice.
        mixed = mixed[0].unflatten(1, (-1, self.tokens))
        return mixed.permute(2, 0, 1, 3).reshape(self.tokens, -1)

    def _block_causal(self) -> Tensor:
        """Return an additive mask [1, 1, share·T, end], repeated for the query heads of a group.

        Its rows are aligned as the memory-efficient kernel wants them, or every layer would copy.
        """
        block = torch.arange(self.end, device=self.positions.device) // self.block
        hidden = block > block[self.end - self.tokens :].unsqueeze(1)
        rows = self.heads // self.kv_heads * self.tokens
        mask = self.keys.new_zeros(rows, -(-self.end // 16) * 16)[:, : self.end]
        mask.view(-1, self.tokens, self.end).masked_fill_(hidden, -torch.inf)
        return mask[None, None]


def _rotary_tables(place: Place, config: LLaDA2Config, positions: int) -> tuple[Tensor, Tensor]:
    """Return cosine and signed sine, [positions, rotary_dim] each: x·cos + swapped(x)·sin turns."""
    every = torch.arange(positions, device=place.device)
    cos, sin = LLaDA2MoeRotaryEmbedding(config)(every, place.dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
