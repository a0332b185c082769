"""The course of a batch as a machine that runs to the next decision and stops.

:func:`advance` runs until a policy must decide: at a gate (``DECIDE``), when a prefetch reaches a
pool (``ARRIVED``), or when a pass has ended (``PASS_ENDED``). :func:`settle` carries out what was
decided at a gate, :func:`admit` what was decided about an arrival. Whoever calls them may be
Python (any policy) or compiled; Python calls both through :func:`proceed`.
"""

from __future__ import annotations

import numpy as np

from oled_sim.engine.jit import inlined, lean
from oled_sim.engine.retention import add_candidate, add_pool, add_residents, retain
from oled_sim.engine.state import (
    APPROACHING,
    ARRIVED,
    AT_GATE,
    BEGIN_PASS,
    BUDGET_BYTES,
    BUSY,
    COPIED_BYTES,
    CPU_DUE,
    CPU_EXPERTS,
    CPU_TOKENS,
    CRITICAL,
    DECIDE,
    DEMAND_EXPERT,
    DEMAND_KEPT,
    DEMAND_TOKENS,
    DEMANDS,
    DENSE,
    EVENT,
    EXPERT_BYTES,
    FREE_BYTES,
    FREED_BY_HITS,
    GLOBAL,
    GPU,
    H2D,
    HEAD,
    HEADING,
    HELD,
    HIT_EXPERTS,
    HIT_TOKENS,
    HITS_DUE,
    IN_LAYER,
    INCOMING,
    IS_RESIDENT,
    JOB_EXPERT,
    JOB_LAYER,
    JOB_TOKENS,
    KEPT,
    KIND,
    LANE_TIMES,
    LATE,
    LATE_COUNT,
    LATE_KEPT,
    LATE_TOKENS,
    LAYER,
    LEAVING,
    MERGE,
    MERGING,
    N_ACTIVATED,
    N_AFTER,
    N_BEFORE,
    N_CAPACITY,
    N_CPU_BYTES,
    N_CPU_HITS,
    N_CPU_MISSES,
    N_DEMAND,
    N_DEMAND_BYTES,
    N_FOLLOWED,
    N_FREE_BYTES,
    N_HITS,
    N_KEPT,
    N_LATE,
    N_POOL_BYTES,
    N_PROMOTED,
    N_REUSED,
    N_STAGING_PEAK,
    N_TOKENS,
    N_USEFUL,
    NAN_SCORE,
    NOT_A_LANE,
    NOT_RESIDENT,
    NOW,
    PASS,
    PASS_ENDED,
    PEAK,
    PHASE,
    PLAN,
    PLAN_END,
    POOL_BYTES,
    PREFETCH,
    PREFETCHED,
    PREFETCHED_BYTES,
    PROBLEM,
    QUEUED,
    SHARED_DUE,
    SHARED_US,
    START,
    STARTING,
    T_BUSY,
    T_END,
    T_GATE,
    T_LANES,
    T_START,
    TOKENS,
    USED,
    USEFUL,
    USES,
    WASTED,
)
from oled_sim.engine.timeline import dequeue, enqueue, finish_gpu, finish_layer, open_gate, start

# ruff: noqa: ANN001, ANN201, ANN202, SIM110

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2
"""The values of :class:`oled_sim.policy.Lane`."""


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


@inlined
def advance(state, course, tables):
    """Run to the next decision. Return DECIDE, ARRIVED, PASS_ENDED or OUTSIDE_PROFILE."""
    lanes, queue = state.lanes, state.queue
    time, work = lanes.time, lanes.work
    while True:
        phase = work[PHASE]
        if phase == BEGIN_PASS:
            _begin_pass(time, work, course)
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
                _release_held(work, queue)
                return ARRIVED
            _start_merge(time, work, course)
        else:  # a job of the GPU lane alone
            if finish_gpu(lanes, queue, tables) == ARRIVED:
                return ARRIVED
            if phase == APPROACHING:
                _arrive_at_gate(time, work, state.pools, course)
                return DECIDE
            if phase == HEADING:
                _end_pass(time, work, course)
                return PASS_ENDED
            _next_event(time, work, course)


@inlined
def _begin_pass(time, work, course):
    p = work[PASS]
    course.pass_times[p, 0] = time[NOW]
    work[EVENT] = course.pass_event[p] - 1
    start(time, work, GPU, START, course.start_us[p], -1, -1, 0, 0)
    work[PHASE] = STARTING


@inlined
def _next_event(time, work, course):
    """Go on after the start of a pass or the merge of an event."""
    p, v = work[PASS], work[EVENT]
    if work[PHASE] == MERGING:
        course.times[v, T_END] = time[NOW]
        _note_lane_times(time, course.times[v], 1.0)
    v += 1
    work[EVENT] = v
    if v < course.pass_event[p + 1]:
        course.times[v, T_START] = time[NOW]
        _note_lane_times(time, course.times[v], -1.0)
        layer, rows = course.event_layer[v], course.rows[v]
        start(time, work, GPU, DENSE, course.dense_us[v], layer, -1, 0, rows)
        work[PHASE] = APPROACHING
    else:
        start(time, work, GPU, HEAD, course.head_us[p], -1, -1, 0, 0)
        work[PHASE] = HEADING


@inlined
def _note_lane_times(time, row, sign):
    """Subtract the lanes' times so far in the pass from an event's row, or add them."""
    for i in range(LANE_TIMES):
        row[T_BUSY + i] += sign * time[BUSY + i]


@inlined
def _arrive_at_gate(time, work, pools, course):
    """Note what is known at the gate: the time, and what became of the last transfers."""
    v = work[EVENT]
    open_gate(time)
    course.times[v, T_GATE] = time[NOW]
    layer = course.event_layer[v]
    before = pools.fresh_event[layer]
    if before >= 0:
        fresh, resident = pools.fresh[layer], pools.resident[layer]
        reused = 0
        for i in range(course.offset[v], course.offset[v + 1]):
            expert = course.experts[i]
            reused += int(fresh[expert] and resident[expert])
        course.counts[before, N_REUSED] = reused
        course.counts[before, N_FOLLOWED] = course.counts[before, N_DEMAND]
    work[PHASE] = AT_GATE


@inlined
def _release_held(work, queue):
    """Take the first prefetch that waited for the layer to end."""
    held = queue.held
    queue.arrived[0] = held[0, 0]
    queue.arrived[1] = held[0, 1]
    work[HELD] -= 1
    for i in range(work[HELD]):
        held[i, 0] = held[i + 1, 0]
        held[i, 1] = held[i + 1, 1]


@inlined
def _start_merge(time, work, course):
    v = work[EVENT]
    start(time, work, GPU, MERGE, course.merge_us[v], course.event_layer[v], -1, 0, course.rows[v])
    work[PHASE] = MERGING


@inlined
def _end_pass(time, work, course):
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


@inlined
def settle(state, course, decided, scores):
    """Carry out a decision at a gate: check it, fix who stays, plan the lanes.

    Args:
        state: the state, at a gate.
        course: the batch.
        decided: int64 [A], a lane per activated expert.
        scores: float64 [E], value per expert of the layer.

    Returns:
        0, or what is wrong with the decision; ``work[PROBLEM]`` names the expert.
    """
    work, pools = state.lanes.work, state.pools
    v = work[EVENT]
    layer = course.event_layer[v]
    ids = course.experts[course.offset[v] : course.offset[v + 1]]
    tokens = course.tokens[course.offset[v] : course.offset[v + 1]]
    row = course.counts[v]
    problem = _check(work, pools.resident[layer], ids, decided, scores)
    if problem != 0:
        return problem
    score = pools.score[layer]
    for expert in range(len(scores)):
        score[expert] = scores[expert]
    size = pools.expert_bytes[layer]
    row[N_TOKENS] = course.rows[v]
    row[N_BEFORE] = pools.occupied[layer]
    row[N_CAPACITY] = pools.capacity[layer]
    flying = _in_flight(work, layer)
    _plan_work(work, state.lanes.demand, layer, course.rows[v], size, ids, tokens, decided, flying)
    state.lanes.time[SHARED_US] = course.shared_us[v]
    _count_decision(row, pools.resident[layer], ids, decided, flying)
    row[N_DEMAND_BYTES] = row[N_DEMAND] * size
    row[N_CPU_BYTES] = (row[N_CPU_MISSES] + row[N_CPU_HITS]) * size
    _settle_prefetches(work, pools.unused[layer], state.queue, row, layer, ids, decided)
    _touch(work, pools.used[layer], ids)
    _choose_residents(state, layer, decided, flying)
    row[N_KEPT] = work[KEPT]
    row[N_AFTER] = pools.occupied[layer]
    row[N_POOL_BYTES] = work[POOL_BYTES]
    pools.fresh_event[layer] = v
    if course.decode[course.event_pass[v]]:
        _note_window(pools.window[layer], row, len(scores))
    work[PHASE] = IN_LAYER
    return 0


@inlined
def _check(work, resident, ids, decided, scores):
    for i in range(len(decided)):
        work[PROBLEM] = ids[i]
        if decided[i] == ON_GPU:
            if not resident[ids[i]]:
                return NOT_RESIDENT
        elif decided[i] == BY_TRANSFER:
            if resident[ids[i]]:
                return IS_RESIDENT
        elif decided[i] != ON_CPU:
            return NOT_A_LANE
    unknown = 0
    for expert in range(len(scores)):  # several at a time: there is no way out of the loop
        unknown += int(scores[expert] != scores[expert])
    if unknown == 0:
        return 0
    for expert in range(len(scores) - 1, -1, -1):
        if np.isnan(scores[expert]):
            work[PROBLEM] = expert
    return NAN_SCORE


@inlined
def _in_flight(work, layer):
    """Return the expert of ``layer`` whose prefetch is being copied, or -1."""
    if work[KIND + H2D] == PREFETCH and work[JOB_LAYER + H2D] == layer:
        return work[JOB_EXPERT + H2D]
    return -1


@inlined
def _plan_work(work, demand, layer, rows, size, ids, tokens, decided, flying):
    """Fill the lanes' plan. A late prefetch is waited for, whatever lane was chosen for it."""
    work[PLAN:PLAN_END] = 0
    work[LAYER] = layer
    work[TOKENS] = rows
    work[EXPERT_BYTES] = size
    work[PEAK] = work[USED]
    for i in range(len(decided)):
        if ids[i] == flying:
            work[KIND + H2D] = LATE
            work[JOB_TOKENS + H2D] = tokens[i]
            work[LATE_TOKENS] = tokens[i]
            work[LATE_COUNT] += 1
            work[INCOMING] += 1
        elif decided[i] == ON_GPU:
            work[HIT_EXPERTS] += 1
            work[HIT_TOKENS] += tokens[i]
        elif decided[i] == ON_CPU:
            work[CPU_EXPERTS] += 1
            work[CPU_TOKENS] += tokens[i]
        else:
            row = work[DEMANDS]
            demand[row, DEMAND_EXPERT] = ids[i]
            demand[row, DEMAND_TOKENS] = tokens[i]
            demand[row, DEMAND_KEPT] = 0
            work[DEMANDS] += 1
            work[INCOMING] += 1
    work[HITS_DUE] = int(work[HIT_EXPERTS] > 0)
    work[CPU_DUE] = int(work[CPU_EXPERTS] > 0)
    work[SHARED_DUE] = 1


@inlined
def _count_decision(row, resident, ids, decided, flying):
    row[N_ACTIVATED] = len(ids)
    for i in range(len(ids)):
        if resident[ids[i]]:
            row[N_HITS] += 1
            row[N_CPU_HITS] += int(decided[i] == ON_CPU)
        elif ids[i] == flying:
            row[N_LATE] += 1
        elif decided[i] == ON_CPU:
            row[N_CPU_MISSES] += 1
        else:
            row[N_DEMAND] += 1


@inlined
def _settle_prefetches(work, unused, queue, row, layer, ids, decided):
    """Note prefetches that proved useful; a queued one becomes a demand transfer, or is moot."""
    for i in range(len(ids)):
        if unused[ids[i]]:
            unused[ids[i]] = False
            row[N_USEFUL] += 1
    work[USEFUL] += row[N_USEFUL]
    if work[QUEUED] == 0:
        return
    for i in range(len(ids)):
        place = queue.place[layer, ids[i]]
        if place >= 0:
            dequeue(work, queue, place)
            row[N_PROMOTED] += int(decided[i] == BY_TRANSFER)


@inlined
def _touch(work, used, ids):
    """Stamp the activated experts as most recently used, in recency order."""
    stamp = work[USES] * len(used)
    for i in range(len(ids)):
        used[ids[i]] = stamp + i
    work[USES] += 1


@inlined
def _choose_residents(state, layer, decided, flying):
    """Fix R' = the best of R and what is transferred; say which slots become free, and when."""
    pools, work, demand = state.pools, state.lanes.work, state.lanes.demand
    experts = pools.resident.shape[1]
    limit = _limit_bytes(work, pools, layer)
    work[FREE_BYTES] = limit - _pool_bytes(work, pools, layer)
    n = add_pool(pools, 0, layer, work[GLOBAL] == 1)
    for row in range(work[DEMANDS]):
        n = add_candidate(pools, n, layer, demand[row, DEMAND_EXPERT])
    if work[KIND + H2D] == LATE:
        n = add_candidate(pools, n, layer, flying)
    stay = retain(pools, n, limit)
    first = (work[USES] - 1) * experts
    lost = pools.lost
    for i in range(stay, n):
        owner, expert = pools.candidates[i] // experts, pools.candidates[i] % experts
        if not pools.resident[owner, expert]:
            lost[expert] = True  # it arrives, but does not stay
            continue
        _drop(work, pools, owner, expert)
        # A slot that this event's hits kernel reads is free only afterwards.
        rank = pools.used[owner, expert] - first
        if owner == layer and rank >= 0 and decided[rank] == ON_GPU:
            work[FREED_BY_HITS] += work[EXPERT_BYTES]
        else:
            work[FREE_BYTES] += pools.expert_bytes[owner]
    _welcome(work, pools, demand, layer, flying)


@inlined
def _welcome(work, pools, demand, layer, flying):
    """Make the transferred experts that stay residents, and remember the transfers."""
    lost, fresh = pools.lost, pools.fresh[layer]
    fresh[:] = False
    for row in range(work[DEMANDS]):
        expert = demand[row, DEMAND_EXPERT]
        fresh[expert] = True
        demand[row, DEMAND_KEPT] = int(not lost[expert])
        if not lost[expert]:
            _add(work, pools, layer, expert)
            work[KEPT] += 1
        lost[expert] = False
    if work[KIND + H2D] == LATE:
        work[LATE_KEPT] = int(not lost[flying])
        if not lost[flying]:
            _add(work, pools, layer, flying)
            work[KEPT] += 1
        lost[flying] = False


@inlined
def _add(work, pools, layer, expert):
    """Make an expert resident."""
    pools.resident[layer, expert] = True
    pools.occupied[layer] += 1
    work[POOL_BYTES] += pools.expert_bytes[layer]


@inlined
def _drop(work, pools, layer, expert):
    """Make a resident expert leave; a prefetched one that was never used was wasted."""
    pools.resident[layer, expert] = False
    pools.occupied[layer] -= 1
    work[POOL_BYTES] -= pools.expert_bytes[layer]
    if pools.unused[layer, expert]:
        pools.unused[layer, expert] = False
        work[WASTED] += 1


@inlined
def _limit_bytes(work, pools, layer):
    """Return the bytes that the pool of ``layer`` may hold."""
    if work[GLOBAL] == 1:
        return work[BUDGET_BYTES]
    return pools.capacity[layer] * pools.expert_bytes[layer]


@inlined
def _pool_bytes(work, pools, layer):
    """Return the bytes that the pool of ``layer`` holds."""
    if work[GLOBAL] == 1:
        return work[POOL_BYTES]
    return pools.occupied[layer] * pools.expert_bytes[layer]


@inlined
def _note_window(window, row, experts):
    """Add the event to the statistics that the next allocation sees."""
    window[0] += 1.0
    window[1] += row[N_ACTIVATED] / experts
    if row[N_CAPACITY] > 0:
        window[2] += 1.0
        window[3] += row[N_HITS] / row[N_CAPACITY]


@lean
def admit(state, scores):
    """Let an arrived prefetch into its pool, or drop it. Return 0 or NAN_SCORE."""
    pools, work = state.pools, state.lanes.work
    layer, expert = state.queue.arrived[0], state.queue.arrived[1]
    for e in range(len(scores)):
        if np.isnan(scores[e]):
            work[PROBLEM] = e
            return NAN_SCORE
        pools.score[layer, e] = scores[e]
    work[USED] -= 1
    if pools.resident[layer, expert]:
        work[WASTED] += 1
        return 0
    experts = pools.resident.shape[1]
    n = add_pool(pools, 0, layer, work[GLOBAL] == 1)
    n = add_candidate(pools, n, layer, expert)
    stay = retain(pools, n, _limit_bytes(work, pools, layer))
    arrived = layer * experts + expert
    stays = True
    for i in range(stay, n):
        if pools.candidates[i] == arrived:
            stays = False
        else:
            _drop(work, pools, pools.candidates[i] // experts, pools.candidates[i] % experts)
    if stays:
        _add(work, pools, layer, expert)
        pools.unused[layer, expert] = True
    else:
        work[WASTED] += 1
    return 0


@lean
def shrink(state, layer):
    """Drop the lowest-scored residents of a layer that exceed its capacity."""
    pools, work = state.pools, state.lanes.work
    n = add_residents(pools, 0, layer)
    stay = retain(pools, n, pools.capacity[layer] * pools.expert_bytes[layer])
    for i in range(stay, n):
        _drop(work, pools, layer, pools.candidates[i] % pools.resident.shape[1])


@lean
def ask_prefetches(state, wanted, replace):
    """Queue prefetches: float64 [n, 3] of layer, expert, priority; ``replace`` what is queued."""
    work, queue = state.lanes.work, state.queue
    while replace and work[QUEUED] > 0:
        dequeue(work, queue, work[QUEUED] - 1)
    for i in range(len(wanted)):
        layer, expert = int(wanted[i, 0]), int(wanted[i, 1])
        if not _on_its_way(state, layer, expert):
            enqueue(work, queue, layer, expert, wanted[i, 2])


@inlined
def _on_its_way(state, layer, expert):
    """Whether a prefetch would be in vain: resident, in flight, or arrived and held."""
    work, held = state.lanes.work, state.queue.held
    if state.pools.resident[layer, expert] or _in_flight(work, layer) == expert:
        return True
    for i in range(work[HELD]):
        if held[i, 0] == layer and held[i, 1] == expert:
            return True
    return False


@lean
def set_residents(state, layer, ids):
    """Make exactly ``ids`` resident in a layer, free of charge.

    Under global scope the lowest-scored experts of other layers leave if the pool overflows.
    """
    pools, work = state.pools, state.lanes.work
    experts = pools.resident.shape[1]
    for expert in range(experts):
        if pools.resident[layer, expert]:
            _drop(work, pools, layer, expert)
    for expert in ids:
        _add(work, pools, layer, expert)
    if work[GLOBAL] == 1 and work[POOL_BYTES] > work[BUDGET_BYTES]:
        n = 0
        for other in range(len(pools.occupied)):
            if other != layer:
                n = add_residents(pools, n, other)
        own = pools.occupied[layer] * pools.expert_bytes[layer]
        for i in range(retain(pools, n, work[BUDGET_BYTES] - own), n):
            _drop(work, pools, pools.candidates[i] // experts, pools.candidates[i] % experts)
