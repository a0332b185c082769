"""Noise of block diffusion: which tokens are masked or replaced, and which count in the loss.

Every block of every copy draws its own noise level (LLaDA2 technical report, section on block
diffusion pre-training: a block of masked tokens is predicted from itself and the clean blocks
before it). Complementary masks are those of the report's fine-tuning; replaced tokens are the
token-to-token part of LLaDA2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from oled_sim.model.training.layout import Layout
from oled_sim.model.training.recipe import Noise


@dataclass(frozen=True, slots=True)
class Noisy:
    """C noisy copies of B windows of S tokens.

    Attributes:
        tokens: int64 [B, C, S].
        counted: bool [B, C, S], positions whose prediction counts in the loss.
    """

    tokens: Tensor
    counted: Tensor


def corrupt(
    clean: Tensor, layout: Layout, noise: Noise, mask_id: int, generator: torch.Generator
) -> Noisy:
    """Draw the noisy copies of ``clean``, int64 [B, S]."""
    masks: list[Tensor] = []
    parts: list[tuple[Tensor, Tensor]] = []
    for copy in range(noise.copies):
        pair = masks[-1] if noise.complementary and copy % 2 else None
        masks.append(draw_mask(layout, noise, pair, generator))
        parts.append(_apply(clean, masks[-1], layout, noise, mask_id, generator))
    tokens, counted = zip(*parts, strict=True)
    return Noisy(torch.stack(tokens, 1), torch.stack(counted, 1))


def draw_mask(
    layout: Layout, noise: Noise, pair: Tensor | None, generator: torch.Generator
) -> Tensor:
    """Return the masked positions of one copy, bool [B, S].

    Where ``pair``, the mask of another copy, is given, blocks of independent masks take its
    complement; blocks that show a prefix draw afresh.
    """
    low, high = noise.level
    level = low + (high - low) * _per_block(layout, generator)
    scattered = _uniform(layout.block, generator) < level if pair is None else ~pair
    shown = (_per_block(layout, generator) * layout.length).long()  # 0 .. length - 1 tokens
    by_prefix = _per_block(layout, generator) < noise.prefix_share
    return torch.where(by_prefix, layout.offset >= shown, scattered)


def _apply(
    clean: Tensor,
    masked: Tensor,
    layout: Layout,
    noise: Noise,
    mask_id: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Mask, replace some visible tokens of edit blocks; return tokens and counted positions."""
    tokens = clean.masked_fill(masked, mask_id)
    if not noise.edit_share:
        return tokens, masked
    edited = _per_block(layout, generator) < noise.edit_share
    hit = edited & ~masked & (_uniform(clean, generator) < noise.edit_rate)
    # Tokens of elsewhere in the batch: as frequent as in text, hence harder to tell.
    shift = torch.randint(1, clean.numel(), (), generator=generator, device=clean.device)
    index = torch.arange(clean.numel(), device=clean.device)
    others = clean.flatten()[(index + shift) % clean.numel()].view_as(clean)
    return torch.where(hit, others, tokens), masked | edited


def _per_block(layout: Layout, generator: torch.Generator) -> Tensor:
    """One uniform number per block, at each of its positions: float [B, S]."""
    return _uniform(layout.block, generator).gather(1, layout.block)


def _uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, generator=generator, device=like.device)
