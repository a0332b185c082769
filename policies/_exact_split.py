"""The shortest layer over all ways to choose residents and to split the rest."""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us
from oled_sim.engine.jit import kernel
from oled_sim.engine.state import EXPERT_BYTES, FREE_BYTES, FREED_BY_HITS
from oled_sim.engine.whatif import add_cpu, add_hit, add_transfer, open_trial, run_trial

# ruff: noqa: ANN001, ANN202


@kernel
def best_split(lanes, queue, tables, layer, rows, tokens, order, slots):
    """Return (x, h): send the x lowest-load experts to the CPU, keep the h heaviest resident.

    The |A| − x − h between them are transferred. Every x is tried, with h = min(slots, |A| − x), in
    the order of a lower bound of its time, until that exceeds the best time found.

    Args:
        lanes, queue, tables: of a ``LayerTimer``.
        layer: index of the layer. rows: tokens of the event.
        tokens: int64 [A]. order: int64 [A], activated experts by ascending tokens.
        slots: C of the layer.
    """
    count = len(order)
    bounds = np.empty(count + 1)
    cpu_tokens = 0
    for x in range(count + 1):
        transfers = count - x - min(slots, count - x)
        bounds[x] = _lower_bound(lanes, tables, layer, rows, x, cpu_tokens, transfers)
        if x < count:
            cpu_tokens += tokens[order[x]]
    best_us, best = np.inf, 0
    while True:
        x = _least(bounds)
        if not bounds[x] < best_us:
            return best, min(slots, count - best)
        hits = min(slots, count - x)
        us = _time(lanes, queue, tables, layer, rows, tokens, order, x, hits, slots)
        if us < best_us:
            best_us, best = us, x
        bounds[x] = np.inf


@kernel
def _least(values):
    """Return where the least value stands, of equal ones the first; NaN counts as infinite."""
    least = 0
    for i in range(1, len(values)):
        if values[i] < values[least] or np.isnan(values[least]):
            least = i
    return least


@kernel
def _lower_bound(lanes, tables, layer, rows, on_cpu, cpu_tokens, transfers):
    """Return what no arrangement can undercut: the work of copy engine and CPU, undisturbed."""
    bound = transfers * lanes.copy_us[layer]
    if on_cpu > 0:
        link_us = cpu_link_us(tables, rows)
        bound = max(bound, link_us + cpu_experts_us(tables, on_cpu, cpu_tokens))
    return bound


@kernel
def _time(lanes, queue, tables, layer, rows, tokens, order, on_cpu, hits, slots):
    """Return the time from the gate to the end of all lanes, staging and slots as they will be.

    With transfers all slots hold hits, so a kept arrival takes the slot of a hit once that is
    computed; arrivals are kept before hits, the last in the order of the event first.
    """
    count = len(order)
    transfers = count - on_cpu - hits
    open_trial(lanes, tables, layer, rows, 0)
    work, demand = lanes.work, lanes.demand
    is_transfer = np.zeros(count, np.bool_)
    for i in range(count):
        n = tokens[order[i]]
        if i < on_cpu:
            add_cpu(work, n)
        elif i < count - hits:
            is_transfer[order[i]] = True
        else:
            add_hit(work, n)
    kept = min(transfers, slots)
    row = 0
    for i in range(count):
        if is_transfer[i]:
            add_transfer(work, demand, i, tokens[i], row >= transfers - kept)
            row += 1
    work[FREED_BY_HITS] = kept * work[EXPERT_BYTES]
    work[FREE_BYTES] = 0
    return run_trial(lanes, queue, tables)
