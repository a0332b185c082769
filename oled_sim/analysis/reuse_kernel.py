"""The walk over the events of a request that measures reuse distances, compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel

# ruff: noqa: ANN001, ANN201

FIRST_TOUCH = -1


class Recency(NamedTuple):
    """What LRU remembers of L layers of E experts.

    Attributes:
        stack: int64 [L, E], the experts of a layer, most recently used first.
        depth: int64 [L], how many of them were ever used; the rest of a row means nothing.
        clock: int64 [L], events of the layer so far.
        last: int64 [L, E], event of the layer that used the expert last, counted from 1.
    """

    stack: NDArray[np.int64]
    depth: NDArray[np.int64]
    clock: NDArray[np.int64]
    last: NDArray[np.int64]

    @classmethod
    def empty(cls, layers: int, experts: int) -> Recency:
        """Return a memory of nothing."""
        table, column = np.zeros((layers, experts), np.int64), np.zeros(layers, np.int64)
        return cls(table, column, column.copy(), table.copy())


@kernel
def walk(recency, event_layer, slot_offset, slots, owner, events, distinct):
    """Measure the reuse distances of all activations, and bring ``recency`` up to date.

    Args:
        recency: a :class:`Recency`.
        event_layer: int [V].
        slot_offset: int64 [V + 1]; ``slots[slot_offset[v]:slot_offset[v + 1]]`` are the expert ids
            that event v routes to, in row order, with repetition.
        slots: int [N·k].
        owner: int64 [Σ|A|], filled with the event of each activation.
        events: int64 [Σ|A|], filled with its event distance, or FIRST_TOUCH.
        distinct: int64 [Σ|A|], filled with its stack distance, or FIRST_TOUCH.
    """
    experts = recency.stack.shape[1]
    stamp = np.full(experts, -1, np.int64)  # the last event that activated the expert
    found = np.empty(experts, np.int64)
    rest = np.empty(experts, np.int64)
    n = 0
    for v in range(len(event_layer)):
        layer = event_layer[v]
        stack, last = recency.stack[layer], recency.last[layer]
        recency.clock[layer] += 1
        now = recency.clock[layer]
        size = 0
        # Backwards, so that an expert is met first at its last row: the most recent comes first.
        for s in range(slot_offset[v + 1] - 1, slot_offset[v] - 1, -1):
            expert = slots[s]
            if stamp[expert] != v:
                stamp[expert] = v
                found[size] = expert
                size += 1
        others = 0
        first = n
        for place in range(recency.depth[layer]):
            expert = stack[place]
            if stamp[expert] == v:
                owner[n] = v
                events[n] = now - last[expert]
                distinct[n] = place
                n += 1
            else:
                rest[others] = expert
                others += 1
        for _ in range(size - (n - first)):
            owner[n] = v
            events[n] = FIRST_TOUCH
            distinct[n] = FIRST_TOUCH
            n += 1
        for place in range(size):
            stack[place] = found[place]
            last[found[place]] = now
        for place in range(others):
            stack[size + place] = rest[place]
        recency.depth[layer] = size + others
