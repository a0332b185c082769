"""Attention backends: which keys a query sees.

LLaDA2 attention is block-causal: a position sees its whole block and every earlier one, blocks
being counted from absolute position 0. Masks are boolean throughout (an additive 0/1 mask is
silently wrong).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oled_sim.model.config import LLaDA2Config


class BlockCausalAttention:
    """Attention over the whole window, no cache: every sequence starts at position 0.

    Args:
        block_length: tokens per block.
        lengths: when given, the pass is one flat sequence (B = 1) that holds sequences of
            these lengths one after the other; otherwise each of B rows is a sequence.
    """

    def __init__(self, block_length: int, lengths: Sequence[int] | None = None) -> None:
        self.block_length = block_length
        self.lengths = lengths

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`~oled_sim.model.layers.AttentionBackend`."""
        if self.lengths is None:
            return self._attend(q, k, v)
        parts = zip(*(x.split(list(self.lengths), dim=2) for x in (q, k, v)), strict=True)
        return torch.cat([self._attend(*part) for part in parts], dim=2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        block = torch.arange(q.shape[2], device=q.device) // self.block_length
        mask = block <= block.unsqueeze(1)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class Segment:
    """Positions ``start`` to ``stop`` of one cache row, run in one pass.

    Both are multiples of the block length: a pass runs whole blocks.
    """

    row: int
    start: int
    stop: int

    @property
    def length(self) -> int:
        """Number of positions."""
        return self.stop - self.start


class KVCache:
    """Preallocated keys and values of a batch of requests, one row each.

    Attributes:
        keys, values: [layers, rows, key/value heads, capacity, head_dim]. Zero at first: what a
            mask hides must still be finite, for zero weight times NaN is NaN.
    """

    def __init__(
        self,
        config: LLaDA2Config,
        rows: int,
        capacity: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, capacity)
        self.keys = torch.zeros(*shape, config.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)


class CachedAttention:
    """Attention of one pass over a ragged batch whose earlier blocks are in a :class:`KVCache`.

    The pass is one flat sequence (B = 1): the segments one after the other, no padding. Its own
    keys and values are written to the cache; a later pass over the same positions overwrites
    them, so a block's entries count once the block is clean.

    Segments of equal length attend together. A key beyond a row's segment lies in a later block
    than any of its queries, so the block-causal mask covers rows of different lengths, too.

    Args:
        cache: of the batch.
        segments: what the pass runs, in the order of its tokens.
        block_length: tokens per block.
    """

    def __init__(self, cache: KVCache, segments: Sequence[Segment], block_length: int) -> None:
        device = cache.keys.device
        rows = torch.tensor([s.row for s in segments])
        sizes = torch.tensor([s.length for s in segments])
        self.cache = cache
        self._rows = _upload(rows.repeat_interleave(sizes), device)
        self._positions = _upload(segment_positions(segments), device)
        lengths = sorted({s.length for s in segments})
        self._groups = [_Group(segments, n, block_length, cache) for n in lengths]
        order = torch.cat([g.tokens for g in self._groups])
        self._restore = order.argsort()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`~oled_sim.model.layers.AttentionBackend`; q, k and v have B = 1."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self._rows, :, self._positions] = k[0].transpose(0, 1)
        values[self._rows, :, self._positions] = v[0].transpose(0, 1)
        if len(self._groups) == 1:
            return self._groups[0].attend(q[0], keys, values).unsqueeze(0)
        parts = [g.attend(q[0].index_select(1, g.tokens), keys, values) for g in self._groups]
        return torch.cat(parts, dim=1).index_select(1, self._restore).unsqueeze(0)


class _Group:
    """Segments of one length, attended to in one call.

    Attributes:
        tokens: int64 [B·n], where their tokens lie in the pass.
    """

    def __init__(
        self, segments: Sequence[Segment], length: int, block_length: int, cache: KVCache
    ) -> None:
        members = [s for s in segments if s.length == length]
        device = cache.keys.device
        self.length = length
        self.stop = max(s.stop for s in members)
        self.tokens = _upload(_token_indices(segments, length), device)
        self._rows = _row_index([s.row for s in members], cache.keys.shape[1], device)
        mask = self._block_causal(members, block_length)
        self._mask = mask if mask is None else _upload(mask, device)

    def _block_causal(self, members: Sequence[Segment], block_length: int) -> Tensor | None:
        """Return bool [B, 1, n, keys], or None where every query sees every key."""
        same_stop = all(s.stop == self.stop for s in members)
        if same_stop and self.length <= block_length:
            return None
        starts = torch.tensor([s.start for s in members])
        queries = starts.unsqueeze(1) + torch.arange(self.length)
        keys = torch.arange(self.stop)
        return (keys // block_length <= (queries // block_length).unsqueeze(-1)).unsqueeze(1)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from q [heads, B·n, d] to one layer's cache [rows, kv heads, capacity, d]."""
        heads, _, width = q.shape
        q = q.view(heads, -1, self.length, width).transpose(0, 1)
        k, v = keys[self._rows, :, : self.stop], values[self._rows, :, : self.stop]
        return _fold_attend(q, k, v, self._mask).transpose(0, 1).reshape(heads, -1, width)


def _fold_attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attend with the query heads of a group as further queries of their key head.

    So keys are never repeated, and every fused kernel applies.
    """
    batch, heads, length, width = q.shape
    kv_heads = k.shape[1]
    share = heads // kv_heads
    folded = q.reshape(batch, kv_heads, share * length, width)
    mask = mask if mask is None else mask.repeat(1, 1, share, 1)
    return scaled_dot_product_attention(folded, k, v, attn_mask=mask).reshape(q.shape)


def segment_positions(segments: Sequence[Segment]) -> Tensor:
    """Return the positions of all segments, int64, one after the other."""
    return torch.cat([torch.arange(s.start, s.stop) for s in segments])


def _token_indices(segments: Sequence[Segment], length: int) -> Tensor:
    """Return where the tokens of the segments of ``length`` lie in the pass."""
    sizes = torch.tensor([s.length for s in segments])
    return (sizes.repeat_interleave(sizes) == length).nonzero().squeeze(1)


def _row_index(rows: list[int], total: int, device: torch.device) -> slice | Tensor:
    """Index cache rows without a copy when they are all rows in order."""
    whole = rows == list(range(total))
    return slice(None) if whole else _upload(torch.tensor(rows), device)


def _upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to the device without waiting for the work queued there."""
    return tensor.to(device, non_blocking=True)
