"""Sharing a budget between layers so that a sum of costs is least: exact dynamic programming.

For costs that are known for every layer and number of slots, such as the layers' times in a pass
or their hits in a run. Sharing by weight is in ``budget``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean

# ruff: noqa: ANN001, ANN201, ANN202


def least_cost_shares(
    cost: NDArray[np.float64], most: NDArray[np.int64], size: NDArray[np.int64], units: int
) -> NDArray[np.int64]:
    """Return the slots of each layer, int64 [L], for which the costs sum to the least.

    Where all slots are of one size, exactly min(units / size, Σ most) slots are used; else as many
    as cost least and fit. Of equal sums the one with fewer slots in later layers. O(L · units · E).

    Args:
        cost: float64 [L, E + 1], cost of each layer with 0 to ``most`` slots; no NaN.
        most: int64 [L], more slots than that are of no use.
        size: int64 [L], units of one slot, their greatest common divisor 1.
        units: the budget.
    """
    used = min(units, int((most * size).sum()))
    best = np.full((len(size) + 1, used + 1), np.inf)
    slots = np.zeros(len(size), np.int64)
    _fill(cost, most, size, best, slots)
    return slots


@lean
def _fill(cost, most, size, best, slots):
    """Fill ``slots``; ``best`` [L + 1, U + 1]: least cost of the first layers with u units."""
    layers, units = len(most), best.shape[1] - 1
    best[0, 0] = 0.0
    reach = 0
    for layer in range(layers):
        before, after = best[layer], best[layer + 1]
        for u in range(min(reach, units) + 1):
            if before[u] == np.inf:
                continue
            for c in range(min(most[layer], (units - u) // size[layer]) + 1):
                total = before[u] + cost[layer, c]
                to = u + c * size[layer]
                after[to] = min(after[to], total)
        reach += most[layer] * size[layer]
    u = units
    for other in range(units if _one_size(size) else 0, units + 1):
        if best[layers, other] < best[layers, u]:
            u = other
    for layer in range(layers - 1, -1, -1):
        for c in range(min(most[layer], u // size[layer]) + 1):
            rest = u - c * size[layer]
            if best[layer, rest] + cost[layer, c] == best[layer + 1, u]:
                slots[layer] = c
                u = rest
                break


@lean
def _one_size(size):
    others = 0
    for i in range(1, len(size)):
        others += int(size[i] != size[0])
    return others == 0


@lean
def spread_rest(slots, size, units, experts):
    """Give away the slots that are left, one by one, to the layers that have fewest."""
    left = units
    for layer in range(len(slots)):
        left -= slots[layer] * size[layer]
    while True:
        least = -1
        for layer in range(len(slots)):
            fits = slots[layer] < experts and size[layer] <= left
            if fits and (least < 0 or slots[layer] < slots[least]):
                least = layer
        if least < 0:
            return
        slots[least] += 1
        left -= size[least]
