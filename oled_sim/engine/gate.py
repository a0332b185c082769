"""What was decided at a gate, carried out: checked, counted, and made the lanes' plan.

:func:`settle` fixes everything that the event will do before any of it takes time: who is a hit,
what is copied in which order, what goes to the CPU, what became of prefetches. Who stays resident
is chosen in ``residents``, what takes how long on the lanes in ``timeline``.
"""

from __future__ import annotations

import numpy as np

from oled_sim.engine.jit import inlined, merged
from oled_sim.engine.prefetch_queue import dequeue
from oled_sim.engine.residents import choose_residents
from oled_sim.engine.retention import nan_problem, note_scores
from oled_sim.engine.state import (
    BY_TRANSFER,
    CPU_DUE,
    CPU_EXPERTS,
    CPU_TOKENS,
    DEMAND_EXPERT,
    DEMAND_TOKENS,
    DEMANDS,
    EQUAL,
    EVENT,
    EXPERT_BYTES,
    H2D,
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
    LASTING,
    LATE,
    LATE_COUNT,
    LATE_TOKENS,
    LAYER,
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
    N_HITS,
    N_KEPT,
    N_LATE,
    N_POOL_BYTES,
    N_PROMOTED,
    N_REUSED,
    N_TOKENS,
    N_USEFUL,
    NOT_A_LANE,
    NOT_RESIDENT,
    ON_CPU,
    ON_GPU,
    PEAK,
    PHASE,
    PLAN,
    PLAN_END,
    POOL_BYTES,
    PREFETCH,
    PROBLEM,
    QUEUED,
    REUSED,
    SHARED_DUE,
    SHARED_US,
    TOKENS,
    UNUSED,
    USED,
    USEFUL,
    USES,
)

# ruff: noqa: ANN001, ANN201, ANN202


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
    if work[EQUAL] == 0 and note_scores(pools.score[layer], scores) > 0:
        return nan_problem(work, scores)
    state.lanes.time[SHARED_US] = course.shared_us[v]
    _note_reuse(pools, course, layer, work[REUSED])
    row[N_DEMAND_BYTES] = row[N_DEMAND] * size
    row[N_CPU_BYTES] = (row[N_CPU_MISSES] + row[N_CPU_HITS]) * size
    if work[UNUSED] > 0 or work[QUEUED] > 0:
        _settle_prefetches(work, pools.unused[layer], state.queue, row, layer, ids, decided)
    choose_residents(state, layer, decided, flying)
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
def _note_reuse(pools, course, layer, reused):
    """Note what became of the transfers of the layer's last event, at its next gate."""
    before = pools.fresh_event[layer]
    if before >= 0:
        course.counts[before, N_REUSED] = reused
        course.counts[before, N_FOLLOWED] = course.counts[before, N_DEMAND]


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
def _note_window(window, row, experts):
    """Add the event to the statistics that the next allocation sees."""
    window[0] += 1.0
    window[1] += row[N_ACTIVATED] / experts
    if row[N_CAPACITY] > 0:
        window[2] += 1.0
        window[3] += row[N_HITS] / row[N_CAPACITY]
