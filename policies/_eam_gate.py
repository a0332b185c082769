"""What moe-infinity decides at a gate and on arrivals: kernels, bit for bit as its hooks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import inlined, merged

from ._candidates import compare_at_arrival, compare_by_class, list_pools
from ._eam import most_like

# ruff: noqa: ANN001, ANN202

LIKELY = 1e-8
"""What the released predictor adds to every count, so that no expert is left out."""
MATCH = {"released": 0, "observed": 1, "all": 2}
RELEASED, OBSERVED = 0, 1


class Infinity(NamedTuple):
    """What the kernels read. L layers, E experts, n rows of the collection or room for more.

    Attributes:
        visits, tie: float64 [L, E], what experts of a class are compared by. values: their sum.
        executing, protected: bool [L, E]. at: int64 [1], the one layer in which any executes.
        slots: int64 [L].
        counts: float64 [L, E], stale: bool [L], products: float64 [L, n], of the running EAM.
        units: float64 [L, E, n]. ranked: float64 [n, L, E], the counts of the rows, falling.
            orders: int32 [n, L, E], whose they are. access: int64 [n].
        likeness: float64 [n], unit: float64 [E], scratch.
        match: by number. predicts: whether every gate predicts. populates: whether pools were
            filled for the request. by_tokens: what an activation adds to the EAM. most_first:
            whether for a prefetch the most visited leave first.
    """

    visits: NDArray[np.float64]
    tie: NDArray[np.float64]
    values: NDArray[np.float64]
    executing: NDArray[np.bool_]
    at: NDArray[np.int64]
    protected: NDArray[np.bool_]
    slots: NDArray[np.int64]
    counts: NDArray[np.float64]
    stale: NDArray[np.bool_]
    products: NDArray[np.float64]
    units: NDArray[np.float64]
    ranked: NDArray[np.float64]
    orders: NDArray[np.int32]
    access: NDArray[np.int64]
    likeness: NDArray[np.float64]
    unit: NDArray[np.float64]
    match: int
    predicts: bool
    populates: bool
    by_tokens: bool
    most_first: bool


@merged
def decide_infinity(own, gate, v, layer, resident, lanes, scores):
    """Transfer every miss, count the event, and say who leaves first."""
    first = gate.offset[v]
    own.executing[own.at[0]] = False  # that layer alone: a live host finds the others cold
    own.at[0] = layer
    for i in range(len(lanes)):
        expert = gate.experts[first + i]
        lanes[i] = 1 - int(resident[expert])
        own.executing[layer, expert] = True
        own.visits[layer, expert] += 1.0
        own.values[layer, expert] = own.visits[layer, expert] + own.tie[layer, expert]
        own.counts[layer, expert] += np.float64(gate.tokens[first + i]) if own.by_tokens else 1.0
    own.stale[layer] = True
    if own.populates and _any_protected(own):
        _spare_the_list(own, layer, scores)
        return
    compare_by_class(own.executing[layer], own.values[layer], scores)


@merged
def arrive_infinity(own, layer, resident, scores):
    """Say whom an arrival replaces."""
    if own.populates and _any_protected(own):
        _spare_the_list(own, layer, scores)
        return
    if own.most_first:
        for expert in range(len(scores)):
            scores[expert] = -own.visits[layer, expert]
        compare_at_arrival(resident[layer], own.protected[layer], scores, scores)
        return
    compare_at_arrival(resident[layer], own.protected[layer], own.values[layer], scores)


@merged
def ask_infinity(own, gate, v, layer, resident, wanted):
    """Find the EAM most like the running one, and list what it has in layers from this one on."""
    if not own.predicts or len(own.ranked) == 0:
        return 0
    layers = len(own.visits)
    row = most_like(
        own.counts, own.stale, own.products, own.units,
        layer + 1 if own.match == RELEASED else 0,
        layer + 1 if own.match == OBSERVED else layers,
        own.unit, own.likeness,
    )  # fmt: skip
    row = max(row, 0)  # nothing to compare: all tie
    own.access[row] += 1
    n = list_pools(
        own.orders[row, layer:], layer, own.slots, resident, own.executing, own.protected, wanted
    )  # fmt: skip
    for i in range(n):
        x, place = int(wanted[i, 0]), int(wanted[i, 2])
        wanted[i, 2] = (own.ranked[row, x, place] + LIKELY) * (1.0 - (x - layer) / (layers + 1))
    return n


@inlined
def _any_protected(own):
    for layer in range(own.protected.shape[0]):
        for expert in range(own.protected.shape[1]):
            if own.protected[layer, expert]:
                return True
    return False


@inlined
def _spare_the_list(own, layer, scores):
    """Keep who is on the list of the request, the least visited leaving first; nobody else."""
    for expert in range(len(scores)):
        listed = own.protected[layer, expert]
        scores[expert] = own.visits[layer, expert] if listed else -np.inf
