"""The counts at which each table is measured."""

from __future__ import annotations

from dataclasses import dataclass

from oled_sim.geometry import CostGeometry

MIB = 1 << 20
MOST_TOKENS = 4096
"""Tokens of one pass that the profile must cover: batch × block length."""


@dataclass(frozen=True)
class Axes:
    """Points of every axis, ascending."""

    copies: list[int]
    tokens: list[int]
    head_tokens: list[int]
    experts: list[int]
    tokens_per_expert: list[int]
    dense_tokens: list[int]
    context: list[int]
    requests: list[int]
    keys: list[int]
    cache_bytes: int

    def reachable(self, experts: int, tokens_per_expert: int, cost: CostGeometry) -> bool:
        """Whether interpolation needs this cell of the expert table for passes in range.

        A pass of T tokens routes at most k·T rows, so a cell is needed only if the lowest corner
        of those it belongs to is within k · 4,096 rows.
        """
        rows, columns = self.experts, self.tokens_per_expert
        lowest_row = rows[max(rows.index(experts) - 1, 0)]
        lowest_column = columns[max(columns.index(tokens_per_expert) - 1, 0)]
        return lowest_row * lowest_column <= cost.top_k * MOST_TOKENS


def full_axes(cost: CostGeometry) -> Axes:
    """Return the points of a real profile; the expert's own size is one of the copies."""
    powers = [1 << i for i in range(15)]
    copies = {4096 << i for i in range(15)} | {cost.expert_bytes}
    return Axes(
        copies=sorted(copies),
        tokens=powers,
        head_tokens=powers[:13],
        experts=[1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256],
        tokens_per_expert=powers[:13],
        dense_tokens=powers[:14],
        context=[0, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768],
        requests=powers[:11],
        keys=[1, 32, 128, 256, 512, 1024, 2048, 4096, 8192],
        cache_bytes=8 << 30,
    )


def quick_axes(cost: CostGeometry) -> Axes:
    """Return a few points, to run all code in seconds on any machine."""
    return Axes(
        copies=sorted({4096, cost.expert_bytes, MIB}),
        tokens=[1, 4, 16],
        head_tokens=[1, 4, 16],
        experts=[1, 2, min(4, cost.experts)],
        tokens_per_expert=[1, 4],
        dense_tokens=[1, 8],
        context=[0, 32],
        requests=[1, 2],
        keys=[1, 32],
        cache_bytes=MIB,
    )
