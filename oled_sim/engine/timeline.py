"""The three lanes: what runs when, and how long it takes (spec §4).

A lane runs one job at a time. While several lanes run, each is slowed by the profile's factor for
the set of the others, so rates are constant between two completions: time advances from one
completion to the next. Jobs of an event, from the gate on:

- GPU: one grouped kernel over the residents, then the shared expert, then arrivals. Whenever the
  lane is free it takes everything that has arrived by then as one grouped call; that the last one
  is there, the host has to notice first.
- H2D: demand transfers in the order of ``Event.experts``, each into a staging slot; then queued
  prefetches, as long as one more staging slot stays free for demand. The host takes these from the
  queue one by one: a while after the one before has arrived, after a gate not before what was
  decided there is under way, and after a layer not before what follows is. The copy engine is idle
  meanwhile, and free for demand. A gate's routing waits while the host starts a prefetch.
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

from oled_sim.engine.jit import inlined, merged
from oled_sim.engine.lane_jobs import (
    end_gpu,
    land,
    log_job,
    next_copy,
    next_gpu_job,
    start,
    start_cpu,
    start_prefetch,
)
from oled_sim.engine.prefetch_queue import hold_arrival, take_arrival
from oled_sim.engine.state import (
    ARRIVED,
    BEGAN,
    BUSY,
    CPU,
    CPU_DUE,
    CRITICAL,
    DECIDE,
    DEMAND,
    DENSE,
    ENDED,
    EXPERTS,
    FAULT,
    GATE,
    GPU,
    H2D,
    IDLE,
    INCOMING,
    JOB_LAYER,
    KIND,
    LATER,
    LAYER,
    LEFT,
    NOW,
    OUTSIDE_PROFILE,
    PATH,
    PREFETCH,
    QUEUED,
    TAKE,
)

# ruff: noqa: ANN001, ANN201, ANN202

GPU_BIT, H2D_BIT, CPU_BIT = 1 << GPU, 1 << H2D, 1 << CPU

TIE_US = 1e-6
"""Completions closer than a picosecond are one instant: float64 sums differ by less than that."""

# Lanes are 0, 1 and 2, and the entries of a lane are marked + lane, so ``time[LEFT]`` is the GPU's.


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
def _until_taken(now, take):
    """Return how long the host still takes until it can start a prefetch, µs."""
    return 0.0 if take <= now + TIE_US else take - now


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
        if work[QUEUED] > 0 and work[KIND + H2D] == IDLE and _host_looks(time, work, tables):
            taken_us = _until_taken(time[NOW], time[TAKE])
            if taken_us == 0.0:
                taken_us = np.inf
                start_prefetch(lanes, queue)
                _put_off_gate(time, work, tables)
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
            log_job(work, log, GPU, time[BEGAN + GPU], time[NOW])
            work[KIND + GPU] = IDLE
        if not copies:
            continue
        time[BUSY + H2D] += wait
        time[LEFT + H2D] = left_after(time[LEFT + H2D], slow[H2D, busy], wait)
        if time[LEFT + H2D] == 0.0:
            time[ENDED + H2D] = time[NOW]
            log_job(work, log, H2D, time[BEGAN + H2D], time[NOW])
            work[KIND + H2D] = IDLE
            time[TAKE] = max(time[TAKE], time[NOW] + tables.per_prefetch_us)
            take_arrival(work, queue.arrived)
            return ARRIVED
    return DECIDE


@inlined
def _host_looks(time, work, tables):
    """Whether the host looks after the copy engine: not once the routing of a gate is there.

    What the host adds to an event is the end of the job before its gate: of that, only this is left
    by then.
    """
    routed = False
    if work[KIND + GPU] == DENSE and tables.gate_after_prefetch_us >= 0.0:
        routed = time[LEFT + GPU] - time[LATER] <= tables.per_event_us
    return not routed


@inlined
def _put_off_gate(time, work, tables):
    """Have the host see the next gate no earlier than it is done with the prefetch just started."""
    after_us = tables.gate_after_prefetch_us
    if work[KIND + GPU] == DENSE and work[KIND + H2D] == PREFETCH and after_us >= 0.0:
        least = after_us / tables.interference[GPU, GPU_BIT | H2D_BIT] + tables.per_event_us
        if time[LEFT + GPU] < least:
            time[LATER] += least - time[LEFT + GPU]
            time[LEFT + GPU] = least


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
            gpu, left_gpu = next_gpu_job(time, work, tables)
            if gpu != IDLE:
                began_gpu = now
                chain_gpu = _chain_of(
                    now, gate, ended_gpu, chain_gpu, ended_h2d, chain_h2d, ended_cpu, chain_cpu
                )
                fault = fault if left_gpu >= 0.0 else gpu
        taken_us = np.inf
        if h2d == IDLE:
            h2d, taken_us = next_copy(lanes, queue, work, demand, _until_taken(now, take))
            if h2d != IDLE:
                left_h2d = copy_us if h2d == DEMAND else lanes.prefetch_us[work[JOB_LAYER + H2D]]
                began_h2d = now
                chain_h2d = _chain_of(
                    now, gate, ended_h2d, chain_h2d, ended_gpu, chain_gpu, ended_cpu, chain_cpu
                )
        if work[CPU_DUE]:
            cpu, began_cpu, left_cpu = EXPERTS, now, start_cpu(work, tables)
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
                log_job(work, log, GPU, began_gpu, now)
                end_gpu(work, gpu)
                gpu = IDLE
        if h2d != IDLE:
            busy_h2d += wait
            left_h2d = left_after(left_h2d, slow[H2D, busy], wait)
            if left_h2d == 0.0:
                chain_h2d = chain_h2d[0], chain_h2d[1] + (now - max(began_h2d, gate)), chain_h2d[2]
                ended_h2d = now
                log_job(work, log, H2D, began_h2d, now)
                copied, h2d = h2d, IDLE
                work[KIND + H2D] = IDLE
                if copied == PREFETCH:
                    take = max(take, now + tables.per_prefetch_us)
                if copied != PREFETCH:
                    land(work, demand, copied)
                elif whole == 1 or work[JOB_LAYER + H2D] == work[LAYER]:
                    hold_arrival(work, queue.held)
                else:
                    take_arrival(work, queue.arrived)
                    stop = ARRIVED
        if cpu != IDLE:
            busy_cpu += wait
            left_cpu = left_after(left_cpu, slow[CPU, busy], wait)
            if left_cpu == 0.0:
                chain_cpu = chain_cpu[0], chain_cpu[1], chain_cpu[2] + (now - max(began_cpu, gate))
                ended_cpu = now
                log_job(work, log, CPU, began_cpu, now)
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
