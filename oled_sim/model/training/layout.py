"""Where documents and blocks lie in a batch of windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Documents and blocks of B windows of S tokens.

    Attributes:
        position: int64 [B, S], position within the document.
        document: int32 [B, S], number of the document in its window.
        block: int64 [B, S], number of the block in its window; blocks are counted from the start
            of each document, so no block spans two.
        offset: int64 [B, S], position within the block.
        length: int64 [B, 1], block length of each window.
    """

    position: Tensor
    document: Tensor
    block: Tensor
    offset: Tensor
    length: Tensor


def lay_out(starts: Tensor, length: Tensor) -> Layout:
    """Derive the layout from document starts, bool [B, S], and block lengths, int [B]."""
    index = torch.arange(starts.shape[1], device=starts.device).expand(starts.shape)
    begin = torch.where(starts, index, 0).cummax(dim=1).values
    position = index - begin
    length = length.to(torch.int64).unsqueeze(1)
    offset = position % length
    document = starts.cumsum(1, dtype=torch.int32)
    return Layout(position, document, (offset == 0).cumsum(1) - 1, offset, length)
