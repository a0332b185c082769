"""The course of a batch as a machine that runs to the next decision and stops.

:func:`advance` runs until a policy must decide: at a gate (``DECIDE``), when a prefetch reaches a
pool (``ARRIVED``), or when a pass has ended (``PASS_ENDED``). :func:`~oled_sim.engine.gate.settle`
carries out what was decided at a gate, :func:`~oled_sim.engine.admission.admit` what was decided
about an arrival. Whoever calls them may be Python (any policy) or compiled; Python settles and
advances through :func:`proceed`.
"""

from __future__ import annotations

from oled_sim.engine.gate import settle
from oled_sim.engine.jit import inlined, lean, merged
from oled_sim.engine.prefetch_queue import release_held
from oled_sim.engine.state import (
    APPROACHING,
    ARRIVED,
    AT_GATE,
    BEGIN_PASS,
    BUSY,
    COPIED_BYTES,
    CRITICAL,
    DECIDE,
    DENSE,
    EVENT,
    FREE_BYTES,
    GLOBAL,
    HEAD,
    HEADING,
    HELD,
    IN_LAYER,
    LANE_TIMES,
    LATE_COUNT,
    LATER,
    LEAVING,
    MERGE,
    MERGING,
    N_FREE_BYTES,
    N_STAGING_PEAK,
    NOW,
    PASS,
    PASS_ENDED,
    PEAK,
    PHASE,
    PREFETCHED,
    PREFETCHED_BYTES,
    START,
    STARTING,
    T_BUSY,
    T_END,
    T_GATE,
    T_LANES,
    T_START,
    TAKE,
    USEFUL,
    WASTED,
)
from oled_sim.engine.timeline import finish_gpu, finish_layer, open_gate, run_on_gpu

# ruff: noqa: ANN001, ANN201, ANN202

SETTLE, RUN_ON = 1, 2
"""What :func:`proceed` does; add them for both."""


@lean
def proceed(state, course, tables, what, decided, scores):
    """Settle a decision at a gate, run on to the next one, or both in one call.

    Args:
        state: the state.
        course: the batch.
        tables: costs.
        what: ``SETTLE``, ``RUN_ON`` or their sum.
        decided: int64 [A], see :func:`settle`. scores: float64 [E]. Not read without ``SETTLE``.

    Returns:
        A decision point of :func:`advance`, or a negative number: what is wrong with the decision.
    """
    if what & SETTLE:
        problem = settle(state, course, decided, scores)
        if problem != 0:
            return problem
    if what & RUN_ON:
        return advance(state, course, tables)
    return 0


@merged
def advance(state, course, tables):
    """Run to the next decision. Return DECIDE, ARRIVED, PASS_ENDED or OUTSIDE_PROFILE."""
    lanes, queue = state.lanes, state.queue
    time, work = lanes.time, lanes.work
    while True:
        phase = work[PHASE]
        if phase == BEGIN_PASS:
            _begin_pass(lanes, course)
        elif phase == IN_LAYER:
            stop = finish_layer(lanes, queue, tables, work[GLOBAL])
            if stop != DECIDE:
                return stop
            course.times[work[EVENT], T_LANES] = time[NOW]
            course.counts[work[EVENT], N_STAGING_PEAK] = work[PEAK]
            course.counts[work[EVENT], N_FREE_BYTES] = work[FREE_BYTES]
            work[PHASE] = LEAVING
        elif phase == LEAVING:
            if work[HELD] > 0:
                release_held(work, queue)
                return ARRIVED
            _start_merge(lanes, course)
            time[TAKE] = max(time[TAKE], time[NOW] + tables.prefetch_after_layer_us)
        else:  # a job of the GPU lane alone
            if finish_gpu(lanes, queue, tables) == ARRIVED:
                return ARRIVED
            if phase == APPROACHING:
                _arrive_at_gate(time, work, course)
                time[TAKE] = max(time[TAKE], time[NOW] + tables.first_prefetch_us)
                return DECIDE
            if phase == HEADING:
                end_pass(time, work, course)
                return PASS_ENDED
            _next_event(lanes, course)


@inlined
def _begin_pass(lanes, course):
    time, work = lanes.time, lanes.work
    p = work[PASS]
    course.pass_times[p, 0] = time[NOW]
    work[EVENT] = course.pass_event[p] - 1
    run_on_gpu(lanes, START, course.start_us[p], -1, 0)
    work[PHASE] = STARTING


@inlined
def _next_event(lanes, course):
    """Go on after the start of a pass or the merge of an event."""
    time, work = lanes.time, lanes.work
    p, v = work[PASS], work[EVENT]
    if work[PHASE] == MERGING:
        course.times[v, T_END] = time[NOW]
        _note_lane_times(time, course.times[v], 1.0)
    v += 1
    work[EVENT] = v
    if v < course.pass_event[p + 1]:
        course.times[v, T_START] = time[NOW]
        _note_lane_times(time, course.times[v], -1.0)
        run_on_gpu(lanes, DENSE, course.dense_us[v], course.event_layer[v], course.rows[v])
        time[LATER] = 0.0
        work[PHASE] = APPROACHING
    else:
        run_on_gpu(lanes, HEAD, course.head_us[p], -1, 0)
        work[PHASE] = HEADING


@inlined
def _note_lane_times(time, row, sign):
    """Subtract the lanes' times so far in the pass from an event's row, or add them."""
    for i in range(LANE_TIMES):
        row[T_BUSY + i] += sign * time[BUSY + i]


@inlined
def _arrive_at_gate(time, work, course):
    """Note when the gate is reached, and that nothing was chosen for it yet."""
    v = work[EVENT]
    open_gate(time)
    course.times[v, T_GATE] = time[NOW]
    work[PHASE] = AT_GATE


@inlined
def _start_merge(lanes, course):
    """Sum all parts."""
    v = lanes.work[EVENT]
    run_on_gpu(lanes, MERGE, course.merge_us[v], course.event_layer[v], course.rows[v])
    lanes.work[PHASE] = MERGING


@inlined
def end_pass(time, work, course):
    """Note what was measured, and start counting anew: what follows belongs to the next pass."""
    p = work[PASS]
    course.pass_times[p, 1] = time[NOW]
    for lane in range(3):
        course.pass_times[p, 2 + lane] = time[BUSY + lane]
        course.pass_times[p, 5 + lane] = time[CRITICAL + lane]
        time[BUSY + lane] = 0.0
        time[CRITICAL + lane] = 0.0
    meters = (COPIED_BYTES, PREFETCHED, PREFETCHED_BYTES, USEFUL, LATE_COUNT, WASTED)
    for column in range(len(meters)):
        course.pass_counts[p, column] = work[meters[column]]
        work[meters[column]] = 0
    work[PASS] = p + 1
    work[PHASE] = BEGIN_PASS
