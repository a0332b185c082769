"""An upper bound on hits in one pool whose experts differ in size.

Choosing what to keep is then a knapsack over time, and Belady's rule a heuristic. Two relaxations
bound it from above, and the lower is taken:

- every expert as small as the smallest, for which Belady's rule is optimal;
- experts may be kept in part, and the budget holds on average over time rather than always. A hit
  costs bytes times events between two uses; the cheapest first, the last one in part, until
  budget times events is spent (the bound PFOO-U of Berger, Beckmann and Harchol-Balter 2018).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.batch import Batch
from oled_sim.engine.future import Horizon, next_uses
from oled_sim.engine.jit import kernel
from oled_sim.engine.rules import Group
from oled_sim.policy import NEVER

# ruff: noqa: ANN001, ANN202


def most_hits_in_one_pool(
    fed: Callable[[], Iterable[tuple[Group, Batch]]],
    expert_bytes: NDArray[np.int64],
    experts: int,
    budget_bytes: int,
    *,
    cold: bool = False,
) -> int:
    """Return more hits than any policy without prefetching can have in a run, or as many.

    Args:
        fed: yields what runs in order, made ready, without history; called twice.
        expert_bytes: int64 [L]. experts: E.
        budget_bytes: of the pool, empty at first.
        cold: the pool is emptied before every group.
    """
    layers = len(expert_bytes)
    horizon = Horizon(fed, layers, experts, cold=cold)
    slots = budget_bytes // int(expert_bytes.min())
    resident = np.zeros(layers * experts, np.bool_)
    upcoming = np.full(layers * experts, NEVER, np.int64)
    small = total = first = 0
    price: list[NDArray[np.int64]] = []
    for group, batch in fed():
        if cold:
            total += _hits_on_average(price, budget_bytes, first)
            resident[:], price, first = False, [], 0
        course, beyond = batch.course, horizon.beyond(group)()
        following, _ = next_uses(course.offset, course.event_layer, course.experts, first, beyond)
        event = np.repeat(np.arange(len(course.event_layer)), np.diff(course.offset))
        keys = course.event_layer[event] * experts + course.experts
        small += _hits_of_small_ones(course.offset, keys, following, slots, resident, upcoming)
        used = following < NEVER
        gaps = following[used] - event[used] - first
        price.append(gaps * expert_bytes[course.event_layer[event[used]]])
        first += len(course.event_layer)
    return min(small, total + _hits_on_average(price, budget_bytes, first))


def _hits_on_average(price: list[NDArray[np.int64]], budget_bytes: int, events: int) -> int:
    """Return how many of the cheapest fit budget times events, the last one in part at most."""
    if not price:
        return 0
    spent = np.cumsum(np.sort(np.concatenate(price)).astype(np.float64))
    return int(np.searchsorted(spent, float(budget_bytes) * events, side="right"))


@kernel
def _hits_of_small_ones(offset, keys, following, slots, resident, upcoming):
    """Count the hits of Belady's rule in one pool of equal slots; the pool goes on, in place.

    Args:
        keys: int64 [N], layer · E + expert of each use. following: int64 [N], their next uses.
        resident: bool [L · E]. upcoming: int64 [L · E], next use of the residents.
    """
    last = [(-upcoming[key], key) for key in np.flatnonzero(resident)]
    last.append((np.int64(-NEVER), np.int64(0)))  # of this type; harmless
    heapq.heapify(last)
    hits, held = 0, resident.sum()
    for v in range(len(offset) - 1):
        for i in range(offset[v], offset[v + 1]):
            key = keys[i]
            hits += int(resident[key])
            held += int(not resident[key])
            resident[key] = True
            upcoming[key] = following[i]
            heapq.heappush(last, (-following[i], key))
        while held > slots:
            use, key = heapq.heappop(last)
            if resident[key] and upcoming[key] == -use:  # else it has been used since
                resident[key] = False
                held -= 1
    return hits
