"""What finemoe decides at a gate and on arrivals: kernels, bit for bit as its hooks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import inlined, lean, merged

from ._candidates import compare_at_arrival, compare_by_class, list_pools
from ._similarity import add_products
from ._sums import pairwise_sum

# ruff: noqa: ANN001, ANN202

UNSELECTED = 1e-6
"""What the released code adds to every expert of the predicted layers, so that all are queued."""
GATES, FULL_GATE, EMBEDDING = range(3)
"""Signals that a trace may lack."""


class Maps(NamedTuple):
    """What the kernels read. L layers, E experts, n rows of the store or room for more.

    Attributes:
        visits, probability: float64 [L, E], whose product ranks experts of a class.
        executing, protected: bool [L, E]. slots: int64 [L]. lacks: bool [3], signals.
        map: float64 [L, E], reached: int64 [2], products: float64 [n], of the pass so far.
        maps: float64 [n, L, E]. columns: float64 [L, E, n], the same. square: float64 [L, n],
            squares of norms up to each layer. orders: int32 [n, L, E].
        row: float64 [E], ranks: int64 [E], flat: float64 [L·E], number: int64 [L],
            found: int64 [L·E, 3], scratch.
        size: rows of the store. distance, least: d, fewest selected experts of a layer.
        released, truncated: ``select=released`` and ``evict=truncated``.
    """

    visits: NDArray[np.float64]
    probability: NDArray[np.float64]
    executing: NDArray[np.bool_]
    protected: NDArray[np.bool_]
    slots: NDArray[np.int64]
    lacks: NDArray[np.bool_]
    map: NDArray[np.float64]
    reached: NDArray[np.int64]
    products: NDArray[np.float64]
    maps: NDArray[np.float64]
    columns: NDArray[np.float64]
    square: NDArray[np.float64]
    orders: NDArray[np.int32]
    row: NDArray[np.float64]
    ranks: NDArray[np.int64]
    flat: NDArray[np.float64]
    number: NDArray[np.int64]
    found: NDArray[np.int64]
    size: int
    distance: int
    least: int
    released: bool
    truncated: bool


@merged
def decide_finemoe(own, gate, v, layer, resident, lanes, scores):
    """Transfer every miss, count the event, and say who leaves first."""
    first, ranks = gate.offset[v], own.ranks
    renew_layer(own.visits[layer], own.probability[layer], resident)
    own.executing[:] = False
    for expert in range(len(ranks)):
        ranks[expert] = int(own.protected[layer, expert])
    for i in range(len(lanes)):
        expert = gate.experts[first + i]
        lanes[i] = 1 - int(resident[expert])
        own.executing[layer, expert] = True
        own.visits[layer, expert] += 1.0
        ranks[expert] = 2
    _fill_values(own, layer, scores)
    compare_by_class(ranks, scores, scores)


@merged
def arrive_finemoe(own, layer, resident, scores):
    """Say whom an arrival replaces."""
    _fill_values(own, layer, scores)
    compare_at_arrival(resident[layer], own.protected[layer], scores, scores)


@inlined
def _fill_values(own, layer, scores):
    for expert in range(len(scores)):
        value = own.probability[layer, expert] * max(own.visits[layer, expert], 1.0)
        scores[expert] = np.floor(value) if own.truncated else value


@merged
def ask_finemoe(own, gate, v, layer, resident, wanted):
    """Add the layer to the map of the pass, and list the layers from d beyond the next on."""
    layers = len(own.map)
    for x in range(layers):  # those of the layer itself have been renewed before they counted
        if x != layer:
            renew_layer(own.visits[x], own.probability[x], resident[x])
    _observe(own, gate, v, layer)
    start = layer + 1 + own.distance
    if start >= layers or own.size == 0:
        return 0
    row, score = _nearest(own)
    order, number = own.orders[row, start:], own.number
    threshold = min(1.0, max(0.0, 1.0 - score))
    for x in range(layers - start):
        for expert in range(own.map.shape[1]):
            own.probability[start + x, expert] = own.maps[row, start + x, expert]
        number[x] = selected(
            own.probability[start + x], order[x], threshold, own.least, own.released
        )
    n = list_pools(order, start, own.slots, resident, own.executing, own.protected, own.found)
    for i in range(n):
        x, expert, place = own.found[i, 0], own.found[i, 1], own.found[i, 2]
        worth = own.probability[x, expert] * (1.0 - (x - start) / (layers + 1))
        wanted[i, 0], wanted[i, 1] = x, expert
        wanted[i, 2] = (worth if place < number[x - start] else 0.0) + UNSELECTED
    return n


@inlined
def _observe(own, gate, v, layer):
    """Add the gate probabilities of an event to the map of the pass."""
    row = own.row
    _fill_row(own, gate, v, row)
    total = pairwise_sum(row)
    for expert in range(len(row)):
        own.map[layer, expert] = row[expert] / total if total > 0.0 else 0.0
    own.reached[0] = layer + 1


@inlined
def _fill_row(own, gate, v, row):
    """Fill float64 [E] from the full gate, the top-k gates or token counts, whichever there is."""
    row[:] = 0.0
    if len(gate.full_gate) > 0:
        for expert in range(len(row)):
            row[expert] = gate.full_gate[v, expert]
    elif np.isnan(gate.gates[0, 0]):
        own.lacks[GATES] = True
        for i in range(gate.offset[v], gate.offset[v + 1]):
            row[gate.experts[i]] = gate.tokens[i]
    else:
        own.lacks[FULL_GATE] = True
        for i in range(gate.rows[v + 1] - 1, gate.rows[v] - 1, -1):  # as ``Event.gate_mass`` does
            for j in range(gate.routes.shape[1] - 1, -1, -1):
                row[gate.routes[i, j]] += np.float64(gate.gates[i, j])


@inlined
def _nearest(own):
    """Return the row of the store whose layers observed so far are most like, and its cosine."""
    observed, experts = own.reached[0], own.map.shape[1]
    for layer in range(own.reached[1], observed):
        add_products(own.columns[layer], own.map[layer], own.size, own.products)
    own.reached[1] = observed
    for layer in range(observed):
        for expert in range(experts):
            own.flat[layer * experts + expert] = own.map[layer, expert] * own.map[layer, expert]
    norm = np.sqrt(pairwise_sum(own.flat[: observed * experts]))
    best, most = 0, -np.inf
    for row in range(own.size):
        length = np.sqrt(own.square[observed - 1, row]) * norm
        cosine = own.products[row] / length if length > 0.0 else 0.0
        if cosine > most:
            best, most = row, cosine
    return best, most


@lean
def selected(probability, order, threshold, least, released):
    """Return how many of the likeliest experts of a layer are selected."""
    total, n = 0.0, 0
    for i in range(len(order)):
        total += probability[order[i]]
        if total > threshold or (total == threshold and not released):
            break
        n += 1
    some = probability[order[0]] > 0.0
    return max(n if released else n + 1, least) if some else 0


@lean
def renew_layer(visits, probability, resident):
    """Forget experts that left; those that came without a visit have one now. All [E]."""
    for expert in range(len(visits)):
        if visits[expert] > 0 and not resident[expert]:
            visits[expert] = probability[expert] = 0.0
        elif visits[expert] == 0 and resident[expert]:
            visits[expert] = 1.0
