"""Splitting misses by load alone: the comparison that the OLED paper calls load-only dispatch."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.tables import CostTables, cpu_experts_us, cpu_link_us
from oled_sim.engine.jit import merged
from oled_sim.policy import Event, Lane, Setting

Dispatch = Literal["transfer", "load"]
"""``transfer`` copies every miss to the GPU; ``load`` shares misses out by :func:`load_split`."""


def split_by_load(event: Event, setting: Setting) -> NDArray[np.int64]:
    """Return a lane per activated expert: residents on the GPU, misses split by load alone."""
    lanes = event.missed.astype(np.int64)  # Lane.TRANSFER or Lane.GPU
    missed = np.flatnonzero(lanes)
    if len(missed):
        copy_us = setting.timer.lanes.copy_us[event.layer]
        order = missed[np.argsort(-event.tokens[missed], kind="stable")]
        tables, rows = setting.costs.tables, len(event.routes)
        transfers = load_split(tables, event.tokens[order], rows, copy_us)
        lanes[order[transfers:]] = Lane.CPU
    return lanes


@merged
def load_split(tables: CostTables, tokens: NDArray[np.int64], rows: int, copy_us: float) -> int:
    """Return how many of the heaviest misses to transfer, the rest going to the CPU.

    All copies take equally long, so moving the heaviest g experts leaves the CPU the least work
    of all choices of g. The g with the least max(g · copy, link + makespan of the rest) is
    found by trying all; of equal ones the fewest transfers.

    Args:
        tables: costs.
        tokens: int64 [M], tokens of the misses, descending.
        rows: tokens of the event.
        copy_us: time to copy one expert.
    """
    misses, left = len(tokens), 0
    for i in range(misses):
        left += tokens[i]
    best, best_us = misses, misses * copy_us
    for g in range(misses):
        cpu_us = cpu_link_us(tables, rows) + cpu_experts_us(tables, misses - g, left)
        longest = max(cpu_us, g * copy_us)  # NaN outside the profile: no choice
        if longest < best_us or (longest == best_us and g < best):
            best, best_us = g, longest
        left -= tokens[g]
    return best
