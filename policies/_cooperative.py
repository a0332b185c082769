"""OLED's inner loops: priorities, and the split of misses between transfer and CPU."""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us
from oled_sim.engine.jit import kernel, lean
from oled_sim.engine.whatif import layer_us

# ruff: noqa: ANN001, ANN202

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2
NONE = -1
MIN_GAIN_US = 1e-6
"""A swap must lower J by more than rounding does."""


@kernel
def priorities(routes, gates, weight, experts):
    """Return p, float64 [E]: Σ gate · weight over each expert's tokens, normalised to sum 1.

    Args:
        routes: unsigned [T, k]. gates: float32 [T, k]. weight: float64 [T], ψ(confidence).
        experts: E.
    """
    p = np.zeros(experts)
    total = 0.0
    for t in range(routes.shape[0]):
        for j in range(routes.shape[1]):
            share = np.float64(gates[t, j]) * weight[t]
            p[routes[t, j]] += share
            total += share
    if total > 0.0:
        for e in range(experts):
            p[e] /= total
    return p


@lean
def split_cooperatively(
    lanes, queue, tables, layer, rows, tokens, priority, decided, mean_tokens, reuse_weight,
    swaps, slack,
):  # fmt: skip
    """Send part of the misses to the CPU, in place.

    Args:
        lanes, queue, tables: of a ``LayerTimer``.
        layer: index of the layer. rows: tokens of the event.
        tokens: int64 [A]. priority: float64 [A]. decided: int64 [A], all misses transferred.
        mean_tokens, reuse_weight, swaps, slack: parameters of the policy.
    """
    misses, load = 0, 0
    for i in range(len(decided)):
        if decided[i] == BY_TRANSFER:
            misses += 1
            load += tokens[i]
    if misses == 0:
        return
    mean = mean_tokens if mean_tokens > 0.0 else load / misses
    copy_us = lanes.copy_us[layer]
    cpu_us = cpu_experts_us(tables, misses, mean * misses) / misses
    target = misses * cpu_us / (cpu_us + copy_us)
    if not target >= 0.0:
        return  # outside the profile: transfer all
    count = min(misses, int(np.floor(target + 0.5)))
    for _ in range(misses - count):
        decided[_lowest(decided, BY_TRANSFER, priority)] = ON_CPU
    least = min(count, int(np.ceil(target * (1.0 - slack))))
    most = max(count, min(misses, int(np.floor(target * (1.0 + slack)))))
    worth_us = reuse_weight * copy_us * len(decided)
    _swap(
        lanes, queue, tables, layer, rows, tokens, priority, decided, worth_us, swaps,
        least, most, count,
    )  # fmt: skip


@lean
def _swap(
    lanes, queue, tables, layer, rows, tokens, priority, decided, worth_us, swaps, least, most,
    count,
):  # fmt: skip
    """Make the best of three changes as long as it lowers J, at most ``swaps`` times."""
    best = _objective(lanes, queue, tables, layer, rows, tokens, priority, decided, worth_us)
    for _ in range(swaps):
        weakest = _lowest(decided, BY_TRANSFER, priority)
        heaviest = _highest(decided, ON_CPU, tokens)
        dearest = _highest(decided, ON_CPU, priority)
        changes = (
            (weakest if heaviest >= 0 else NONE, heaviest if weakest >= 0 else NONE),
            (weakest if count > least else NONE, NONE),
            (NONE, dearest if count < most else NONE),
        )
        found, chosen = best - MIN_GAIN_US, -1
        for c in range(3):
            leaves, enters = changes[c]
            if leaves < 0 and enters < 0:
                continue
            _change(decided, leaves, enters, ON_CPU, BY_TRANSFER)
            j = _objective(lanes, queue, tables, layer, rows, tokens, priority, decided, worth_us)
            _change(decided, leaves, enters, BY_TRANSFER, ON_CPU)
            if j < found:
                found, chosen = j, c
        if chosen < 0:
            return
        leaves, enters = changes[chosen]
        _change(decided, leaves, enters, ON_CPU, BY_TRANSFER)
        count += int(enters >= 0) - int(leaves >= 0)
        best = found


@lean
def _change(decided, leaves, enters, lane_of_leaving, lane_of_entering):
    if leaves >= 0:
        decided[leaves] = lane_of_leaving
    if enters >= 0:
        decided[enters] = lane_of_entering


@lean
def _objective(lanes, queue, tables, layer, rows, tokens, priority, decided, worth_us):
    """Return J = T_comp − λ Σ p over the transferred, in µs."""
    value = 0.0
    for i in range(len(decided)):
        if decided[i] == BY_TRANSFER:
            value += priority[i]
    return layer_us(lanes, queue, tables, layer, rows, tokens, decided) - worth_us * value


@lean
def _lowest(decided, lane, value):
    """Return the entry of ``lane`` with the least value, of equal ones the first; -1 for none."""
    best = -1
    for i in range(len(decided)):
        if decided[i] == lane and (best < 0 or value[i] < value[best]):
            best = i
    return best


@lean
def _highest(decided, lane, value):
    """Return the entry of ``lane`` with the greatest value, of equal ones the last; -1 for none."""
    best = -1
    for i in range(len(decided)):
        if decided[i] == lane and (best < 0 or value[i] >= value[best]):
            best = i
    return best
