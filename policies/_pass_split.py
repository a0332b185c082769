"""The shortest pass over the ways to share slots between its layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean
from oled_sim.engine.sharing import least_cost_shares, spread_rest
from oled_sim.policy import Event, Setting

from ._exact_split import (
    BY_TRANSFER,
    ON_GPU,
    Search,
    best_of_neighbours,
    improve_last,
    time_split,
)

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


def plan_pass(
    plans: PassPlans, setting: Setting, search: Search, events: Sequence[Event]
) -> NDArray[np.int64]:
    """Return the slots per layer, int64 [L], that make a pass shortest, and fill ``plans``.

    The layers of a pass follow one another, so its time is the sum of theirs. With experts of one
    size every slot that some layer can use is used, as min(Σ C, Σ |A|) hits are the most; of
    the ways to do so the shortest is found exactly, by dynamic programming over layers and slots
    used, O(L · ΣC · E). If sizes differ the shortest of all that fit is found. Slots that no layer
    can use go one by one to the layers that have fewest.
    """
    unit = int(np.gcd.reduce(setting.expert_bytes))
    size = setting.expert_bytes // unit
    units = int((setting.capacity * size).sum())
    plans.most[:] = 0
    plans.time_us[:, 0] = 0.0  # of layers that do not run
    for event in events:
        plans.most[event.layer] = len(event.experts)
    missed = max(0, int(plans.most.sum()) - units) if unit == setting.expert_bytes[0] else units
    for event in events:
        _plan_layer(plans, setting, search, event, max(0, len(event.experts) - missed))
    slots = least_cost_shares(plans.time_us, plans.most, size, units)
    spread_rest(slots, size, units, setting.routing.experts)
    return slots


def _plan_layer(
    plans: PassPlans, setting: Setting, search: Search, event: Event, fewest: int
) -> None:
    """Find the shortest layer for every number of slots from ``fewest`` on, in place."""
    timer, layer, count = setting.timer, event.layer, len(event.experts)
    plans.time_us[layer, :fewest] = np.inf
    _time_by_slots(
        timer.lanes,
        timer.queue,
        timer.tables,
        search,
        layer,
        len(event.routes),
        event.tokens,
        np.argsort(event.tokens, kind="stable"),
        fewest,
        np.full(count, BY_TRANSFER),
        plans.lanes[layer],
        plans.time_us[layer],
    )


@lean
def _time_by_slots(
    lanes, queue, tables, search, layer, rows, tokens, order, fewest, decided, plans, time_us
):  # fmt: skip
    """Fill lanes int8 [E + 1, E] and times float64 [E + 1] for ``fewest`` to |A| slots.

    One slot more makes the last arrival a resident, from where the search goes on.
    """
    known_us = np.inf
    for slots in range(fewest, len(order) + 1):
        if slots > fewest:
            for i in range(len(decided) - 1, -1, -1):
                if decided[i] == BY_TRANSFER:
                    decided[i] = ON_GPU
                    break
            known_us = time_split(lanes, queue, tables, layer, rows, tokens, decided, slots)
        if not known_us >= 0.0:
            known_us = np.inf  # outside the profile
        time_us[slots] = best_of_neighbours(
            lanes, queue, tables, search, layer, rows, tokens, order, slots, decided, known_us
        )
        for i in range(len(decided)):
            plans[slots, i] = decided[i]


def planned_lanes(
    plans: PassPlans, setting: Setting, search: Search, event: Event, slots: int
) -> NDArray[np.int64]:
    """Return the lanes of a layer with its slots, int64 [A], after a last improvement."""
    timer, layer, count = setting.timer, event.layer, len(event.experts)
    slots = min(slots, count)
    lanes = plans.lanes[layer, slots, :count].astype(np.int64)
    improve_last(
        timer.lanes,
        timer.queue,
        timer.tables,
        search,
        layer,
        len(event.routes),
        event.tokens,
        slots,
        lanes,
        float(plans.time_us[layer, slots]),
    )
    return lanes
