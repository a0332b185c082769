"""Decoding of held-out text with the true tokens filled in: acceptance and calibration.

All blocks of a window are decoded at once: a block depends on the clean blocks before it, and
an accepted position is filled with the true token, so later passes see true text. Hence the
accuracy of an accepted token is well defined.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oled_sim.model.training.data import Batch
from oled_sim.model.training.layout import Layout, lay_out
from oled_sim.model.training.objective import Runner

BINS = 10


@dataclass(slots=True)
class Acceptance:
    """Counts over the accepted real tokens (padding after a document is left out).

    Attributes:
        passes: passes of blocks that hold real tokens; blocks decode independently.
        bins: fp64 [3, BINS]: accepted tokens, sum of confidence, correct ones, by confidence.
    """

    passes: Tensor
    bins: Tensor

    def __add__(self, other: Acceptance) -> Acceptance:
        return Acceptance(self.passes + other.passes, self.bins + other.bins)

    def zero(self) -> Acceptance:
        """Return the neutral element."""
        return Acceptance(torch.zeros_like(self.passes), torch.zeros_like(self.bins))

    def summary(self) -> dict[str, Any]:
        """Return tokens per pass, mean confidence, accuracy, and the reliability curve."""
        count, confidence, correct = self.bins.tolist()
        tokens = sum(count)
        return {
            "tokens": int(tokens),
            "tokens_per_pass": tokens / max(1.0, float(self.passes)),
            "confidence": sum(confidence) / max(1.0, tokens),
            "accuracy": sum(correct) / max(1.0, tokens),
            "bins": [
                {"tokens": int(n), "confidence": c / n, "accuracy": r / n}
                for n, c, r in zip(count, confidence, correct, strict=True)
                if n
            ],
        }


@torch.no_grad()
def decode_with_truth(
    runner: Runner, batch: Batch, *, block_length: int, threshold: float
) -> Acceptance:
    """Decode every block of ``batch`` from all masks by the rule of LLaDA2.0.

    A pass accepts the masked positions whose confidence exceeds ``threshold``, or else the most
    confident one (a quota of one token per pass: as many steps as the block is long, or more).
    """
    length = torch.full((len(batch.tokens),), block_length, device=batch.tokens.device)
    layout = lay_out(batch.starts, length)
    masked = batch.used.clone()
    has_real = _any_in_block(batch.real, layout)
    device = batch.tokens.device
    total = Acceptance(
        torch.zeros((), dtype=torch.float64, device=device),
        torch.zeros(3, BINS, dtype=torch.float64, device=device),
    )
    for _ in range(block_length):
        total.passes += (_any_in_block(masked, layout) & has_real).sum()
        confidence, guess = _predict(runner, batch, masked, layout)
        accepted = accept(confidence, masked, layout, threshold)
        _count(total.bins, confidence, guess == batch.tokens, accepted & batch.real)
        masked = masked & ~accepted
    return total


def accept(confidence: Tensor, masked: Tensor, layout: Layout, threshold: float) -> Tensor:
    """Return the positions that a pass accepts, bool [B, S]: at least one per masked block."""
    confidence = confidence.masked_fill(~masked, -1.0)
    best = _best_in_block(confidence, layout)
    above = confidence > threshold
    fallback = _first_in_block(masked & (confidence >= best), layout) & (best <= threshold)
    return above | fallback


def _predict(runner: Runner, batch: Batch, masked: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Return probability and id of the most likely token, [B, S] each."""
    noisy = batch.tokens.masked_fill(masked, runner.model.config.mask_token_id)
    hidden = runner.hidden(noisy.unsqueeze(1), batch.tokens, layout).squeeze(1)
    best = runner.model.lm_head(hidden).float().softmax(-1).max(-1)
    return best.values, best.indices


def _best_in_block(values: Tensor, layout: Layout) -> Tensor:
    """Return the largest value of each position's block, [B, S]."""
    best = torch.full_like(values, -1.0).scatter_reduce(1, layout.block, values, "amax")
    return best.gather(1, layout.block)


def _first_in_block(flags: Tensor, layout: Layout) -> Tensor:
    """Keep the first true position of each block."""
    index = torch.arange(flags.shape[1], device=flags.device).expand(flags.shape)
    place = index.masked_fill(~flags, flags.shape[1])
    first = torch.full_like(place, flags.shape[1]).scatter_reduce(1, layout.block, place, "amin")
    return flags & (index == first.gather(1, layout.block))


def _any_in_block(flags: Tensor, layout: Layout) -> Tensor:
    """Return per block, [B, S], whether any of its positions is true; false beyond the last."""
    counts = torch.zeros_like(layout.block).scatter_add(1, layout.block, flags.long())
    return counts > 0


def _count(bins: Tensor, confidence: Tensor, right: Tensor, accepted: Tensor) -> None:
    index = (confidence * BINS).long().clamp(max=BINS - 1).flatten()
    for row, values in enumerate((accepted, confidence * accepted, right & accepted)):
        bins[row].scatter_add_(0, index, values.flatten().double())
