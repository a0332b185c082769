"""The shortest layer over the ways to choose residents and to split the rest."""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, shared_expert_us
from oled_sim.engine.jit import kernel
from oled_sim.engine.state import CPU, EXPERT_BYTES, FREED_BY_HITS, GPU, H2D
from oled_sim.engine.whatif import add_cpu, add_hit, add_transfer, open_trial, run_trial

# ruff: noqa: ANN001, ANN202

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2
TRIED = 32
"""Loads up to this are tried once per lane: experts of equal load are interchangeable."""
MIN_GAIN_US = 1e-6
"""An exchange must gain more than rounding does."""


@kernel
def best_split(lanes, queue, tables, layer, rows, tokens, order, slots, floor_us, decided):
    """Choose a lane for every activated expert; those on the GPU are meant to be resident.

    Candidates: for every x, x neighbours in the order of load go to the CPU; of the others the
    heaviest min(C, |A| − x) are resident and the rest is transferred. They are timed in the order
    of a lower bound, until that exceeds the best time found. At last the last arrival is
    exchanged with others as long as that helps.

    Neighbours, not only the x lightest: measured costs do not always grow with tokens.

    Args:
        lanes, queue, tables: of a ``LayerTimer``.
        layer: index of the layer. rows: tokens of the event.
        tokens: int64 [A]. order: int64 [A], activated experts by ascending tokens.
        slots: C of the layer.
        floor_us: no grouped kernel is shorter.
        decided: int64 [A], filled with the lanes.
    """
    count = len(order)
    bounds = np.full((count + 1, count + 1), np.inf)
    _fill_bounds(bounds, lanes, tables, layer, rows, tokens, order, slots, floor_us)
    best_us = np.inf
    trial = np.empty(count, np.int64)
    decided[:] = BY_TRANSFER
    while True:
        x, first = _least(bounds)
        if not bounds[x, first] < best_us:
            break
        bounds[x, first] = np.inf
        _arrange(trial, order, x, first, min(slots, count - x))
        us = _time(lanes, queue, tables, layer, rows, tokens, trial, slots)
        if us < best_us:
            best_us = us
            decided[:] = trial
    _improve_last(lanes, queue, tables, layer, rows, tokens, slots, decided, best_us)


@kernel
def _improve_last(lanes, queue, tables, layer, rows, tokens, slots, decided, best_us):
    """Exchange the last arrival, whose computation nothing hides, as long as that helps."""
    improved = True
    while improved:
        improved = False
        last = -1
        for i in range(len(decided)):
            if decided[i] == BY_TRANSFER:
                last = i
        partner = -1
        tried = np.zeros((3, TRIED), np.bool_)
        for i in range(len(decided) if last >= 0 else 0):
            load = min(tokens[i], TRIED - 1)
            if decided[i] == BY_TRANSFER or tokens[i] == tokens[last] or tried[decided[i], load]:
                continue
            tried[decided[i], load] = True
            _exchange(decided, i, last)
            us = _time(lanes, queue, tables, layer, rows, tokens, decided, slots)
            _exchange(decided, i, last)
            if us < best_us - MIN_GAIN_US:
                best_us, partner = us, i
        if partner >= 0:
            _exchange(decided, partner, last)
            improved = True


@kernel
def _exchange(decided, a, b):
    decided[a], decided[b] = decided[b], decided[a]


@kernel
def _arrange(decided, order, on_cpu, first, hits):
    """Send ``on_cpu`` neighbours from ``first`` on to the CPU, keep the heaviest others."""
    for i in range(len(order) - 1, -1, -1):
        if first <= i < first + on_cpu:
            decided[order[i]] = ON_CPU
        elif hits > 0:
            decided[order[i]] = ON_GPU
            hits -= 1
        else:
            decided[order[i]] = BY_TRANSFER


@kernel
def _least(table):
    """Return row and column of the least value, of equal ones the first."""
    row, column = 0, 0
    for i in range(table.shape[0]):
        for j in range(table.shape[0] - i):
            if table[i, j] < table[row, column]:
                row, column = i, j
    return row, column


@kernel
def _fill_bounds(bounds, lanes, tables, layer, rows, tokens, order, slots, floor_us):
    """Fill [x, first] with a time that no run of that candidate undercuts; NaN becomes ∞."""
    count = len(order)
    link_us, shared_us = cpu_link_us(tables, rows), shared_expert_us(tables, rows)
    for x in range(count + 1):
        hits = min(slots, count - x)
        transfers = count - x - hits
        gpu_us = shared_us + floor_us * (int(hits > 0) + int(transfers > 0))
        copies_us = transfers * lanes.copy_us[layer]
        load = 0
        for i in range(x):
            load += tokens[order[i]]
        previous = -1
        for first in range(count - x + 1):
            if load == previous:  # the same candidate but for the names of experts
                load += _slide(tokens, order, x, first)
                continue
            previous = load
            cpu_us = link_us + cpu_experts_us(tables, x, load) if x > 0 else 0.0
            bound = _bound(tables.interference, gpu_us, copies_us, cpu_us, floor_us)
            if bound >= 0.0:
                bounds[x, first] = bound
            load += _slide(tokens, order, x, first)


@kernel
def _slide(tokens, order, width, first):
    """Return by how much the load of neighbours changes when they move on by one."""
    if width == 0 or first + width >= len(order):
        return 0
    return tokens[order[first + width]] - tokens[order[first]]


@kernel
def _bound(interference, gpu_us, copies_us, cpu_us, floor_us):
    """Return a time that lanes with this much work cannot undercut."""
    longest = _slowed(interference, CPU, H2D, cpu_us, copies_us)
    if copies_us > 0.0:  # the last arrival is computed after all copies
        longest = max(longest, _slowed(interference, H2D, CPU, copies_us, cpu_us) + floor_us)
    return max(longest, _slowed(interference, GPU, CPU, gpu_us, cpu_us))


@kernel
def _slowed(interference, lane, other, work_us, other_us):
    """Return the least time for ``work_us`` of a lane while another has ``other_us`` to do."""
    factor = np.inf
    for busy in range(8):
        if busy >> other & 1:
            factor = min(factor, interference[lane, busy])
    return min(work_us * factor, work_us + other_us * (1.0 - 1.0 / factor))


@kernel
def _time(lanes, queue, tables, layer, rows, tokens, decided, slots):
    """Return the time from the gate to the end of all lanes, staging and slots as they will be.

    With transfers all slots hold hits, so a kept arrival takes the slot of a hit once that is
    computed; arrivals are kept before hits, those that arrive first before the others.
    """
    open_trial(lanes, tables, layer, rows, 0)
    work, demand = lanes.work, lanes.demand
    kept = 0
    for i in range(len(decided)):
        if decided[i] == ON_GPU:
            add_hit(work, tokens[i])
        elif decided[i] == ON_CPU:
            add_cpu(work, tokens[i])
        else:
            add_transfer(work, demand, i, tokens[i], kept < slots)
            kept += int(kept < slots)
    work[FREED_BY_HITS] = kept * work[EXPERT_BYTES]
    return run_trial(lanes, queue, tables)
