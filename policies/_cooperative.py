"""OLED's inner loops: priorities, and the split of misses between transfer and CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.tables import cpu_experts_us
from oled_sim.engine.jit import kernel, merged
from oled_sim.engine.state import HIT_EXPERTS, HIT_TOKENS
from oled_sim.engine.whatif import AMPLE_BYTES, add_cpu, add_transfer, open_trial, run_trial

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
        total += add_token(p, routes[t], gates[t], weight[t])
    for e in range(experts):
        p[e] = normalised(p[e], total)
    return p


@merged
def add_token(p, route, gates, weight):
    """Add a token's gate scores times its weight to its experts; return their sum."""
    total = 0.0
    for j in range(len(route)):
        share = np.float64(gates[j]) * weight
        p[route[j]] += share
        total += share
    return total


@merged
def normalised(share, total):
    """Return the part of a total; nothing of nothing is 0."""
    return share / total if total > 0.0 else 0.0


class Misses(NamedTuple):
    """The misses of an event side by side: scratch of :func:`split_cooperatively`, [E] each.

    ``place``: int64, index among the activated experts. ``lane``: int64. ``tokens``: int64.
    ``priority``: float64.
    """

    place: NDArray[np.int64]
    lane: NDArray[np.int64]
    tokens: NDArray[np.int64]
    priority: NDArray[np.float64]


def room_for_misses(experts: int) -> Misses:
    """Return scratch for events of at most ``experts`` misses."""
    place, lane, tokens = np.zeros((3, experts), np.int64)
    return Misses(place, lane, tokens, np.zeros(experts))


@merged
def split_cooperatively(
    lanes, queue, tables, layer, rows, tokens, priority, decided, all_misses, mean_tokens,
    reuse_weight, swaps, slack,
):  # fmt: skip
    """Send part of the misses to the CPU, in place.

    Args:
        lanes, queue, tables: of a ``LayerTimer``.
        layer: index of the layer. rows: tokens of the event.
        tokens: int [A]. priority: float64 [A]. decided: int64 [A], all misses transferred.
        all_misses: scratch.
        mean_tokens, reuse_weight, swaps, slack: parameters of the policy.
    """
    n, load, total = 0, 0, 0
    for i in range(len(decided)):
        all_misses.place[n] = i
        all_misses.tokens[n] = tokens[i]
        all_misses.priority[n] = priority[i]
        all_misses.lane[n] = BY_TRANSFER
        n += decided[i]  # 1 by transfer, 0 on the GPU
        load += decided[i] * tokens[i]
        total += tokens[i]
    if n == 0:
        return
    mean = mean_tokens if mean_tokens > 0.0 else load / n
    copy_us = lanes.copy_us[layer]
    cpu_us = cpu_experts_us(tables, n, mean * n) / n
    target = n * cpu_us / (cpu_us + copy_us)
    if not target >= 0.0:
        return  # outside the profile: transfer all
    misses = Misses(
        all_misses.place[:n], all_misses.lane[:n], all_misses.tokens[:n], all_misses.priority[:n]
    )
    count = min(n, int(np.floor(target + 0.5)))
    for _ in range(n - count):
        misses.lane[_lowest(misses.lane, BY_TRANSFER, misses.priority)] = ON_CPU
    least = min(count, int(np.ceil(target * (1.0 - slack))))
    most = max(count, min(n, int(np.floor(target * (1.0 + slack)))))
    worth_us = reuse_weight * copy_us * len(decided)
    event = layer, rows, len(decided) - n, total - load
    _swap(lanes, queue, tables, event, misses, worth_us, swaps, least, most, count)
    for j in range(n):
        decided[misses.place[j]] = misses.lane[j]


@merged
def _swap(lanes, queue, tables, event, misses, worth_us, swaps, least, most, count):
    """Make the best of three changes as long as it lowers J, at most ``swaps`` times.

    ``event``: layer, tokens of the event, hits, tokens of the hits.
    """
    lane = misses.lane
    best = _objective(lanes, queue, tables, event, misses, worth_us)
    for _ in range(swaps):
        weakest = _lowest(lane, BY_TRANSFER, misses.priority)
        heaviest = _highest(lane, ON_CPU, misses.tokens)
        dearest = _highest(lane, ON_CPU, misses.priority)
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
            _change(lane, leaves, enters, ON_CPU, BY_TRANSFER)
            j = _objective(lanes, queue, tables, event, misses, worth_us)
            _change(lane, leaves, enters, BY_TRANSFER, ON_CPU)
            if j < found:
                found, chosen = j, c
        if chosen < 0:
            return
        leaves, enters = changes[chosen]
        _change(lane, leaves, enters, ON_CPU, BY_TRANSFER)
        count += int(enters >= 0) - int(leaves >= 0)
        best = found


@merged
def _change(lane, leaves, enters, lane_of_leaving, lane_of_entering):
    if leaves >= 0:
        lane[leaves] = lane_of_leaving
    if enters >= 0:
        lane[enters] = lane_of_entering


@merged
def _objective(lanes, queue, tables, event, misses, worth_us):
    """Return J = T_comp − λ Σ p over the transferred, in µs."""
    layer, rows, hits, hit_tokens = event
    work, demand = lanes.work, lanes.demand
    open_trial(lanes, tables, layer, rows, AMPLE_BYTES)
    work[HIT_EXPERTS], work[HIT_TOKENS] = hits, hit_tokens
    value = 0.0
    for i in range(len(misses.lane)):
        if misses.lane[i] == BY_TRANSFER:
            value += misses.priority[i]
            add_transfer(work, demand, i, misses.tokens[i], True)
        else:
            add_cpu(work, misses.tokens[i])
    return run_trial(lanes, queue, tables) - worth_us * value


@merged
def _lowest(decided, lane, value):
    """Return the entry of ``lane`` with the least value, of equal ones the first; -1 for none."""
    best = -1
    for i in range(len(decided)):
        if decided[i] == lane and (best < 0 or value[i] < value[best]):
            best = i
    return best


@merged
def _highest(decided, lane, value):
    """Return the entry of ``lane`` with the greatest value, of equal ones the last; -1 for none."""
    best = -1
    for i in range(len(decided)):
        if decided[i] == lane and (best < 0 or value[i] >= value[best]):
            best = i
    return best
