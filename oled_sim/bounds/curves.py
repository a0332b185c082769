"""Hits of every layer with every number of slots, in one pass over a run.

Keeping the best C of the residents and the activated by an order that does not depend on C has
the inclusion property (Mattson et al. 1970): whoever stays with C slots stays with C + 1. So one
list per layer, in which the first C are the residents of a cache with C slots, gives the hits of
all caches at once. It holds for what was used last (LRU) and for what is used soonest (Belady's
rule, whose hits are the most that any demand-only policy has).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.batch import Batch
from oled_sim.engine.future import Horizon, next_uses
from oled_sim.engine.jit import kernel
from oled_sim.engine.rules import Group
from oled_sim.engine.sharing import least_cost_shares

# ruff: noqa: ANN001, ANN201, ANN202

Order = Literal["soonest", "latest"]
"""Who stays: what is used soonest, or what was used last."""


def hits_by_slots(
    fed: Callable[[], Iterable[tuple[Group, Batch]]],
    layers: int,
    experts: int,
    order: Order,
    *,
    cold: bool = False,
) -> NDArray[np.int64]:
    """Return the hits of a run in each layer with 0 to E slots, int64 [L, E + 1].

    All misses are transferred and nothing is prefetched; caches start empty.

    Args:
        fed: yields what runs in order, made ready, without history; called twice.
        layers, experts: L and E.
        order: who stays.
        cold: caches are emptied before every group.
    """
    horizon = Horizon(fed, layers, experts, cold=cold)
    hits = np.zeros((layers, experts + 1), np.int64)
    stack, depth, key = _empty(layers, experts)
    first = 0
    for group, batch in fed():
        if cold:
            stack, depth, key = _empty(layers, experts)
            first = 0
        course = batch.course
        beyond = horizon.beyond(group)()
        following, _ = next_uses(course.offset, course.event_layer, course.experts, first, beyond)
        _replay(course.offset, course.event_layer, course.experts, following,
                order == "soonest", first, stack, depth, key, hits)  # fmt: skip
        first += len(course.event_layer)
    return np.cumsum(hits, axis=1)


def best_static_split(
    hits: NDArray[np.int64], expert_bytes: NDArray[np.int64], budget_bytes: int
) -> NDArray[np.int64]:
    """Return the fixed slots of each layer, int64 [L], with the most hits in all.

    Exact for any curves. (With ``soonest`` they are concave, and going by marginal gains would do.)

    Args:
        hits: int64 [L, E + 1], of :func:`hits_by_slots`.
        expert_bytes: int64 [L]. budget_bytes: what is shared.
    """
    unit = int(np.gcd.reduce(expert_bytes))
    most = np.full(len(hits), hits.shape[1] - 1, np.int64)
    lost = (hits[:, -1:] - hits).astype(np.float64)
    return least_cost_shares(lost, most, expert_bytes // unit, budget_bytes // unit)


def _empty(
    layers: int, experts: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    shape = (layers, experts)
    return np.zeros(shape, np.int64), np.zeros(layers, np.int64), np.zeros(shape, np.int64)


@kernel
def _replay(offset, event_layer, experts, following, soonest, first_event, stack, depth, key, hits):
    """Go through the events of a group; ``hits`` [L, E + 1] counts those that take c slots.

    Args:
        stack: int64 [L, E], experts by the fewest slots that hold them, ``depth`` [L] of them.
        key: int64 [L, E], the least stays first.
    """
    most = stack.shape[1]
    active = np.zeros(most, np.bool_)
    pool, equal = np.empty(most, np.int64), np.zeros(most, np.int64)
    for v in range(len(event_layer)):
        layer = event_layer[v]
        count = offset[v + 1] - offset[v]
        for i in range(count):
            expert = experts[offset[v] + i]
            active[expert] = True
            pool[i] = expert
            stamp = -((first_event + v) * most + i)
            key[layer, expert] = following[offset[v] + i] if soonest else stamp
        for c in range(depth[layer]):
            hits[layer, c + 1] += int(active[stack[layer, c]])
        depth[layer] = update_list(
            stack[layer], depth[layer], key[layer], equal, active, pool, count
        )
        for i in range(offset[v], offset[v + 1]):
            active[experts[i]] = False


@kernel
def update_list(stack, depth, key, used, active, pool, waiting):
    """Put activated experts into the list; return its new length.

    The least ``key`` stays first, then the largest ``used``, then the lowest id. The activated
    experts are ``active``, and the first ``waiting`` of ``pool``.

    A cache of c slots keeps the c best of its residents and the activated. Compared with one slot
    less it has one more candidate, ``stack[c]``, and keeps one more: the best that is left.
    """
    c = 0
    while waiting > 0 or c < depth:
        if c < depth and not active[stack[c]]:
            pool[waiting] = stack[c]
            waiting += 1
        if waiting == 0:
            break
        best = 0
        for i in range(1, waiting):
            a, b = pool[i], pool[best]
            tie = key[a] == key[b]
            if key[a] < key[b] or (tie and (used[a], -a) > (used[b], -b)):
                best = i
        stack[c] = pool[best]
        waiting -= 1
        pool[best] = pool[waiting]
        c += 1
    return c
