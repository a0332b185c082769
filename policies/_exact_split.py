"""The shortest layer over the ways to choose residents and to split the rest."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us, shared_expert_us
from oled_sim.engine.jit import lean
from oled_sim.engine.state import CPU, EXPERT_BYTES, FREED_BY_HITS, GPU, H2D
from oled_sim.engine.whatif import add_cpu, add_hit, add_transfer, open_trial, run_trial

# ruff: noqa: ANN001, ANN202

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2
TRIED = 32
"""Loads up to this are tried once per lane: experts of equal load are interchangeable."""
MIN_GAIN_US = 1e-6
"""An exchange must gain more than rounding does."""


class Search(NamedTuple):
    """What the search knows of the costs, and its scratch, for layers of E experts.

    Attributes:
        cpu_floor_us: float64 [E + 1], no load of so many CPU experts takes less.
        gpu_floor_us: no grouped kernel takes less.
        slowdown: float64 [3], the least factor of the GPU lane while the CPU works, of H2D while
            the CPU works, and of the CPU while copies run.
        waiting: float64 [E + 1], bounds of numbers of CPU experts not looked into yet.
        bound: float64 [n], start: int64 [n, 2], candidates not timed yet: (x, first).
        before: int64 [E + 1], tokens of all experts lighter than each, in order.
        trial: int64 [E]. tried: bool [3, TRIED].
    """

    cpu_floor_us: NDArray[np.float64]
    gpu_floor_us: float
    slowdown: NDArray[np.float64]
    waiting: NDArray[np.float64]
    bound: NDArray[np.float64]
    start: NDArray[np.int64]
    before: NDArray[np.int64]
    trial: NDArray[np.int64]
    tried: NDArray[np.bool_]


def new_search(costs: LaneCosts, experts: int) -> Search:
    """Return a search for layers of ``experts`` experts."""
    most = (experts + 1) * (experts + 2) // 2
    return Search(
        cpu_floor_us=_cpu_floor_us(costs, experts),
        gpu_floor_us=gpu_floor_us(costs),
        slowdown=least_slowdowns(costs),
        waiting=np.zeros(experts + 1),
        bound=np.zeros(most),
        start=np.zeros((most, 2), np.int64),
        before=np.zeros(experts + 1, np.int64),
        trial=np.zeros(experts, np.int64),
        tried=np.zeros((3, TRIED), np.bool_),
    )


_PAIRS = ((GPU, CPU), (H2D, CPU), (CPU, H2D))


def least_slowdowns(costs: LaneCosts) -> NDArray[np.float64]:
    """Return the ``slowdown`` of a :class:`Search`, float64 [3]."""
    return np.array([_least_slowdown(costs, *pair) for pair in _PAIRS])


def _least_slowdown(costs: LaneCosts, lane: int, other: int) -> float:
    """Return the least factor by which a lane is slowed by sets of lanes with ``other`` in it."""
    return min(costs.tables.interference[lane, busy] for busy in range(8) if busy >> other & 1)


def gpu_floor_us(costs: LaneCosts) -> float:
    """Return what no grouped kernel undercuts, in µs; 0 where unknown."""
    return 0.0 if costs.extrapolate else float(np.nanmin(costs.profile.gpu_experts.median_us))


def _cpu_floor_us(costs: LaneCosts, experts: int) -> NDArray[np.float64]:
    """Return the least time of x CPU experts over all loads, float64 [E + 1], 0 where unknown.

    Between grid points times are linear in the load, so the least is at one of them.
    """
    floor = np.zeros(experts + 1)
    if costs.extrapolate:
        return floor  # a line that falls goes on falling
    loads = costs.profile.cpu_experts.columns
    for x in range(1, experts + 1):
        times = [cpu_experts_us(costs.tables, x, x * load) for load in loads]
        floor[x] = 0.0 if np.isnan(times).all() else np.nanmin(times)
    return floor


@lean
def best_split(lanes, queue, tables, search, layer, rows, tokens, order, slots, decided):
    """Choose a lane for every activated expert; those on the GPU are meant to be resident.

    Candidates: for every x, x neighbours in the order of load go to the CPU; of the others the
    heaviest min(C, |A| − x) are resident and the rest is transferred. They are timed in the order
    of a lower bound, until that exceeds the best time found. At last the last arrival is
    exchanged with others as long as that helps.

    Neighbours, not only the x lightest: measured costs do not always grow with tokens.

    Args:
        lanes, queue, tables: of a ``LayerTimer``. search: costs known, and scratch.
        layer: index of the layer. rows: tokens of the event.
        tokens: int64 [A]. order: int64 [A], activated experts by ascending tokens.
        slots: C of the layer.
        decided: int64 [A], filled with the lanes.

    Returns:
        The time from the gate to the end of all lanes, in µs.
    """
    decided[:] = BY_TRANSFER
    us = best_of_neighbours(
        lanes, queue, tables, search, layer, rows, tokens, order, slots, decided, np.inf
    )
    return improve_last(lanes, queue, tables, search, layer, rows, tokens, slots, decided, us)


@lean
def best_of_neighbours(
    lanes, queue, tables, search, layer, rows, tokens, order, slots, decided, best_us
):  # fmt: skip
    """Find the shortest of the candidates of :func:`best_split`; return its time in µs.

    ``decided`` comes with lanes that take ``best_us``, and keeps them if no candidate is shorter.
    """
    _open_search(lanes, tables, search, layer, rows, tokens, order, slots)
    trial, left, waiting = search.trial[: len(order)], 0, search.waiting[: len(order) + 1]
    while True:
        i, x = _least(search, left), np.argmin(waiting)
        least_us = search.bound[i] if left > 0 else np.inf
        if waiting[x] < best_us and waiting[x] <= least_us:
            waiting[x] = np.inf
            left = _look_into(lanes, tables, search, layer, rows, len(order), slots, x, left,
                              best_us)  # fmt: skip
            continue
        if not least_us < best_us:
            break
        x, first = search.start[i, 0], search.start[i, 1]
        left -= 1
        search.bound[i] = search.bound[left]
        search.start[i, 0], search.start[i, 1] = search.start[left, 0], search.start[left, 1]
        _arrange(trial, order, x, first, min(slots, len(order) - x))
        us = time_split(lanes, queue, tables, layer, rows, tokens, trial, slots)
        if us < best_us:
            best_us = us
            for j in range(len(trial)):
                decided[j] = trial[j]
            left = _forget(search, left, best_us)
    return best_us


@lean
def _open_search(lanes, tables, search, layer, rows, tokens, order, slots):
    """Fill ``before`` and, for every number x of CPU experts, a bound of all its candidates."""
    count, before = len(order), search.before
    before[0] = 0
    for i in range(count):
        before[i + 1] = before[i] + tokens[order[i]]
    link_us, shared_us = cpu_link_us(tables, rows), shared_expert_us(tables, rows)
    for x in range(count + 1):
        hits = min(slots, count - x)
        transfers = count - x - hits
        kernels = int(hits > 0) + int(transfers > 0)
        gpu_us = shared_us + search.gpu_floor_us * kernels
        cpu_us = link_us + search.cpu_floor_us[x] if x > 0 else 0.0
        copies_us = transfers * lanes.copy_us[layer]
        bound = bound_us(search.slowdown, gpu_us, copies_us, cpu_us, search.gpu_floor_us)
        search.waiting[x] = bound if bound >= 0.0 else 0.0


@lean
def _look_into(lanes, tables, search, layer, rows, count, slots, x, left, best_us):
    """Add the candidates with x CPU experts that may be shorter than ``best_us``."""
    before = search.before
    hits = min(slots, count - x)
    transfers = count - x - hits
    rest_us = shared_expert_us(tables, rows) + search.gpu_floor_us * int(transfers > 0)
    copies_us, link_us = transfers * lanes.copy_us[layer], cpu_link_us(tables, rows)
    load, hit_load = -1, -1
    cpu_us, gpu_us = 0.0, 0.0
    for first in range(count - x + 1):
        kept = _heaviest(before, count, x, first, hits)
        if load == before[first + x] - before[first] and hit_load == kept:
            continue  # the same candidate but for the names of experts
        if x > 0 and load != before[first + x] - before[first]:
            cpu_us = link_us + cpu_experts_us(tables, x, before[first + x] - before[first])
        if hit_load != kept:
            gpu_us = rest_us + gpu_experts_us(tables, hits, kept)
        load, hit_load = before[first + x] - before[first], kept
        bound = bound_us(search.slowdown, gpu_us, copies_us, cpu_us, search.gpu_floor_us)
        if 0.0 <= bound < best_us:  # NaN is outside the profile
            search.bound[left] = bound
            search.start[left, 0], search.start[left, 1] = x, first
            left += 1
    return left


@lean
def _heaviest(before, count, x, first, hits):
    """Return the tokens of the heaviest ``hits`` experts besides x from ``first`` on."""
    above = count - first - x
    if hits <= above:
        return before[count] - before[count - hits]
    below = hits - above
    return before[count] - before[first + x] + before[first] - before[first - below]


@lean
def _least(search, left):
    """Return the candidate of least bound, of equal ones that with the least x, then first."""
    best, bound, start = 0, search.bound, search.start
    for i in range(1, left):
        if bound[i] < bound[best]:
            best = i
        elif bound[i] == bound[best]:
            x, least = start[i, 0], start[best, 0]
            if x < least or (x == least and start[i, 1] < start[best, 1]):
                best = i
    return best


@lean
def _forget(search, left, best_us):
    """Drop candidates that cannot be shorter; return how many are left."""
    kept, bound, start = 0, search.bound, search.start
    for i in range(left):
        if bound[i] < best_us:
            bound[kept] = bound[i]
            start[kept, 0], start[kept, 1] = start[i, 0], start[i, 1]
            kept += 1
    return kept


@lean
def improve_last(lanes, queue, tables, search, layer, rows, tokens, slots, decided, best_us):
    """Exchange the last arrival, whose computation nothing hides, as long as that helps."""
    improved, tried = True, search.tried
    while improved:
        improved = False
        last = -1
        for i in range(len(decided)):
            if decided[i] == BY_TRANSFER:
                last = i
        partner = -1
        tried[:] = False
        for i in range(len(decided) if last >= 0 else 0):
            load = min(tokens[i], TRIED - 1)
            if decided[i] == BY_TRANSFER or tokens[i] == tokens[last] or tried[decided[i], load]:
                continue
            tried[decided[i], load] = True
            _exchange(decided, i, last)
            us = time_split(lanes, queue, tables, layer, rows, tokens, decided, slots)
            _exchange(decided, i, last)
            if us < best_us - MIN_GAIN_US:
                best_us, partner = us, i
        if partner >= 0:
            _exchange(decided, partner, last)
            improved = True
    return best_us


@lean
def _exchange(decided, a, b):
    decided[a], decided[b] = decided[b], decided[a]


@lean
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


@lean
def bound_us(least, gpu_us, copies_us, cpu_us, floor_us):
    """Return a time that lanes with this much work cannot undercut.

    Args:
        least: float64 [3], from :func:`least_slowdowns`.
        gpu_us, copies_us, cpu_us: work of the lanes, alone.
        floor_us: no grouped kernel takes less.
    """
    longest = _slowed(least[CPU], cpu_us, copies_us)
    if copies_us > 0.0:  # the last arrival is computed after all copies
        longest = max(longest, _slowed(least[H2D], copies_us, cpu_us) + floor_us)
    return max(longest, _slowed(least[GPU], gpu_us, cpu_us))


@lean
def _slowed(factor, work_us, other_us):
    """Return the least time for ``work_us`` of a lane while another has ``other_us`` to do."""
    return min(work_us * factor, work_us + other_us * (1.0 - 1.0 / factor))


@lean
def time_split(lanes, queue, tables, layer, rows, tokens, decided, slots):
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
