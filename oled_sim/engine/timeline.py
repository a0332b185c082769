"""The three lanes: what runs when, and how long it takes (spec §4).

A lane runs one job at a time. While several lanes run, each is slowed by the profile's factor for
the set of the others, so rates are constant between two completions: time advances from one
completion to the next. Jobs of an event, from the gate on:

- GPU: one grouped kernel over the residents, then the shared expert, then arrivals. Whenever the
  lane is free it takes everything that has arrived by then as one grouped call.
- H2D: demand transfers in the order of ``Event.experts``, each into a staging slot; then queued
  prefetches, as long as one more staging slot stays free for demand.
- CPU: one job, the activations' way there and the sums' way back plus the workers' makespan. All
  tokens of the event are sent, in one piece.

Critical path: every job starts the moment the last thing it waited for ends, so the time from the
gate to the layer's end is a chain of jobs; each lane is credited with its links of that chain.

Functions take plain arrays (``time``, ``work``: see ``state``) rather than tuples of them, since
a compiled call counts references of every array in a tuple that it takes apart.
"""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us
from oled_sim.engine.jit import inlined, lean
from oled_sim.engine.state import (
    ARRIVALS,
    ARRIVED,
    BEGAN,
    BUSY,
    COPIED_BYTES,
    CPU,
    CPU_DUE,
    CPU_EXPERTS,
    CPU_TOKENS,
    CRITICAL,
    DECIDE,
    DEMAND,
    DEMAND_EXPERT,
    DEMAND_KEPT,
    DEMAND_TOKENS,
    DEMANDS,
    ENDED,
    EXPERT_BYTES,
    EXPERTS,
    FAULT,
    FREE_BYTES,
    FREED_BY_HITS,
    GATE,
    GPU,
    H2D,
    HELD,
    HIT_EXPERTS,
    HIT_TOKENS,
    HITS,
    HITS_DUE,
    IDLE,
    INCOMING,
    JOB_EXPERT,
    JOB_EXPERTS,
    JOB_LAYER,
    JOB_TOKENS,
    KIND,
    LATE,
    LATE_KEPT,
    LATE_TOKENS,
    LAYER,
    LEFT,
    LOGGED,
    NEXT_DEMAND,
    NOW,
    OUTSIDE_PROFILE,
    PATH,
    PEAK,
    PREFETCH,
    PREFETCHED,
    PREFETCHED_BYTES,
    QUEUED,
    READY_EXPERTS,
    READY_STAGED,
    READY_TOKENS,
    RUNNING_STAGED,
    SEQUENCE,
    SHARED,
    SHARED_DUE,
    SHARED_US,
    SLOTS,
    TOKENS,
    USED,
    WAITING,
)

# ruff: noqa: ANN001, ANN201, ANN202

TIE_US = 1e-6
"""Completions closer than a picosecond are one instant: float64 sums differ by less than that."""


@lean
def start(time, work, lane, kind, duration_us, layer, expert, experts, tokens):
    """Start a job on an idle lane; its duration is what it takes with the other lanes idle."""
    work[KIND + lane] = kind
    work[JOB_LAYER + lane] = layer
    work[JOB_EXPERT + lane] = expert
    work[JOB_EXPERTS + lane] = experts
    work[JOB_TOKENS + lane] = tokens
    time[LEFT + lane] = duration_us
    time[BEGAN + lane] = time[NOW]
    cause = _cause(time, lane)
    for i in range(3):
        time[PATH + 3 * lane + i] = time[PATH + 3 * cause + i] if cause >= 0 else 0.0
    if not duration_us >= 0.0:  # NaN: the profile does not reach so far
        work[FAULT] = kind


@inlined
def _cause(time, lane):
    """Return the lane whose last job the new one waited for; -1 if it waited for the gate."""
    now = time[NOW]
    if now <= time[GATE]:
        return -1
    if time[ENDED + lane] == now:
        return lane
    for other in range(3):
        if time[ENDED + other] == now:
            return other
    return -1


@lean
def step(time, work, interference, log):
    """Advance to the next completion. Return the set of lanes (bits) whose job ended."""
    busy = 0
    for lane in range(3):
        if work[KIND + lane] != IDLE:
            busy |= 1 << lane
    wait = np.inf
    for lane in range(3):
        if busy >> lane & 1:
            wait = min(wait, time[LEFT + lane] * interference[lane, busy])
    time[NOW] += wait
    ended = 0
    for lane in range(3):
        if busy >> lane & 1:
            factor = interference[lane, busy]
            time[BUSY + lane] += wait
            if time[LEFT + lane] * factor <= wait + TIE_US:
                ended |= 1 << lane
                _end(time, work, lane, log)
            else:
                time[LEFT + lane] -= wait / factor
    return ended


@inlined
def _end(time, work, lane, log):
    now = time[NOW]
    time[PATH + 4 * lane] += now - max(time[BEGAN + lane], time[GATE])
    time[ENDED + lane] = now
    row = work[LOGGED]
    if row < len(log):
        log[row, 0] = lane
        log[row, 1] = work[KIND + lane]
        log[row, 2] = work[JOB_LAYER + lane]
        log[row, 3] = work[JOB_EXPERT + lane]
        log[row, 4] = work[JOB_EXPERTS + lane]
        log[row, 5] = work[JOB_TOKENS + lane]
        log[row, 6] = time[BEGAN + lane]
        log[row, 7] = now
        log[row, 8] = work[USED]
        log[row, 9] = work[DEMANDS] - work[NEXT_DEMAND]
        log[row, 10] = work[QUEUED]
        work[LOGGED] = row + 1
    work[KIND + lane] = IDLE


@lean
def open_gate(time):
    """Mark now as the gate: chains of waiting are counted from here."""
    time[GATE] = time[NOW]
    for i in range(9):
        time[PATH + i] = 0.0


@lean
def finish_gpu(lanes, queue, tables):
    """Run until the GPU lane is free. Return DECIDE, or ARRIVED when a prefetch arrived before."""
    time, work, log = lanes.time, lanes.work, lanes.log
    while work[KIND + GPU] != IDLE:
        if work[QUEUED] > 0 and work[KIND + H2D] == IDLE:
            _start_prefetch(lanes, queue)
        ended = step(time, work, tables.interference, log)
        if ended >> GPU & 1:
            time[CRITICAL + GPU] += time[NOW] - time[BEGAN + GPU]
        if ended >> H2D & 1:
            _take_arrival(work, queue.arrived)
            return ARRIVED
    return DECIDE


@lean
def finish_layer(lanes, queue, tables, whole):
    """Run the event's plan to the end of all lanes.

    A prefetch that arrives for the pool in use waits in staging until the layer ends, so that no
    slot is overwritten that the event still needs; for another pool the engine asks at once.
    ``whole``: 1 if one pool serves all layers.

    Returns:
        DECIDE when all is done, ARRIVED, or OUTSIDE_PROFILE.
    """
    time, work, demand, log = lanes.time, lanes.work, lanes.demand, lanes.log
    copy_us, interference = lanes.copy_us[work[LAYER]], tables.interference
    while True:
        if work[KIND + GPU] == IDLE:
            _start_gpu(time, work, tables)
        if work[KIND + H2D] == IDLE:
            if work[NEXT_DEMAND] < work[DEMANDS]:
                _start_demand(time, work, demand, copy_us)
            elif work[QUEUED] > 0:
                _start_prefetch(lanes, queue)
        if work[CPU_DUE]:
            _start_cpu(time, work, tables)
        if work[FAULT] != IDLE:
            return OUTSIDE_PROFILE
        if _layer_done(work):
            _credit(time)
            return DECIDE
        ran, copied = work[KIND + GPU], work[KIND + H2D]
        ended = step(time, work, interference, log)
        if ended >> GPU & 1:
            _end_gpu(work, ran)
        if ended >> H2D & 1:
            if copied != PREFETCH:
                _land(work, demand, copied)
            elif whole == 1 or work[JOB_LAYER + H2D] == work[LAYER]:
                _hold_arrival(work, queue.held)
            else:
                _take_arrival(work, queue.arrived)
                return ARRIVED


@inlined
def _layer_done(work):
    lanes_idle = work[KIND + GPU] == IDLE and work[KIND + CPU] == IDLE
    return lanes_idle and work[INCOMING] == 0 and work[READY_EXPERTS] == 0


@inlined
def _credit(time):
    """Credit the lanes with the chain of jobs that ended last."""
    now = time[NOW]
    if now <= time[GATE]:
        return
    last = GPU
    for lane in (CPU, H2D, GPU):
        if time[ENDED + lane] == now:
            last = lane
    for i in range(3):
        time[CRITICAL + i] += time[PATH + 3 * last + i]


@inlined
def _start_gpu(time, work, tables):
    """Start the next job of the GPU lane: residents, then the shared expert, then arrivals."""
    experts, tokens = 0, work[TOKENS]
    if work[HITS_DUE]:
        kind, experts, tokens = HITS, work[HIT_EXPERTS], work[HIT_TOKENS]
        work[HITS_DUE] = 0
    elif work[SHARED_DUE]:
        kind = SHARED
        work[SHARED_DUE] = 0
    elif work[READY_EXPERTS]:
        kind, experts, tokens = ARRIVALS, work[READY_EXPERTS], work[READY_TOKENS]
        work[RUNNING_STAGED] = work[READY_STAGED]
        work[READY_EXPERTS] = 0
        work[READY_TOKENS] = 0
        work[READY_STAGED] = 0
    else:
        return
    duration = time[SHARED_US] if kind == SHARED else gpu_experts_us(tables, experts, tokens)
    start(time, work, GPU, kind, duration, work[LAYER], -1, experts, tokens)


@inlined
def _end_gpu(work, kind):
    if kind == HITS:
        work[FREE_BYTES] += work[FREED_BY_HITS]
        work[FREED_BY_HITS] = 0
        while work[WAITING] > 0 and work[FREE_BYTES] >= work[EXPERT_BYTES]:
            work[WAITING] -= 1
            _move_in(work)
    elif kind == ARRIVALS:
        work[USED] -= work[RUNNING_STAGED]
        work[RUNNING_STAGED] = 0


@inlined
def _move_in(work):
    """Give an arrival a free slot of the pool, which ends its stay in staging."""
    work[FREE_BYTES] -= work[EXPERT_BYTES]
    work[USED] -= 1


@inlined
def _start_cpu(time, work, tables):
    work[CPU_DUE] = 0
    experts, tokens = work[CPU_EXPERTS], work[CPU_TOKENS]
    duration = cpu_link_us(tables, work[TOKENS]) + cpu_experts_us(tables, experts, tokens)
    start(time, work, CPU, EXPERTS, duration, work[LAYER], -1, experts, tokens)


@inlined
def _start_demand(time, work, demand, copy_us):
    """Start the next demand transfer if a staging slot is free."""
    if work[USED] >= work[SLOTS]:
        return
    row = work[NEXT_DEMAND]
    work[NEXT_DEMAND] += 1
    _take_staging(work, work[EXPERT_BYTES])
    expert, tokens = demand[row, DEMAND_EXPERT], demand[row, DEMAND_TOKENS]
    start(time, work, H2D, DEMAND, copy_us, work[LAYER], expert, 1, tokens)


@inlined
def _start_prefetch(lanes, queue):
    """Start the first queued prefetch if one more staging slot stays free for demand."""
    work = lanes.work
    if work[USED] >= work[SLOTS] - 1:
        return
    row = _first_in_queue(work, queue)
    layer, expert = queue.entry[row, 0], queue.entry[row, 1]
    dequeue(work, queue, row)
    _take_staging(work, lanes.expert_bytes[layer])
    start(lanes.time, work, H2D, PREFETCH, lanes.copy_us[layer], layer, expert, 1, 0)
    work[PREFETCHED] += 1
    work[PREFETCHED_BYTES] += lanes.expert_bytes[layer]


@inlined
def _take_staging(work, size):
    work[USED] += 1
    work[PEAK] = max(work[PEAK], work[USED])
    work[COPIED_BYTES] += size


@inlined
def _land(work, demand, kind):
    """Take in an arrived demand or late transfer."""
    if kind == LATE:
        kept, tokens = work[LATE_KEPT], work[LATE_TOKENS]
    else:
        row = work[NEXT_DEMAND] - 1
        kept, tokens = demand[row, DEMAND_KEPT], demand[row, DEMAND_TOKENS]
    work[INCOMING] -= 1
    work[READY_EXPERTS] += 1
    work[READY_TOKENS] += tokens
    if not kept:
        work[READY_STAGED] += 1
    elif work[FREE_BYTES] >= work[EXPERT_BYTES]:
        _move_in(work)
    else:
        work[WAITING] += 1


@inlined
def _take_arrival(work, arrived):
    """Remember which prefetch arrived; it keeps its staging slot until it is admitted."""
    arrived[0] = work[JOB_LAYER + H2D]
    arrived[1] = work[JOB_EXPERT + H2D]


@inlined
def _hold_arrival(work, held):
    held[work[HELD], 0] = work[JOB_LAYER + H2D]
    held[work[HELD], 1] = work[JOB_EXPERT + H2D]
    work[HELD] += 1


@lean
def enqueue(work, queue, layer, expert, priority):
    """Queue a prefetch; one that is queued already takes the new priority and a new turn."""
    row = queue.place[layer, expert]
    if row < 0:
        row = work[QUEUED]
        work[QUEUED] += 1
        queue.place[layer, expert] = row
    queue.entry[row, 0] = layer
    queue.entry[row, 1] = expert
    queue.entry[row, 2] = work[SEQUENCE]
    queue.priority[row] = priority
    work[SEQUENCE] += 1


@lean
def dequeue(work, queue, row):
    """Remove an entry of the queue; the last one takes its row."""
    last = work[QUEUED] - 1
    queue.place[queue.entry[row, 0], queue.entry[row, 1]] = -1
    if row != last:
        for column in range(3):
            queue.entry[row, column] = queue.entry[last, column]
        queue.priority[row] = queue.priority[last]
        queue.place[queue.entry[row, 0], queue.entry[row, 1]] = row
    work[QUEUED] = last


@inlined
def _first_in_queue(work, queue):
    """Return the row of the highest priority; among equals the one queued first."""
    best = 0
    for row in range(1, work[QUEUED]):
        higher = queue.priority[row] > queue.priority[best]
        equal = queue.priority[row] == queue.priority[best]
        if higher or (equal and queue.entry[row, 2] < queue.entry[best, 2]):
            best = row
    return best
