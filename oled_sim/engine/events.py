"""The course of a batch as a machine that runs to the next decision and stops.

:func:`advance` runs until a policy must decide: at a gate (``DECIDE``), when a prefetch reaches a
pool (``ARRIVED``), or when a pass has ended (``PASS_ENDED``). :func:`settle` carries out what was
decided at a gate, :func:`admit` what was decided about an arrival. Whoever calls them may be
Python (any policy) or compiled; Python calls both through :func:`proceed`.
"""

from __future__ import annotations

import numpy as np

from oled_sim.engine.jit import direct, inlined, lean, merged
from oled_sim.engine.retention import (
    add_all_residents,
    add_candidate,
    add_residents,
    drop_worst,
    insert_in_order,
    retain,
)
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
    EQUAL,
    EVENT,
    EXPERT_BYTES,
    FREE_BYTES,
    FREED_BY_HITS,
    GLOBAL,
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
    LASTING,
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
    REUSED,
    SEQUENCE,
    SHARED_DUE,
    SHARED_US,
    START,
    STARTING,
    T_BUSY,
    T_END,
    T_GATE,
    T_LANES,
    T_START,
    TAKE,
    TOKENS,
    UNUSED,
    USED,
    USEFUL,
    USES,
    WASTED,
)
from oled_sim.engine.timeline import (
    dequeue,
    enqueue,
    finish_gpu,
    finish_layer,
    open_gate,
    run_on_gpu,
)

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
def release_held(work, queue):
    """Take the first prefetch that waited for the layer to end."""
    held = queue.held
    queue.arrived[0] = held[0, 0]
    queue.arrived[1] = held[0, 1]
    work[HELD] -= 1
    for i in range(work[HELD]):
        held[i, 0] = held[i + 1, 0]
        held[i, 1] = held[i + 1, 1]


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


@merged
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
    size = pools.expert_bytes[layer]
    row[N_TOKENS] = course.rows[v]
    row[N_BEFORE] = pools.occupied[layer]
    row[N_CAPACITY] = pools.capacity[layer]
    flying = _in_flight(work, layer)
    wrong = _plan(state, row, layer, course.rows[v], ids, tokens, decided, flying)
    if wrong:
        return _problem(work, pools.resident[layer], ids, decided)
    if work[EQUAL] == 0 and _note_scores(pools.score[layer], scores) > 0:
        return _nan_problem(work, scores)
    state.lanes.time[SHARED_US] = course.shared_us[v]
    _note_reuse(pools, course, layer, work[REUSED])
    row[N_DEMAND_BYTES] = row[N_DEMAND] * size
    row[N_CPU_BYTES] = (row[N_CPU_MISSES] + row[N_CPU_HITS]) * size
    if work[UNUSED] > 0 or work[QUEUED] > 0:
        _settle_prefetches(work, pools.unused[layer], state.queue, row, layer, ids, decided)
    _choose_residents(state, layer, decided, flying)
    row[N_KEPT] = work[KEPT]
    row[N_AFTER] = pools.occupied[layer]
    row[N_POOL_BYTES] = work[POOL_BYTES]
    pools.fresh_event[layer] = v
    if course.decode[course.event_pass[v]]:
        _note_window(pools.window[layer], row, pools.resident.shape[1])
    work[PHASE] = IN_LAYER
    return 0


@inlined
def _problem(work, resident, ids, decided):
    """Return what is wrong with the first wrong lane, and note its expert."""
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
    return 0


@inlined
def _note_scores(score, scores):
    """Take scores over; return how many are NaN. Several at a time: the loop has no way out."""
    unknown = 0
    for expert in range(len(scores)):
        score[expert] = scores[expert]
        unknown += int(scores[expert] != scores[expert])
    return unknown


@inlined
def _nan_problem(work, scores):
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
def _plan(state, row, layer, rows, ids, tokens, decided, flying):
    """Fill the lanes' plan and the event's counts, and stamp its experts as used.

    One walk through the experts, without branches: who misses cannot be predicted. The first
    ``work[LASTING]`` entries of ``pools.ages`` become those that are resident or on their way.

    Returns:
        0 if every lane is possible; else the rest is of no use.
    """
    work, demand, pools = state.lanes.work, state.lanes.demand, state.pools
    resident, used, fresh, lasting = (
        pools.here[layer], pools.used[layer], pools.fresh[layer], pools.ages,
    )  # fmt: skip
    stamp = work[USES] * len(used)
    wrong, demands, stay, reused, cpu, total = 0, 0, 0, 0, 0, 0
    for i in range(len(decided)):
        expert, lane, n = ids[i], decided[i], tokens[i]
        here, moved = np.int64(resident[expert]), lane & BY_TRANSFER
        wrong |= _impossible(lane, here)
        total += n
        cpu += lane >> 1
        reused += fresh[expert]
        demand[demands, DEMAND_EXPERT] = expert
        demand[demands, DEMAND_TOKENS] = n
        demands += moved
        lasting[stay] = expert
        stay += here | moved
        used[expert] = stamp + i
    work[USES] += 1
    work[PLAN:PLAN_END] = 0
    work[DEMANDS], work[LASTING], work[REUSED] = demands, stay, reused
    hits, cpu_hits, late = stay - demands, 0, 0
    if cpu > 0:
        cpu_hits = _count_cpu(work, resident, ids, tokens, decided)
    if flying >= 0:
        late = _wait_for(work, demand, lasting, ids, tokens, decided, flying, resident)
    demands, cpu = work[DEMANDS], work[CPU_EXPERTS]
    row[N_ACTIVATED], row[N_HITS], row[N_LATE], row[N_DEMAND] = len(ids), hits, late, demands
    row[N_CPU_HITS], row[N_CPU_MISSES] = cpu_hits, cpu - cpu_hits
    work[LAYER], work[TOKENS], work[EXPERT_BYTES] = layer, rows, pools.expert_bytes[layer]
    work[PEAK] = work[USED]
    work[HIT_EXPERTS] = hits - cpu_hits
    work[HIT_TOKENS] = total - work[CPU_TOKENS] - work[LATE_TOKENS]
    for i in range(demands):
        work[HIT_TOKENS] -= demand[i, DEMAND_TOKENS]
    work[HITS_DUE], work[CPU_DUE], work[SHARED_DUE] = int(hits > cpu_hits), int(cpu > 0), 1
    work[INCOMING] = demands + late
    return wrong


@inlined
def _count_cpu(work, resident, ids, tokens, decided):
    """Note how many experts and tokens go to the CPU; return how many of them are resident."""
    cpu_hits = 0
    for i in range(len(decided)):
        if decided[i] == ON_CPU:
            work[CPU_EXPERTS] += 1
            work[CPU_TOKENS] += tokens[i]
            cpu_hits += int(resident[ids[i]])
    return cpu_hits


@inlined
def _note_reuse(pools, course, layer, reused):
    """Note what became of the transfers of the layer's last event, at its next gate."""
    before = pools.fresh_event[layer]
    if before >= 0:
        course.counts[before, N_REUSED] = reused
        course.counts[before, N_FOLLOWED] = course.counts[before, N_DEMAND]


@inlined
def _impossible(lane, here):
    """Return 0 if an expert can take a lane, in bits alone: 2 always, 1 if absent, 0 if here."""
    return (lane & ~3) | (lane & lane >> 1) | ((lane ^ here ^ 1) & 1 & ~(lane >> 1))


@inlined
def _wait_for(work, demand, lasting, ids, tokens, decided, flying, resident):
    """Wait for a late prefetch, whatever lane was chosen for it. Return 1 if there is one, or 0.

    It is no demand transfer and no CPU expert then, and it may stay.
    """
    late, stay, row = 0, 0, 0
    for i in range(len(decided)):
        moved = decided[i] == BY_TRANSFER
        if ids[i] == flying:
            late = 1
            work[KIND + H2D] = LATE
            work[JOB_TOKENS + H2D] = tokens[i]
            work[LATE_TOKENS] = tokens[i]
            work[LATE_COUNT] += 1
            if decided[i] == ON_CPU:
                work[CPU_EXPERTS] -= 1
                work[CPU_TOKENS] -= tokens[i]
        elif moved:
            demand[row, DEMAND_EXPERT] = ids[i]
            demand[row, DEMAND_TOKENS] = tokens[i]
            row += 1
        if moved or ids[i] == flying or resident[ids[i]]:
            lasting[stay] = ids[i]
            stay += 1
    work[DEMANDS] = row
    work[LASTING] = stay
    return late


@inlined
def _settle_prefetches(work, unused, queue, row, layer, ids, decided):
    """Note prefetches that proved useful; a queued one becomes a demand transfer, or is moot."""
    for i in range(len(ids)):
        if unused[ids[i]]:
            unused[ids[i]] = False
            work[UNUSED] -= 1
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
def _choose_residents(state, layer, decided, flying):
    """Fix R' = the best of R and what is transferred; say which slots become free, and when."""
    pools, work, demand = state.pools, state.lanes.work, state.lanes.demand
    work[FREE_BYTES] = _limit_bytes(work, pools, layer) - _pool_bytes(work, pools, layer)
    if work[GLOBAL] == 1:
        _choose_of_all(state, layer, decided, flying)
    else:
        _choose_of_layer(pools, work, layer, decided)
    _welcome(work, pools, demand, layer, flying)


@inlined
def _choose_of_layer(pools, work, layer, decided):
    """Choose among the residents of a layer's own pool and what is transferred."""
    order, used, lasting = pools.order[layer], pools.used[layer], pools.ages
    first = (work[USES] - 1) * len(used)
    n = 0
    for i in range(pools.occupied[layer]):
        order[n] = order[i]
        n += int(used[order[i]] < first)
    for i in range(work[LASTING]):
        order[n + i] = lasting[i]
    n += work[LASTING]
    kept = drop_worst(pools, layer, n, n - pools.capacity[layer], work[EQUAL] == 1)
    for i in range(n - kept):
        _let_go(work, pools, layer, layer, pools.candidates[i], first, decided)


@inlined
def _choose_of_all(state, layer, decided, flying):
    """Choose among the residents of all layers and what is transferred."""
    pools, work, demand = state.pools, state.lanes.work, state.lanes.demand
    experts = pools.resident.shape[1]
    n = add_all_residents(pools)
    for row in range(work[DEMANDS]):
        n = add_candidate(pools, n, layer, demand[row, DEMAND_EXPERT])
    if work[KIND + H2D] == LATE:
        n = add_candidate(pools, n, layer, flying)
    first = (work[USES] - 1) * experts
    for i in range(retain(pools, n, work[BUDGET_BYTES]), n):
        owner, expert = pools.candidates[i] // experts, pools.candidates[i] % experts
        _let_go(work, pools, layer, owner, expert, first, decided)


@inlined
def _let_go(work, pools, layer, owner, expert, first, decided):
    """Drop a resident of layer ``owner``, or mark an arrival as one that does not stay."""
    if not pools.resident[owner, expert]:
        pools.lost[expert] = True
        return
    _drop(work, pools, owner, expert)
    # A slot that this event's hits kernel reads is free only afterwards.
    rank = pools.used[owner, expert] - first
    if owner == layer and rank >= 0 and decided[rank] == ON_GPU:
        work[FREED_BY_HITS] += work[EXPERT_BYTES]
    else:
        work[FREE_BYTES] += pools.expert_bytes[owner]


@inlined
def _welcome(work, pools, demand, layer, flying):
    """Make the transferred experts that stay residents, and remember the transfers."""
    lost, fresh = pools.lost, pools.fresh[layer]
    fresh[:] = 0
    for row in range(work[DEMANDS]):
        expert = demand[row, DEMAND_EXPERT]
        fresh[expert] = 1 - int(lost[expert])
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
    pools.fresh[layer, expert] = 0
    pools.occupied[layer] -= 1
    work[POOL_BYTES] -= pools.expert_bytes[layer]
    if pools.unused[layer, expert]:
        pools.unused[layer, expert] = False
        work[UNUSED] -= 1
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
    if _note_scores(pools.score[layer], scores) > 0:
        return _nan_problem(work, scores)
    work[USED] -= 1
    if pools.resident[layer, expert]:
        work[WASTED] += 1
        return 0
    if work[GLOBAL] == 1:
        stays = _admit_to_all(work, pools, layer, expert)
    else:
        stays = _admit_to_layer(work, pools, layer, expert)
    if stays:
        _add(work, pools, layer, expert)
        pools.unused[layer, expert] = True
        work[UNUSED] += 1
    else:
        work[WASTED] += 1
    return 0


@inlined
def _admit_to_layer(work, pools, layer, expert):
    """Whether an arrival stays in the layer's own pool; who has to make room leaves."""
    n = insert_in_order(pools, layer, pools.occupied[layer], expert)
    kept = drop_worst(pools, layer, n, n - pools.capacity[layer], work[EQUAL] == 1)
    stays = True
    for i in range(n - kept):
        if pools.candidates[i] == expert:
            stays = False
        else:
            _drop(work, pools, layer, pools.candidates[i])
    return stays


@inlined
def _admit_to_all(work, pools, layer, expert):
    """Whether an arrival stays in the pool of all layers; who has to make room leaves."""
    experts = pools.resident.shape[1]
    n = add_candidate(pools, add_all_residents(pools), layer, expert)
    stays = True
    for i in range(retain(pools, n, work[BUDGET_BYTES]), n):
        if pools.candidates[i] == layer * experts + expert:
            stays = False
        else:
            _drop(work, pools, pools.candidates[i] // experts, pools.candidates[i] % experts)
    return stays


@lean
def change_capacities(pools, work, capacity):
    """Give layers new capacities, int64 [L]; those that shrink drop their lowest-scored first."""
    for layer in range(len(capacity)):
        n = pools.occupied[layer]
        kept = drop_worst(pools, layer, n, n - capacity[layer], work[EQUAL] == 1)
        for i in range(n - kept):
            _drop(work, pools, layer, pools.candidates[i])
        pools.capacity[layer] = capacity[layer]


@lean
def ask_prefetches(state, wanted, replace):
    """Queue prefetches: float64 [n, 3] of layer, expert, priority; ``replace`` what is queued."""
    work, queue, resident = state.lanes.work, state.queue, state.pools.resident
    queued, turn, flying = work[QUEUED], work[SEQUENCE], (-1, -1)
    if work[KIND + H2D] == PREFETCH:
        flying = work[JOB_LAYER + H2D], work[JOB_EXPERT + H2D]
    if replace:
        for row in range(queued):
            queue.place[queue.entry[row, 0], queue.entry[row, 1]] = -1
        queued = 0
    for i in range(len(wanted)):
        layer, expert = int(wanted[i, 0]), int(wanted[i, 1])
        on_its_way = layer == flying[0] and expert == flying[1]
        if resident[layer, expert] or on_its_way or _is_held(work, queue.held, layer, expert):
            continue  # in vain
        new = queue.place[layer, expert] < 0
        enqueue(queue, queued, turn, layer, expert, wanted[i, 2])
        queued += int(new)
        turn += 1
    work[QUEUED], work[SEQUENCE] = queued, turn


@inlined
def _is_held(work, held, layer, expert):
    """Whether an expert has arrived and waits for the running layer to end."""
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
            retained = pools.fresh[layer, expert]
            _drop(work, pools, layer, expert)
            pools.fresh[layer, expert] = retained  # until this gate
    for expert in ids:
        _add(work, pools, layer, expert)
    if work[GLOBAL] == 0:
        for n in range(len(ids)):
            insert_in_order(pools, layer, n, ids[n])
    elif work[POOL_BYTES] > work[BUDGET_BYTES]:
        n = 0
        for other in range(len(pools.occupied)):
            if other != layer:
                n = add_residents(pools, n, other)
        own = pools.occupied[layer] * pools.expert_bytes[layer]
        for i in range(retain(pools, n, work[BUDGET_BYTES] - own), n):
            _drop(work, pools, pools.candidates[i] // experts, pools.candidates[i] % experts)


class Kernels:
    """The kernels that Python calls, for one simulation, whose arrays keep their types."""

    def __init__(self) -> None:
        self.proceed = direct(proceed)
        self.admit = direct(admit)
        self.ask_prefetches = direct(ask_prefetches)
        self.set_residents = direct(set_residents)
        self.change_capacities = direct(change_capacities)
