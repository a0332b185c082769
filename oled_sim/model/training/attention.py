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
    """Who sees whom in B sequences of (C + 1)·S positions.

    Attributes:
        document: int32 [B, S]. block: int32 [B, S], as in :class:`Layout`.
        copies: C.
    """

    document: Tensor
    block: Tensor
    copies: int

    @classmethod
    def of(cls, layout: Layout, copies: int) -> Visibility:
        """Take what matters for attention from a layout."""
        return cls(layout.document, layout.block.to(torch.int32), copies)

    def mask_function(self) -> MaskFunction:
        """Return whether a query sees a key, for FlexAttention; arguments broadcast."""
        document, block, copies = self.document, self.block, self.copies
        window = document.shape[1]

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            query_copy, key_copy = query // window, key // window
            query, key = query % window, key % window
            query_block, key_block = block[batch, query], block[batch, key]
            same = (query_copy == key_copy) & (query_block == key_block)
            earlier = (key_copy == copies) & (key_block < query_block)
            return (document[batch, query] == document[batch, key]) & (same | earlier)

        return sees

    def dense(self) -> Tensor:
        """Return the whole mask, bool [B, 1, (C + 1)·S, (C + 1)·S]."""
        rows, window = self.document.shape
        index = torch.arange((self.copies + 1) * window, device=self.document.device)
        batch = torch.arange(rows, device=self.document.device).view(-1, 1, 1)
        none = torch.zeros((), dtype=torch.int64, device=self.document.device)
        return self.mask_function()(
            batch, none, index.view(1, -1, 1), index.view(1, 1, -1)
        ).unsqueeze(1)

    def document_indices(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each document's row, and its positions in all copies: int64."""
        window = self.document.shape[1]
        copies = torch.arange(self.copies + 1, device=self.document.device) * window
        for row, documents in enumerate(self.document):
            sizes = torch.unique_consecutive(documents, return_counts=True)[1]
            for places in torch.arange(window, device=documents.device).split(sizes.tolist()):
                yield row, (copies.unsqueeze(1) + places).flatten()

    def among(self, row: int, index: Tensor) -> Tensor:
        """Return the mask among positions ``index`` [N] of one row, bool [N, N]."""
        batch = torch.full((1, 1), row, device=index.device)
        return self.mask_function()(batch, batch, index.unsqueeze(1), index.unsqueeze(0))

    def tiles(self) -> Tensor:
        """Return which tiles may hold a visible pair, bool [B, T, T]; never misses one.

        Block and document numbers rise along a window, so a tile spans an interval of each and
        two tiles can only hold a visible pair where their intervals allow it.
        """
        copy = torch.arange(self.copies + 1, device=self.document.device)
        copy = copy.repeat_interleave(self.document.shape[1] // TILE)
        first, last = self._spans(self.block)
        first_document, last_document = self._spans(self.document)
        overlap = (first.unsqueeze(2) <= last.unsqueeze(1)) & (
            last.unsqueeze(2) >= first.unsqueeze(1)
        )
        documents = (first_document.unsqueeze(2) <= last_document.unsqueeze(1)) & (
            last_document.unsqueeze(2) >= first_document.unsqueeze(1)
        )
        same_copy = copy.unsqueeze(1) == copy.unsqueeze(0)
        earlier = (first.unsqueeze(1) < last.unsqueeze(2)) & (copy == self.copies)
        return documents & ((same_copy & overlap) | earlier)

    def _spans(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """First and last number of each tile of the sequence: int [B, T] twice."""
        tiles = numbers.unflatten(1, (-1, TILE))
        spans = tiles[:, :, 0], tiles[:, :, -1]
        first, last = (span.repeat(1, self.copies + 1) for span in spans)
        return first, last


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
