"""Activated sets from routing rows, and the confidence that is known before a pass."""

from __future__ import annotations

import numpy as np

from oled_sim.engine.jit import inlined, kernel

# ruff: noqa: ANN001, ANN201, ANN202


@kernel
def activated_sets(rows, routes, gates, n_experts):
    """Unite the routes of every event.

    Args:
        rows: int64 [V + 1], routing rows of each event.
        routes: unsigned [N, k].
        gates: float32 [N, k], or [1, 1] for none.
        n_experts: E.

    Returns:
        offset int64 [V + 1], experts int64 [ΣA] in the order of their last row (and last slot
        in it), tokens int64 [ΣA], gate mass float64 [ΣA] (NaN without gates).
    """
    events, k = len(rows) - 1, routes.shape[1]
    most = 0
    for v in range(events):
        most += min(n_experts, (rows[v + 1] - rows[v]) * k)
    offset = np.zeros(events + 1, np.int64)
    experts = np.empty(most, np.int64)
    tokens = np.zeros(most, np.int64)
    mass = np.zeros(most, np.float64)
    slot = np.full(n_experts, -1, np.int64)
    gated = len(gates) == len(routes) and gates.shape[1] == k
    n = 0
    for v in range(events):
        n = _unite(rows[v], rows[v + 1], routes, gates, gated, n, slot, experts, tokens, mass)
        offset[v + 1] = n
    return offset, experts[:n].copy(), tokens[:n].copy(), mass[:n].copy()


@inlined
def _unite(first, end, routes, gates, gated, n, slot, experts, tokens, mass):
    """Append the experts of one event; return the new number of entries.

    Rows are read backwards, so an expert is met first at its last row; the order is then turned.
    """
    begin = n
    for row in range(end - 1, first - 1, -1):
        for j in range(routes.shape[1] - 1, -1, -1):
            expert = int(routes[row, j])
            if slot[expert] < begin:
                slot[expert] = n
                experts[n] = expert
                n += 1
            tokens[slot[expert]] += 1
            mass[slot[expert]] += np.float64(gates[row, j]) if gated else np.nan
    left, right = begin, n - 1
    while left < right:
        experts[left], experts[right] = experts[right], experts[left]
        tokens[left], tokens[right] = tokens[right], tokens[left]
        mass[left], mass[right] = mass[right], mass[left]
        left += 1
        right -= 1
    return n


@kernel
def carry_confidence(token_offset, position, confidence, positions):
    """Return float64 [T]: for each token row the last known confidence before its pass, else 1.

    Args:
        token_offset: int64 [I + 1]. position: int64 [T]. confidence: float32 [T], NaN unknown.
        positions: one more than the largest position.
    """
    known = np.ones(positions)
    before = np.empty(len(position))
    for i in range(len(token_offset) - 1):
        for t in range(token_offset[i], token_offset[i + 1]):
            before[t] = known[position[t]]
        for t in range(token_offset[i], token_offset[i + 1]):
            if not np.isnan(confidence[t]):
                known[position[t]] = np.float64(confidence[t])
    return before
