"""The shortest pass over the ways to share slots between its layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean
from oled_sim.engine.sharing import least_cost_shares, spread_rest
from oled_sim.policy import Event, Setting

from ._exact_split import BY_TRANSFER, ON_GPU, Search, best_split, time_split

# ruff: noqa: ANN001, ANN202


class PassPlans(NamedTuple):
    """What every layer of a pass would do with any number of slots. L layers, E experts.

    Attributes:
        time_us: float64 [L, E + 1], time of each layer with c slots, c ≤ most.
        lanes: int8 [L, E + 1, E], the lanes that take that time.
        most: int64 [L], |A|: more slots than that change nothing.
    """

    time_us: NDArray[np.float64]
    lanes: NDArray[np.int8]
    most: NDArray[np.int64]


def new_plans(layers: int, experts: int) -> PassPlans:
    """Return empty plans."""
    return PassPlans(
        time_us=np.zeros((layers, experts + 1)),
        lanes=np.zeros((layers, experts + 1, experts), np.int8),
        most=np.zeros(layers, np.int64),
    )


def plan_layer(plans: PassPlans, setting: Setting, search: Search, event: Event) -> None:
    """Find the shortest layer for every number of slots, in place."""
    timer, layer, count = setting.timer, event.layer, len(event.experts)
    plans.most[layer] = count
    _time_by_slots(
        timer.lanes,
        timer.queue,
        timer.tables,
        search,
        layer,
        len(event.routes),
        event.tokens,
        np.argsort(event.tokens, kind="stable"),
        np.empty(count, np.int64),
        plans.lanes[layer],
        plans.time_us[layer],
    )


@lean
def _time_by_slots(
    lanes, queue, tables, search, layer, rows, tokens, order, decided, plans, time_us
):  # fmt: skip
    """Fill lanes int8 [E + 1, E] and times float64 [E + 1] for 0 to |A| slots.

    One slot more makes the last arrival a resident, from where the search goes on.
    """
    known_us = np.inf
    for slots in range(len(order) + 1):
        if slots > 0:
            for i in range(len(decided) - 1, -1, -1):
                if decided[i] == BY_TRANSFER:
                    decided[i] = ON_GPU
                    break
            known_us = time_split(lanes, queue, tables, layer, rows, tokens, decided, slots)
        if not known_us >= 0.0:
            known_us = np.inf  # outside the profile
        time_us[slots] = best_split(
            lanes, queue, tables, search, layer, rows, tokens, order, slots, decided, known_us
        )
        for i in range(len(decided)):
            plans[slots, i] = decided[i]


def share_slots(plans: PassPlans, setting: Setting) -> NDArray[np.int64]:
    """Return the slots per layer, int64 [L], that make the pass shortest.

    The layers of a pass follow one another, so its time is the sum of theirs. With experts of one
    size every slot that some layer can use is used, as min(Σ C, Σ |A|) hits are the most; of
    the ways to do so the shortest is found exactly, by dynamic programming over layers and slots
    used, O(L · ΣC · E). If sizes differ the shortest of all that fit is found. Slots that no layer
    can use go one by one to the layers that have fewest.
    """
    unit = int(np.gcd.reduce(setting.expert_bytes))
    size = setting.expert_bytes // unit
    units = int((setting.capacity * size).sum())
    slots = least_cost_shares(plans.time_us, plans.most, size, units)
    spread_rest(slots, size, units, setting.routing.experts)
    return slots
