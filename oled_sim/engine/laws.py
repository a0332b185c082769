"""The laws of spec §4, checked on what a run noted; a violation is a bug of the engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.rules import Rules
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import (
    BUDGET_BYTES,
    EVENT_COUNTS,
    IDLE,
    KIND,
    LANES,
    PASS_COUNTS,
    PREFETCH,
    T_BUSY,
    T_END,
    T_START,
    USED,
    State,
)

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


def check_cheap(record: GroupRecord, state: State, rules: Rules) -> None:
    """Check the laws that cost next to nothing; done on every run."""
    n = columns(record)
    misses = n["demand"] + n["cpu_misses"]
    _require(
        bool((n["hits"] + n["late"] + misses == n["activated"]).all()),
        "hits + late + misses = activated experts",
    )
    _require(bool((n["cpu_hits"] <= n["hits"]).all()), "residents sent to the CPU are hits")
    _require(bool((n["residents_after"] <= n["capacity"]).all()), "residents ≤ capacity")
    _require(bool((n["residents_before"] <= n["capacity"]).all()), "residents ≤ capacity")
    _require(bool((n["staging_peak"] <= rules.staging).all()), "staging slots in use ≤ staging")
    _require(bool((n["kept"] <= n["demand"] + n["late"]).all()), "only arrivals are kept")
    _require(bool((n["reused"] <= n["followed"]).all()), "reused ≤ followed transfers")
    size = state.pools.expert_bytes[record.course.event_layer]
    free = (n["capacity"] - n["residents_after"]) * size
    if rules.scope == "global":
        free = int(state.lanes.work[BUDGET_BYTES]) - n["pool_bytes"]
    _require(bool((n["free_bytes"] == free).all()), "slots freed and taken match the residents")
    check_clock(record)


def check_clock(record: GroupRecord) -> None:
    """Check that time only moves forward, and that no moment of a pass is without a cause."""
    course = record.course
    within = np.diff(course.times[:, : T_END + 1], axis=1)
    _require(bool((within >= 0).all()), "start ≤ gate ≤ end of lanes ≤ end of every event")
    start, stop = course.times[:, T_START], course.times[:, T_END]
    _require(bool((start[1:] >= stop[:-1]).all()), "events follow one another")
    chain = course.times[:, T_BUSY + len(LANES) :].sum(axis=1)
    _require(
        bool((np.abs(chain - (stop - start)) <= RELATIVE * np.maximum(1.0, stop)).all()),
        "critical-path times sum to the time of the event",
    )
    begin, end = course.pass_times[:, 0], course.pass_times[:, 1]
    _require(bool((end >= begin).all() and (begin[1:] >= end[:-1]).all()), "passes follow in turn")
    critical = course.pass_times[:, 5:8].sum(axis=1)
    slack = RELATIVE * np.maximum(1.0, end)
    _require(
        bool((np.abs(critical - (end - begin)) <= slack).all()),
        "critical-path times sum to the time of the pass",
    )
    busy = course.pass_times[:, 2:5]
    _require(bool((busy <= (end - begin + slack)[:, None]).all()), "a lane is busy at most always")


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
