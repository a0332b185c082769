"""Which positions see which, for sequences of C noisy copies followed by the clean one.

A sequence holds ``[noisy 1 | … | noisy C | clean]``, each of S tokens with the same positions.
A noisy block sees itself and the clean blocks before it; a clean block sees itself and the
clean blocks before it; nothing sees another document, and clean never sees noisy (LLaDA2
technical report; dFactory ``train_llada2_bd.py`` with C = 1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from oled_sim.model.training.layout import Layout

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

TILE = 128
"""Rows and columns of the tiles that FlexAttention skips or computes."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Who sees whom in B sequences of T = (C + 1)·S positions.

    Attributes:
        number: int32 [B, T], of the block that a position belongs to; the blocks of a noisy
            copy have numbers above all clean ones and those of earlier copies.
        first: int32 [B, T], number of the first clean block of the position's document.
        block: int32 [B, T], number of the position's block among the clean ones: clean blocks
            from ``first`` up to this one, not included, come before it.
        copies: C.
    """

    number: Tensor
    first: Tensor
    block: Tensor
    copies: int

    @classmethod
    def of(cls, layout: Layout, copies: int) -> Visibility:
        """Derive who sees whom from a layout."""
        window = layout.block.shape[1]
        block = layout.block.to(torch.int32).repeat(1, copies + 1)
        starts = layout.position == 0
        first = torch.where(starts, layout.block, 0).cummax(1).values.to(torch.int32)
        copy = torch.arange(1, copies + 2, dtype=torch.int32, device=block.device) * window
        copy[-1] = 0
        number = block + copy.repeat_interleave(window)
        return cls(number, first.repeat(1, copies + 1), block, copies)

    def mask_function(self) -> MaskFunction:
        """Return whether a query sees a key, for FlexAttention; arguments broadcast."""
        number, first, block = self.number, self.first, self.block

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            other = number[batch, key]
            before = (other >= first[batch, query]) & (other < block[batch, query])
            return before | (other == number[batch, query])

        return sees

    def dense(self) -> Tensor:
        """Return the whole mask, bool [B, 1, T, T]."""
        rows, length = self.number.shape
        index = torch.arange(length, device=self.number.device)
        batch = torch.arange(rows, device=index.device).view(-1, 1, 1)
        sees = self.mask_function()
        return sees(batch, batch, index.view(1, -1, 1), index.view(1, 1, -1)).unsqueeze(1)

    def document_indices(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each document's row, and its positions in all copies: int64."""
        window = self.number.shape[1] // (self.copies + 1)
        copies = torch.arange(self.copies + 1, device=self.number.device) * window
        for row, first in enumerate(self.first[:, :window]):
            sizes = torch.unique_consecutive(first, return_counts=True)[1]
            for places in torch.arange(window, device=first.device).split(sizes.tolist()):
                yield row, (copies.unsqueeze(1) + places).flatten()

    def among(self, row: int, index: Tensor) -> Tensor:
        """Return the mask among positions ``index`` [N] of one row, bool [N, N]."""
        batch = torch.full((1, 1), row, device=index.device)
        return self.mask_function()(batch, batch, index.unsqueeze(1), index.unsqueeze(0))

    def tiles(self) -> Tensor:
        """Return which tiles may hold a visible pair, bool [B, T / TILE, T / TILE].

        Numbers rise along a copy, so a tile spans an interval of them, and two tiles can only
        hold a visible pair where their intervals allow it: no visible pair is missed.
        """
        low, high = (self.number[:, start::TILE].unsqueeze(1) for start in (0, TILE - 1))
        same = (low <= high.transpose(1, 2)) & (high >= low.transpose(1, 2))
        first = self.first[:, ::TILE].unsqueeze(2)
        block = self.block[:, TILE - 1 :: TILE].unsqueeze(2)
        return same | ((high >= first) & (low < block))


class DenseAttention:
    """Attention through a dense mask: any device; the reference."""

    def __init__(self, visibility: Visibility) -> None:
        self.mask = visibility.dense()

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`oled_sim.model.layers.AttentionBackend`."""
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1]
        )


class DocumentAttention:
    """Attention within one document after the other: the CPU, where masked-out work costs most."""

    def __init__(self, visibility: Visibility) -> None:
        self._parts = [
            (row, index, visibility.among(row, index))
            for row, index in visibility.document_indices()
        ]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`oled_sim.model.layers.AttentionBackend`."""
        mixed = torch.zeros_like(q)
        for row, index, mask in self._parts:
            parts = (x[row : row + 1, :, index] for x in (q, k, v))
            mixed[row, :, index] = functional.scaled_dot_product_attention(
                *parts, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
            )[0]
        return mixed


class SparseAttention:
    """FlexAttention over the tiles that hold a visible pair: CUDA; run it compiled."""

    def __init__(self, visibility: Visibility) -> None:
        self.mask = sparse_mask(visibility)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See :class:`oled_sim.model.layers.AttentionBackend`."""
        mixed = flex_attention(q, k, v, block_mask=self.mask, enable_gqa=q.shape[1] != k.shape[1])
        return cast(Tensor, mixed)


def sparse_mask(visibility: Visibility) -> BlockMask:
    """Return the tile mask of ``visibility`` (no wait for the device, no dense mask)."""
    tiles = visibility.tiles().unsqueeze(1)
    order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    length = tiles.shape[-1] * TILE
    return BlockMask.from_kv_blocks(
        tiles.sum(-1, dtype=torch.int32),
        order,
        BLOCK_SIZE=TILE,
        mask_mod=visibility.mask_function(),
        seq_lengths=(length, length),
    )
