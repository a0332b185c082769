"""The three lanes: what runs when, and how long it takes (spec §4).

A lane runs one job at a time. While several lanes run, each is slowed by the profile's factor for
the set of the others, so rates are constant between two completions: time advances from one
completion to the next. Jobs of an event, from the gate on:

- GPU: one grouped kernel over the residents, then the shared expert, then arrivals. Whenever the
  lane is free it takes everything that has arrived by then as one grouped call; that the last one
  is there, the host has to notice first.
- H2D: demand transfers in the order of ``Event.experts``, each into a staging slot; then queued
  prefetches, as long as one more staging slot stays free for demand. The host takes these from the
  queue one by one: a while after the one before has arrived, and after a gate not before what was
  decided there is under way. The copy engine is idle meanwhile, and free for demand.
- CPU: one job, the activations' way there and the sums' way back plus the workers' makespan. All
  tokens of the event are sent, in one piece; where experts are copied as well, once the first
  copies are queued.

Critical path: every job starts the moment the last thing it waited for ends, so the time from the
gate to the layer's end is a chain of jobs; each lane is credited with its links of that chain.

Functions take plain arrays (``time``, ``work``: see ``state``) rather than tuples of them, since
a compiled call counts references of every array in a tuple that it takes apart.
"""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us
from oled_sim.engine.jit import inlined, lean, merged
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
    SHARED,
    SHARED_DUE,
    SHARED_US,
    SLOTS,
    TAKE,
    TOKENS,
    USED,
    WAITING,
)

# ruff: noqa: ANN001, ANN201, ANN202

GPU_BIT, H2D_BIT, CPU_BIT = 1 << GPU, 1 << H2D, 1 << CPU

TIE_US = 1e-6
"""Completions closer than a picosecond are one instant: float64 sums differ by less than that."""

# Lanes are 0, 1 and 2, and the entries of a lane are marked + lane, so ``time[LEFT]`` is the GPU's.


@merged
def start(time, work, lane, kind, duration_us, layer, expert, experts, tokens):
    """Start a job on an idle lane; its duration is what it takes with the other lanes idle."""
    _note_job(work, lane, kind, layer, expert, experts, tokens)
    time[LEFT + lane] = duration_us
    time[BEGAN + lane] = time[NOW]
    if not duration_us >= 0.0:  # NaN: the profile does not reach so far
        work[FAULT] = kind


@inlined
def run_on_gpu(lanes, kind, duration_us, layer, tokens):
    """Start a job on the idle GPU lane, and end it at once if no other lane is in its way."""
    time, work = lanes.time, lanes.work
    if work[KIND + H2D] != IDLE or work[QUEUED] > 0 or len(lanes.log) > 0:
        start(time, work, GPU, kind, duration_us, layer, -1, 0, tokens)
        return
    began = time[NOW]
    time[NOW] = began + duration_us
    time[ENDED + GPU] = time[NOW]
    time[BUSY + GPU] += duration_us
    time[CRITICAL + GPU] += time[NOW] - began


@inlined
def _note_job(work, lane, kind, layer, expert, experts, tokens):
    work[KIND + lane] = kind
    work[JOB_LAYER + lane] = layer
    work[JOB_EXPERT + lane] = expert
    work[JOB_EXPERTS + lane] = experts
    work[JOB_TOKENS + lane] = tokens


@inlined
def _log_job(work, log, lane, began_us, now_us):
    """Write a job that ends now to the log, if there is one, with the gauges of the moment."""
    row = work[LOGGED]
    if row >= len(log):
        return
    log[row, 0] = lane
    log[row, 1] = work[KIND + lane]
    log[row, 2] = work[JOB_LAYER + lane]
    log[row, 3] = work[JOB_EXPERT + lane]
    log[row, 4] = work[JOB_EXPERTS + lane]
    log[row, 5] = work[JOB_TOKENS + lane]
    log[row, 6] = began_us
    log[row, 7] = now_us
    log[row, 8] = work[USED]
    log[row, 9] = work[DEMANDS] - work[NEXT_DEMAND]
    log[row, 10] = work[QUEUED]
    work[LOGGED] = row + 1


@inlined
def until_next(slow, busy, left_gpu, left_h2d, left_cpu):
    """Return the time to the next completion among the busy lanes (a bit set)."""
    wait = np.inf
    if busy & GPU_BIT:
        wait = left_gpu * slow[GPU, busy]
    if busy & H2D_BIT:
        wait = min(wait, left_h2d * slow[H2D, busy])
    if busy & CPU_BIT:
        wait = min(wait, left_cpu * slow[CPU, busy])
    return wait


@inlined
def left_after(left, factor, wait):
    """Return what is left of a job after ``wait``; 0 if it ends."""
    return 0.0 if left * factor <= wait + TIE_US else left - wait / factor


@inlined
def _chain_of(now, gate, ended_us, chain, ended_a_us, chain_a, ended_b_us, chain_b):
    """Return the chain of waiting that a job starting now continues: (gpu, h2d, cpu) in µs.

    That of the job whose end it waited for: one of its own lane if it can be, else of lane a or b;
    at the gate there is none.
    """
    if now <= gate:
        return 0.0, 0.0, 0.0
    if ended_us == now:
        return chain
    if ended_a_us == now:
        return chain_a
    if ended_b_us == now:
        return chain_b
    return 0.0, 0.0, 0.0


@merged
def open_gate(time):
    """Mark now as the gate: chains of waiting are counted from here."""
    time[GATE] = time[NOW]
    for i in range(9):
        time[PATH + i] = 0.0


@merged
def finish_gpu(lanes, queue, tables):
    """Run until the GPU lane is free. Return DECIDE, or ARRIVED when a prefetch arrived before.

    Only prefetches run beside it.
    """
    time, work, log, slow = lanes.time, lanes.work, lanes.log, tables.interference
    while work[KIND + GPU] != IDLE:
        taken_us = np.inf
        if work[QUEUED] > 0 and work[KIND + H2D] == IDLE:
            taken_us = _until_taken(time[NOW], time[TAKE])
            if taken_us == 0.0:
                taken_us = np.inf
                _start_prefetch(lanes, queue)
        copies = work[KIND + H2D] != IDLE
        busy = GPU_BIT | H2D_BIT if copies else GPU_BIT
        wait = until_next(slow, busy, time[LEFT + GPU], time[LEFT + H2D], 0.0)
        wait = min(wait, taken_us)
        time[NOW] += wait
        time[BUSY + GPU] += wait
        time[LEFT + GPU] = left_after(time[LEFT + GPU], slow[GPU, busy], wait)
        if time[LEFT + GPU] == 0.0:
            time[CRITICAL + GPU] += time[NOW] - time[BEGAN + GPU]
            time[ENDED + GPU] = time[NOW]
            _log_job(work, log, GPU, time[BEGAN + GPU], time[NOW])
            work[KIND + GPU] = IDLE
        if not copies:
            continue
        time[BUSY + H2D] += wait
        time[LEFT + H2D] = left_after(time[LEFT + H2D], slow[H2D, busy], wait)
        if time[LEFT + H2D] == 0.0:
            time[ENDED + H2D] = time[NOW]
            _log_job(work, log, H2D, time[BEGAN + H2D], time[NOW])
            work[KIND + H2D] = IDLE
            time[TAKE] = max(time[TAKE], time[NOW] + tables.per_prefetch_us)
            _take_arrival(work, queue.arrived)
            return ARRIVED
    return DECIDE


@merged
def finish_layer(lanes, queue, tables, whole):
    """Run the event's plan to the end of all lanes.

    A prefetch that arrives for the pool in use waits in staging until the layer ends, so that no
    slot is overwritten that the event still needs; for another pool the engine asks at once.
    ``whole``: 1 if one pool serves all layers.

    What changes at every step is held in local variables, which a compiler keeps in registers.

    Returns:
        DECIDE when all is done, ARRIVED, or OUTSIDE_PROFILE.
    """
    time, work, demand, log = lanes.time, lanes.work, lanes.demand, lanes.log
    copy_us, slow = lanes.copy_us[work[LAYER]], tables.interference
    now, gate, take = time[NOW], time[GATE], time[TAKE]
    left_gpu, left_h2d, left_cpu = time[LEFT], time[LEFT + H2D], time[LEFT + CPU]
    began_gpu, began_h2d, began_cpu = time[BEGAN], time[BEGAN + H2D], time[BEGAN + CPU]
    ended_gpu, ended_h2d, ended_cpu = time[ENDED], time[ENDED + H2D], time[ENDED + CPU]
    chain_gpu = time[PATH], time[PATH + 1], time[PATH + 2]
    chain_h2d = time[PATH + 3], time[PATH + 4], time[PATH + 5]
    chain_cpu = time[PATH + 6], time[PATH + 7], time[PATH + 8]
    gpu, h2d, cpu = work[KIND], work[KIND + H2D], work[KIND + CPU]
    busy_gpu, busy_h2d, busy_cpu = 0.0, 0.0, 0.0
    fault, stop = IDLE, DECIDE
    while True:
        if gpu == IDLE:
            gpu, left_gpu = _next_gpu_job(time, work, tables)
            if gpu != IDLE:
                began_gpu = now
                chain_gpu = _chain_of(
                    now, gate, ended_gpu, chain_gpu, ended_h2d, chain_h2d, ended_cpu, chain_cpu
                )
                fault = fault if left_gpu >= 0.0 else gpu
        taken_us = np.inf
        if h2d == IDLE:
            h2d, taken_us = _next_copy(lanes, queue, work, demand, _until_taken(now, take))
            if h2d != IDLE:
                left_h2d = copy_us if h2d == DEMAND else lanes.prefetch_us[work[JOB_LAYER + H2D]]
                began_h2d = now
                chain_h2d = _chain_of(
                    now, gate, ended_h2d, chain_h2d, ended_gpu, chain_gpu, ended_cpu, chain_cpu
                )
        if work[CPU_DUE]:
            cpu, began_cpu, left_cpu = EXPERTS, now, _start_cpu(work, tables)
            chain_cpu = _chain_of(
                now, gate, ended_cpu, chain_cpu, ended_gpu, chain_gpu, ended_h2d, chain_h2d
            )
            fault = fault if left_cpu >= 0.0 else EXPERTS
        if fault != IDLE:
            stop = OUTSIDE_PROFILE
            break
        if gpu == IDLE and cpu == IDLE and work[INCOMING] == 0:  # arrivals have been computed
            _credit(time, now, ended_gpu, chain_gpu, ended_h2d, chain_h2d, ended_cpu, chain_cpu)
            break
        busy = int(gpu != IDLE) | int(h2d != IDLE) << H2D | int(cpu != IDLE) << CPU
        wait = min(taken_us, until_next(slow, busy, left_gpu, left_h2d, left_cpu))
        now += wait
        if gpu != IDLE:
            busy_gpu += wait
            left_gpu = left_after(left_gpu, slow[GPU, busy], wait)
            if left_gpu == 0.0:
                chain_gpu = chain_gpu[0] + (now - max(began_gpu, gate)), chain_gpu[1], chain_gpu[2]
                ended_gpu = now
                _log_job(work, log, GPU, began_gpu, now)
                _end_gpu(work, gpu)
                gpu = IDLE
        if h2d != IDLE:
            busy_h2d += wait
            left_h2d = left_after(left_h2d, slow[H2D, busy], wait)
            if left_h2d == 0.0:
                chain_h2d = chain_h2d[0], chain_h2d[1] + (now - max(began_h2d, gate)), chain_h2d[2]
                ended_h2d = now
                _log_job(work, log, H2D, began_h2d, now)
                copied, h2d = h2d, IDLE
                work[KIND + H2D] = IDLE
                if copied == PREFETCH:
                    take = max(take, now + tables.per_prefetch_us)
                if copied != PREFETCH:
                    _land(work, demand, copied)
                elif whole == 1 or work[JOB_LAYER + H2D] == work[LAYER]:
                    _hold_arrival(work, queue.held)
                else:
                    _take_arrival(work, queue.arrived)
                    stop = ARRIVED
        if cpu != IDLE:
            busy_cpu += wait
            left_cpu = left_after(left_cpu, slow[CPU, busy], wait)
            if left_cpu == 0.0:
                chain_cpu = chain_cpu[0], chain_cpu[1], chain_cpu[2] + (now - max(began_cpu, gate))
                ended_cpu = now
                _log_job(work, log, CPU, began_cpu, now)
                cpu = IDLE
        if stop == ARRIVED:
            break
    time[NOW], time[TAKE] = now, take
    time[LEFT], time[LEFT + H2D], time[LEFT + CPU] = left_gpu, left_h2d, left_cpu
    time[BEGAN], time[BEGAN + H2D], time[BEGAN + CPU] = began_gpu, began_h2d, began_cpu
    time[ENDED], time[ENDED + H2D], time[ENDED + CPU] = ended_gpu, ended_h2d, ended_cpu
    time[PATH], time[PATH + 1], time[PATH + 2] = chain_gpu
    time[PATH + 3], time[PATH + 4], time[PATH + 5] = chain_h2d
    time[PATH + 6], time[PATH + 7], time[PATH + 8] = chain_cpu
    work[KIND], work[KIND + H2D], work[KIND + CPU] = gpu, h2d, cpu
    time[BUSY] += busy_gpu
    time[BUSY + H2D] += busy_h2d
    time[BUSY + CPU] += busy_cpu
    work[FAULT] = fault
    return stop


@inlined
def _credit(time, now, ended_gpu, chain_gpu, ended_h2d, chain_h2d, ended_cpu, chain_cpu):
    """Credit the lanes with the chain of jobs that ended last."""
    if now <= time[GATE]:
        return
    chain = chain_gpu
    if ended_gpu != now and ended_h2d == now:
        chain = chain_h2d
    elif ended_gpu != now and ended_cpu == now:
        chain = chain_cpu
    time[CRITICAL] += chain[0]
    time[CRITICAL + H2D] += chain[1]
    time[CRITICAL + CPU] += chain[2]


@inlined
def _next_gpu_job(time, work, tables):
    """Take up the next job of the GPU lane: residents, then the shared expert, then arrivals.

    Returns:
        Its kind and its duration with the other lanes idle; IDLE if there is none.
    """
    kind, experts, tokens = IDLE, 0, work[TOKENS]
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
        return IDLE, 0.0
    _note_job(work, GPU, kind, work[LAYER], -1, experts, tokens)
    if kind == SHARED:
        return kind, time[SHARED_US]
    noticed_us = 0.0
    if kind == ARRIVALS and work[INCOMING] == 0:
        noticed_us = tables.per_arrival_us
    return kind, noticed_us + gpu_experts_us(tables, experts, tokens)


@inlined
def _next_copy(lanes, queue, work, demand, taken_us):
    """Take up the next transfer: demand first, then prefetches.

    Returns:
        Its kind or IDLE, and until when a prefetch waits for the host: ``taken_us``, or infinity.
    """
    if work[NEXT_DEMAND] < work[DEMANDS]:
        if work[USED] >= work[SLOTS]:
            return IDLE, np.inf
        row = work[NEXT_DEMAND]
        work[NEXT_DEMAND] += 1
        _take_staging(work, work[EXPERT_BYTES])
        expert, tokens = demand[row, DEMAND_EXPERT], demand[row, DEMAND_TOKENS]
        _note_job(work, H2D, DEMAND, work[LAYER], expert, 1, tokens)
        return DEMAND, np.inf
    if work[QUEUED] == 0:
        return IDLE, np.inf
    if taken_us > 0.0:
        return IDLE, taken_us
    _start_prefetch(lanes, queue)
    return work[KIND + H2D], np.inf


@inlined
def _until_taken(now, take):
    """Return how long the host still takes until it can start a prefetch, µs."""
    return 0.0 if take <= now + TIE_US else take - now


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
def _start_cpu(work, tables):
    """Take up the CPU's job; return its duration with the other lanes idle."""
    work[CPU_DUE] = 0
    experts, tokens = work[CPU_EXPERTS], work[CPU_TOKENS]
    _note_job(work, CPU, EXPERTS, work[LAYER], -1, experts, tokens)
    link_us = cpu_link_us(tables, work[TOKENS])
    if work[DEMANDS] > 0:
        link_us += tables.per_cpu_job_beside_copies_us
    return link_us + cpu_experts_us(tables, experts, tokens)


@inlined
def _start_prefetch(lanes, queue):
    """Start the first queued prefetch if one more staging slot stays free for demand."""
    work = lanes.work
    if work[USED] >= work[SLOTS] - 1:
        return
    row = first_in_queue(work, queue)
    layer, expert = queue.entry[row, 0], queue.entry[row, 1]
    dequeue(work, queue, row)
    _take_staging(work, lanes.expert_bytes[layer])
    start(lanes.time, work, H2D, PREFETCH, lanes.prefetch_us[layer], layer, expert, 1, 0)
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


@merged
def enqueue(queue, queued, turn, layer, expert, priority):
    """Queue a prefetch behind ``queued`` others; one that is there already takes a new turn."""
    row = queue.place[layer, expert]
    if row < 0:
        row = queued
        queue.place[layer, expert] = row
    queue.entry[row, 0] = layer
    queue.entry[row, 1] = expert
    queue.entry[row, 2] = turn
    queue.priority[row] = priority


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
def first_in_queue(work, queue):
    """Return the row of the highest priority; among equals the one queued first."""
    best = 0
    for row in range(1, work[QUEUED]):
        higher = queue.priority[row] > queue.priority[best]
        equal = queue.priority[row] == queue.priority[best]
        if higher or (equal and queue.entry[row, 2] < queue.entry[best, 2]):
            best = row
    return best
