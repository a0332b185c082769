"""OLED's inner loops: priorities, and the split of misses between transfer and CPU."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us, shared_expert_us
from oled_sim.engine.jit import inlined, kernel, lean, merged
from oled_sim.engine.whatif import least_slowdowns, least_us, split_us

# ruff: noqa: ANN001, ANN202

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2
NONE = -1
MIN_GAIN_US = 1e-6
"""A swap must lower J by more than rounding does."""
ROUNDING_US = 1e-3
"""By how much sums of times and a bound on them may differ at most; they are far more exact."""


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
    ``priority``: float64. ``order``: int64, the misses by priority, rising, equals by index.
    """

    place: NDArray[np.int64]
    lane: NDArray[np.int64]
    tokens: NDArray[np.int64]
    priority: NDArray[np.float64]
    order: NDArray[np.int64]


def room_for_misses(experts: int) -> Misses:
    """Return scratch for events of at most ``experts`` misses."""
    place, lane, tokens, order = np.zeros((4, experts), np.int64)
    return Misses(place, lane, tokens, np.zeros(experts), order)


@merged
def split_cooperatively(
    lanes, queue, tables, layer, rows, tokens, priority, decided, all_misses, mean_tokens,
    reuse_weight, swaps, slack,
):  # fmt: skip
    """Send part of the misses to the CPU, in place.

    Args:
        lanes, queue, tables: of a ``LayerTimer``; of the lanes the time of a copy alone.
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
        all_misses.place[:n], all_misses.lane[:n], all_misses.tokens[:n], all_misses.priority[:n],
        all_misses.order[:n],
    )  # fmt: skip
    _sort(misses.priority, misses.order)
    count = min(n, int(np.floor(target + 0.5)))
    for j in range(n - count):
        misses.lane[misses.order[j]] = ON_CPU
    least = min(count, int(np.ceil(target * (1.0 - slack))))
    most = max(count, min(n, int(np.floor(target * (1.0 + slack)))))
    worth_us = reuse_weight * copy_us * len(decided)
    hits, hits_us = len(decided) - n, 0.0
    if hits > 0:
        hits_us = gpu_experts_us(tables, hits, total - load)
    event = (
        copy_us, (hits, hits_us), shared_expert_us(tables, rows), cpu_link_us(tables, rows),
        least_slowdowns(tables),
    )  # fmt: skip
    _swap(tables, event, misses, worth_us, swaps, least, most, count)
    for j in range(n):
        decided[misses.place[j]] = misses.lane[j]


@merged
def _swap(tables, event, misses, worth_us, swaps, least, most, count):
    """Make the best of three changes as long as it lowers J, at most ``swaps`` times.

    Timing a split takes most of a decision, so a change is timed only if it may be the best.
    ``event``: what no split changes, see :func:`_objective`.
    """
    lane = misses.lane
    best = _objective(tables, event, misses, worth_us)
    for _ in range(swaps):
        weakest = _first(lane, BY_TRANSFER, misses.order)
        heaviest = _heaviest(lane, ON_CPU, misses.tokens)
        dearest = _last(lane, ON_CPU, misses.order)
        changes = (
            (weakest if heaviest >= 0 else NONE, heaviest if weakest >= 0 else NONE),
            (weakest if count > least else NONE, NONE),
            (NONE, dearest if count < most else NONE),
        )
        found, chosen = best - MIN_GAIN_US, -1
        least_j = (
            _least_j(tables, event, misses, worth_us, changes[0]),
            _least_j(tables, event, misses, worth_us, changes[1]),
            _least_j(tables, event, misses, worth_us, changes[2]),
        )
        for c in _rising(least_j):
            if least_j[c] > found + ROUNDING_US:
                break
            leaves, enters = changes[c]
            _change(lane, leaves, enters, ON_CPU, BY_TRANSFER)
            j = _objective(tables, event, misses, worth_us)
            _change(lane, leaves, enters, BY_TRANSFER, ON_CPU)
            if j < found or (j == found and c < chosen):  # of equal ones the first
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


@lean
def _least_j(tables, event, misses, worth_us, change):
    """Return a J that a change does not undercut but by rounding, ∞ if there is none to make."""
    leaves, enters = change
    if leaves < 0 and enters < 0:
        return np.inf
    _change(misses.lane, leaves, enters, ON_CPU, BY_TRANSFER)
    copies, cpu, value = _work(tables, event, misses)
    _change(misses.lane, leaves, enters, BY_TRANSFER, ON_CPU)
    return least_us(tables, event[4], copies * event[0], cpu) - worth_us * value


@inlined
def _rising(values):
    """Return the places of three values, the least first."""
    a, b, c = values
    if a <= b:
        if b <= c:
            return 0, 1, 2
        return (0, 2, 1) if a <= c else (2, 0, 1)
    if a <= c:
        return 1, 0, 2
    return (1, 2, 0) if b <= c else (2, 1, 0)


@lean
def _objective(tables, event, misses, worth_us):
    """Return J = T_comp − λ Σ p over the transferred, in µs.

    ``event``: time of a copy; number of hits and their time on the GPU; time of the shared expert;
    time of the CPU's link; the least slow-downs; all µs.
    """
    copy_us, hits, shared_us, _, _ = event
    _, cpu, value = _work(tables, event, misses)
    us = split_us(tables, copy_us, hits, cpu, shared_us, misses.lane, misses.tokens)
    return us - worth_us * value


@merged
def _work(tables, event, misses):
    """Return how many are transferred, the CPU's experts and their time, Σ p of the transferred."""
    lane, transfers, tokens, value, link_us = misses.lane, 0, 0, 0.0, event[3]
    for i in range(len(lane)):  # without branches: who moves cannot be predicted
        moved = lane[i] == BY_TRANSFER
        value += misses.priority[i] if moved else 0.0
        transfers += int(moved)
        tokens += 0 if moved else misses.tokens[i]
    if transfers > 0:
        link_us += tables.per_cpu_job_beside_copies_us
    experts = len(lane) - transfers
    return transfers, (experts, link_us + cpu_experts_us(tables, experts, tokens)), value


@merged
def _sort(values, order):
    """Fill ``order`` with the indices of values, rising, equals by index.

    Each value's place is counted: no branch to predict, and several comparisons at a time.
    """
    for i in range(len(values)):
        value, place = values[i], 0
        for j in range(i):
            place += int(values[j] <= value)
        for j in range(i + 1, len(values)):
            place += int(values[j] < value)
        order[place] = i


@merged
def _heaviest(decided, lane, tokens):
    """Return the entry of ``lane`` with the most tokens, of equal ones the last; -1 for none."""
    best = -1
    for i in range(len(decided)):
        if decided[i] == lane and (best < 0 or tokens[i] >= tokens[best]):
            best = i
    return best


@merged
def _first(decided, lane, order):
    """Return the first entry of ``lane`` in an order, -1 for none."""
    for j in range(len(order)):
        if decided[order[j]] == lane:
            return order[j]
    return -1


@merged
def _last(decided, lane, order):
    """Return the last entry of ``lane`` in an order, -1 for none."""
    for j in range(len(order) - 1, -1, -1):
        if decided[order[j]] == lane:
            return order[j]
    return -1
