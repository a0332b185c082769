"""The laws of spec §4, checked on what a run noted; a violation is a bug of the engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import inlined, lean
from oled_sim.engine.rules import Rules
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import (
    BUDGET_BYTES,
    EVENT_COUNTS,
    IDLE,
    KIND,
    LANE_TIMES,
    LANES,
    N_ACTIVATED,
    N_AFTER,
    N_BEFORE,
    N_CAPACITY,
    N_CPU_HITS,
    N_CPU_MISSES,
    N_DEMAND,
    N_FOLLOWED,
    N_FREE_BYTES,
    N_HITS,
    N_KEPT,
    N_LATE,
    N_POOL_BYTES,
    N_REUSED,
    N_STAGING_PEAK,
    PASS_COUNTS,
    PREFETCH,
    T_BUSY,
    T_END,
    T_GATE,
    T_LANES,
    T_START,
    USED,
    State,
)

T_CRITICAL = T_BUSY + LANE_TIMES // 2
RELATIVE = 1e-9
"""Slack for sums of float64 times."""


class LawError(AssertionError):
    """A law of the simulation does not hold. Not the user's fault."""


def _require(condition: bool, law: str) -> None:
    if not condition:
        raise LawError(law)


def columns(record: GroupRecord) -> dict[str, NDArray[np.int64]]:
    """Return the event columns by name, int64 [V] each."""
    return dict(zip(EVENT_COUNTS, record.course.counts.T, strict=True))


LAWS = (
    "hits + late + misses = activated experts",
    "residents sent to the CPU are hits",
    "residents ≤ capacity",
    "staging slots in use ≤ staging",
    "only arrivals are kept",
    "reused ≤ followed transfers",
    "slots freed and taken match the residents",
    "start ≤ gate ≤ end of lanes ≤ end of every event",
    "events follow one another",
    "critical-path times sum to the time of the event",
)
"""Laws of every event, in the order of the bits that :func:`broken_laws` returns."""

PASS_LAWS = (
    "passes follow in turn",
    "critical-path times sum to the time of the pass",
    "a lane is busy at most always",
)
"""Laws of every pass, likewise for :func:`broken_pass_laws`."""


def check_cheap(record: GroupRecord, state: State, rules: Rules) -> None:
    """Check the laws that cost next to nothing; done on every run."""
    course = record.course
    pool = int(state.lanes.work[BUDGET_BYTES]) if rules.scope == "global" else -1
    size = state.pools.expert_bytes
    broken = broken_laws(course.counts, course.times, course.event_layer, size, rules.staging, pool)
    for bit, law in enumerate(LAWS):
        _require(not broken >> bit & 1, law)
    broken = broken_pass_laws(course.pass_times)
    for bit, law in enumerate(PASS_LAWS):
        _require(not broken >> bit & 1, law)


@lean
def broken_laws(counts, times, layer, size, staging, pool_bytes):  # noqa: ANN001, ANN201
    """Return the set of :data:`LAWS` that some event breaks, as bits.

    Args:
        counts, times: event columns. layer: int64 [V]. size: int64 [L], bytes of an expert.
        staging: slots. pool_bytes: of the pool that serves all layers, -1 if there is none.
    """
    broken, before = 0, -np.inf
    for v in range(len(counts)):
        n, t = counts[v], times[v]
        misses = n[N_DEMAND] + n[N_CPU_MISSES]
        free = (n[N_CAPACITY] - n[N_AFTER]) * size[layer[v]]
        if pool_bytes >= 0:
            free = pool_bytes - n[N_POOL_BYTES]
        chain = t[T_CRITICAL] + t[T_CRITICAL + 1] + t[T_CRITICAL + 2]
        broken |= int(n[N_HITS] + n[N_LATE] + misses != n[N_ACTIVATED])
        broken |= int(n[N_CPU_HITS] > n[N_HITS]) << 1
        broken |= int(max(n[N_BEFORE], n[N_AFTER]) > n[N_CAPACITY]) << 2
        broken |= int(n[N_STAGING_PEAK] > staging) << 3
        broken |= int(n[N_KEPT] > n[N_DEMAND] + n[N_LATE]) << 4
        broken |= int(n[N_REUSED] > n[N_FOLLOWED]) << 5
        broken |= int(n[N_FREE_BYTES] != free) << 6
        broken |= int(not t[T_START] <= t[T_GATE] <= t[T_LANES] <= t[T_END]) << 7
        broken |= int(not before <= t[T_START]) << 8
        broken |= int(not _near(chain, t[T_END] - t[T_START], t[T_END])) << 9
        before = t[T_END]
    return broken


@lean
def broken_pass_laws(times):  # noqa: ANN001, ANN201
    """Return the set of :data:`PASS_LAWS` that some pass breaks, as bits.

    Args:
        times: pass columns.
    """
    broken, before = 0, -np.inf
    for p in range(len(times)):
        begin, end = times[p, 0], times[p, 1]
        busy = max(times[p, 2], times[p, 3], times[p, 4])
        chain = times[p, 5] + times[p, 6] + times[p, 7]
        broken |= int(not before <= begin <= end)
        broken |= int(not _near(chain, end - begin, end)) << 1
        broken |= int(not busy <= end - begin + RELATIVE * max(1.0, end)) << 2
        before = end
    return broken


@inlined
def _near(a, b, now):  # noqa: ANN001, ANN202
    """Whether two durations before ``now`` are equal but for rounding."""
    return abs(a - b) <= RELATIVE * max(1.0, now)


def check_bytes(record: GroupRecord, expert_bytes: NDArray[np.int64]) -> None:
    """Check that copied bytes are those of demand transfers and prefetches."""
    course = record.course
    demand = np.zeros(len(course.pass_times), np.int64)
    size = expert_bytes[course.event_layer]
    np.add.at(demand, course.event_pass, columns(record)["demand"] * size)
    p = dict(zip(PASS_COUNTS, course.pass_counts.T, strict=True))
    _require(
        bool((p["copied_bytes"] == demand + p["prefetched_bytes"]).all()),
        "copied bytes = Σ expert bytes of demand transfers and prefetches",
    )


def check_log(record: GroupRecord) -> None:
    """Check that no lane runs two jobs at once, and that times of a lane only grow."""
    assert record.log is not None, "the run kept no log"
    for lane, name in enumerate(LANES):
        begin, end = record.log[record.log[:, 0] == lane, 6:8].T
        _require(bool((end >= begin).all()), f"jobs of {name} end after they begin")
        _require(bool((begin[1:] >= end[:-1]).all()), f"lane {name} never overlaps itself")


def check_idle(state: State) -> None:
    """Check that nothing is left over once a run has ended (prefetches in flight excepted)."""
    gpu, h2d, cpu = (int(kind) for kind in state.lanes.work[KIND : KIND + 3])
    _require(gpu == IDLE and cpu == IDLE, "lanes are idle")
    _require(h2d in (IDLE, PREFETCH), "no demand transfer is left")
    in_flight = int(h2d == PREFETCH)
    _require(int(state.lanes.work[USED]) == in_flight, "staging slots are free again")
    pools = state.pools
    _require(
        bool((pools.resident.sum(axis=1) == pools.occupied).all()), "residents are counted rightly"
    )


def check_all(record: GroupRecord, state: State, rules: Rules) -> None:
    """Check every law on a group that kept a log."""
    check_cheap(record, state, rules)
    check_bytes(record, state.pools.expert_bytes)
    check_log(record)
    check_idle(state)
