"""The least cost of misses in one layer, when every miss is copied or computed on the CPU.

Costs add up: a copy takes T, the CPU c(n) for an expert with n tokens, a hit nothing. Only what is
copied can stay. Which experts to keep, when, is then a flow of least cost: every slot is a unit of
flow through time. Between two uses of an expert a slot either waits (cost 0) or holds it, which
saves m = min(T, c(n)) at the second use; to enter after a miss costs T − m more than the
cheapest way to serve it. Integral, hence exact (checked against exhaustive search).

Lanes that work at the same time do not add up, so this is a bound on their work, not on time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel

# ruff: noqa: ANN001, ANN202

PS_PER_US = 1_000_000
"""Costs are whole picoseconds: sums are exact, and differences that vanish do vanish."""

FAR = np.iinfo(np.int64).max // 4


class Uses(NamedTuple):
    """The events of one layer, in order. T events, N uses of experts.

    Attributes:
        offset: int64 [T + 1], the uses of event i are ``offset[i]:offset[i + 1]``.
        experts: int64 [N], distinct within an event.
        cpu_us: float64 [N], cost of serving the use on the CPU.
    """

    offset: NDArray[np.int64]
    experts: NDArray[np.int64]
    cpu_us: NDArray[np.float64]


def least_cost_us(
    uses: Uses, copy_us: float, slots: int | Sequence[int] | NDArray[np.int64]
) -> float:
    """Return the least that misses can cost, in µs, from an empty cache.

    Args:
        uses: the events.
        copy_us: T, cost of copying an expert.
        slots: C; or int [T], how many experts may stay after each event.
    """
    events, count = len(uses.offset) - 1, len(uses.experts)
    limits = np.broadcast_to(np.asarray(slots, np.int64), (events,))
    miss = np.minimum(_picoseconds(uses.cpu_us), _picoseconds(copy_us))
    everything = int(miss.sum())
    most = int(limits.max(initial=0))
    if most == 0 or count == 0:
        return everything / PS_PER_US
    enter = _picoseconds(copy_us) - miss
    limits = np.ascontiguousarray(limits)
    arcs = _network(uses.offset, _next_use(uses), miss, enter, limits, most)
    # From the slots of the first event to those of the last.
    source = int(uses.offset[1])
    sink = int(uses.offset[-2] + uses.offset[-1]) + events - 1
    saved = _least_flow(*arcs, 2 * count + events, source, sink, most)
    # A unit that had to wait where fewer slots are was paid for doing so.
    forced = int((most - limits[:-1]).sum()) * _reward(miss)
    return (everything + saved + forced) / PS_PER_US


def _picoseconds(time_us: float | NDArray[np.float64]) -> NDArray[np.int64]:
    return np.rint(np.asarray(time_us, np.float64) * PS_PER_US).astype(np.int64)


def _reward(miss: NDArray[np.int64]) -> int:
    """Return more than any flow can save with one slot."""
    return int(miss.sum()) + 1


def _next_use(uses: Uses) -> NDArray[np.int64]:
    """Return the next use of the same expert, int64 [N], -1 for none."""
    order = np.lexsort((np.arange(len(uses.experts)), uses.experts))
    following = np.full(len(uses.experts), -1, np.int64)
    same = uses.experts[order[1:]] == uses.experts[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following


@kernel
def _network(offset, following, miss, enter, limits, most):
    """Build the network as forward arcs: tail, head, room and cost, int64 [arcs] each.

    Nodes of event i, in this order: a hit of every use k (``v``), the slots between events (``t``),
    and holding the expert of every use k from now on (``u``). Arcs lead from lower to higher nodes.
    """
    events, arcs = len(limits), 4 * len(following) + 2 * len(limits)
    tail, head = np.zeros(arcs, np.int64), np.zeros(arcs, np.int64)
    room, cost = np.ones(arcs, np.int64), np.zeros(arcs, np.int64)
    hit = np.empty(len(following), np.int64)
    for i in range(events):
        for k in range(offset[i], offset[i + 1]):
            hit[k] = offset[i] + k + i
    reward = miss.sum() + 1
    n = 0
    for i in range(events):
        slots = offset[i] + offset[i + 1] + i
        for k in range(offset[i], offset[i + 1]):
            tail[n], head[n] = hit[k], slots
            n += 1
            later = following[k]
            if later >= 0:
                hold = slots + 1 + k - offset[i]
                tail[n], head[n], cost[n] = slots, hold, enter[k]
                tail[n + 1], head[n + 1] = hit[k], hold
                tail[n + 2], head[n + 2], cost[n + 2] = hold, hit[later], -miss[later]
                n += 3
        if i + 1 < events:
            after = offset[i + 1] + offset[i + 2] + i + 1
            tail[n], head[n], room[n] = slots, after, limits[i]
            tail[n + 1], head[n + 1], room[n + 1] = slots, after, most - limits[i]
            cost[n + 1] = -reward
            n += 2
    return tail[:n], head[:n], room[:n], cost[:n]


@kernel
def _least_flow(tail, head, room, cost, nodes, source, sink, units):
    """Return the least cost of ``units`` of flow from source to sink; shortest paths in turn.

    Arc 2a is arc a, arc 2a + 1 its reverse. ``potential`` keeps all costs of arcs with room from
    being negative, so that Dijkstra's algorithm finds the next path.
    """
    first, arcs = _arcs_by_tail(tail, head, nodes)
    left = np.zeros(2 * len(tail), np.int64)
    left[::2] = room
    potential = _distances(tail, head, room, cost, first, arcs, nodes, source)
    distance, by = np.empty(nodes, np.int64), np.empty(nodes, np.int64)
    total = 0
    while units > 0:
        if not _shortest_path(
            tail, head, cost, left, first, arcs, potential, distance, by, source, sink
        ):
            break
        pushed, node = units, sink
        while node != source:
            pushed = min(pushed, left[by[node]])
            node = _other_end(tail, head, by[node])
        node = sink
        while node != source:
            arc = by[node]
            left[arc] -= pushed
            left[arc ^ 1] += pushed
            total += pushed * (cost[arc >> 1] if arc & 1 == 0 else -cost[arc >> 1])
            node = _other_end(tail, head, arc)
        units -= pushed
    return total


@kernel
def _other_end(tail, head, arc):
    """Return the node that an arc or a reverse arc leaves."""
    return tail[arc >> 1] if arc & 1 == 0 else head[arc >> 1]


@kernel
def _arcs_by_tail(tail, head, nodes):
    """Return where the arcs that leave each node begin, int64 [nodes + 1], and the arcs."""
    first = np.zeros(nodes + 1, np.int64)
    for a in range(len(tail)):
        first[tail[a] + 1] += 1
        first[head[a] + 1] += 1
    first = np.cumsum(first)
    place, arcs = first.copy(), np.empty(2 * len(tail), np.int64)
    for a in range(len(tail)):
        arcs[place[tail[a]]] = 2 * a
        place[tail[a]] += 1
        arcs[place[head[a]]] = 2 * a + 1
        place[head[a]] += 1
    return first, arcs


@kernel
def _distances(tail, head, room, cost, first, arcs, nodes, source):
    """Return distances from the source over forward arcs, which lead to higher nodes."""
    distance = np.full(nodes, FAR, np.int64)
    distance[source] = 0
    for node in range(nodes):
        for i in range(first[node], first[node + 1]):
            a = arcs[i] >> 1
            if arcs[i] & 1 == 0 and room[a] > 0 and distance[node] < FAR:
                distance[head[a]] = min(distance[head[a]], distance[node] + cost[a])
    return distance


@kernel
def _shortest_path(tail, head, cost, left, first, arcs, potential, distance, by, source, sink):
    """Fill ``by``, the arc by which each node is reached; return whether the sink is."""
    distance[:] = FAR
    distance[source] = 0
    waiting = [(np.int64(0), np.int64(source))]
    while len(waiting) > 0:
        far, node = heapq.heappop(waiting)
        if far > distance[node]:
            continue
        if node == sink:
            break
        for i in range(first[node], first[node + 1]):
            arc = arcs[i]
            if left[arc] == 0:
                continue
            a = arc >> 1
            other, step = (head[a], cost[a]) if arc & 1 == 0 else (tail[a], -cost[a])
            to = far + step + potential[node] - potential[other]
            if to < distance[other]:
                distance[other] = to
                by[other] = arc
                heapq.heappush(waiting, (to, other))
    if distance[sink] >= FAR:
        return False
    for node in range(len(distance)):
        potential[node] += min(distance[node], distance[sink])
    return True
