"""Activated sets from routing rows, and the confidence that is known before a pass."""

from __future__ import annotations

from typing import Any

import numpy as np

from oled_sim.engine.jit import inlined, kernel

# ruff: noqa: ANN001, ANN201, ANN202


@kernel
def activated_sets(rows, routes, n_experts):
    """Unite the routes of every event.

    Args:
        rows: int64 [V + 1], routing rows of each event.
        routes: unsigned [N, k].
        n_experts: E.

    Returns:
        offset int64 [V + 1], experts uint16 [ΣA] in the order of their last row (and last slot
        in it), tokens int32 [ΣA].
    """
    events = len(rows) - 1
    offset = np.zeros(events + 1, np.int64)
    count = np.zeros(n_experts, np.int32)
    met = np.empty(n_experts + 1, np.uint16)
    # Room grows as needed: fresh pages for the most possible would cost more than the union.
    experts = np.empty(64 * events + n_experts, np.uint16)
    tokens = np.empty(64 * events + n_experts, np.int32)
    flat, top_k = routes.reshape(-1), routes.shape[1]
    begin = 0
    for v in range(events):
        if begin + n_experts > len(experts):
            experts, tokens = _grown(experts, n_experts), _grown(tokens, n_experts)
        n = _unite(flat[rows[v] * top_k : rows[v + 1] * top_k], count, met)
        for i in range(n):
            expert = met[n - 1 - i]
            experts[begin + i] = expert
            tokens[begin + i] = count[expert]
            count[expert] = 0
        begin += n
        offset[v + 1] = begin
    return offset, experts[:begin], tokens[:begin]


@inlined
def _unite(routes, count, met):
    """Count the tokens of each expert of an event, and list the experts, last route first.

    Routes are read backwards, so an expert is met first at its last row. Without branches:
    whether a route is met for the first time cannot be predicted.
    """
    n = 0
    for i in range(len(routes) - 1, -1, -1):
        expert = routes[i]
        met[n] = expert
        n += int(count[expert] == 0)
        count[expert] += 1
    return n


@kernel
def _grown(array, least) -> Any:
    """Return a longer copy."""
    longer = np.empty(2 * len(array) + least, array.dtype)
    longer[: len(array)] = array
    return longer


@kernel
def gate_masses(rows, routes, gates, offset, experts, n_experts):
    """Return float64 [ΣA], the sum of gate scores of every activated expert of every event.

    Args:
        rows: int64 [V + 1], routing rows of each event. routes: unsigned [N, k].
        gates: float32 [N, k]. offset: int64 [V + 1]. experts: uint16 [ΣA].
        n_experts: E.
    """
    mass = np.zeros(len(experts))
    slot = np.zeros(n_experts, np.int64)
    for v in range(len(rows) - 1):
        for i in range(offset[v], offset[v + 1]):
            slot[experts[i]] = i
        for row in range(rows[v + 1] - 1, rows[v] - 1, -1):
            for j in range(routes.shape[1] - 1, -1, -1):
                mass[slot[routes[row, j]]] += np.float64(gates[row, j])
    return mass


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
