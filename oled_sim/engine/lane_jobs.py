"""Jobs of the lanes: which one a lane takes up next, and what its end does to staging and pool.

How long a job then runs, while other lanes slow it down, is the subject of ``timeline``.
"""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us
from oled_sim.engine.jit import inlined, merged
from oled_sim.engine.prefetch_queue import begin_prefetch, first_in_queue
from oled_sim.engine.state import (
    ARRIVALS,
    BEGAN,
    COPIED_BYTES,
    CPU,
    CPU_DUE,
    CPU_EXPERTS,
    CPU_TOKENS,
    DEMAND,
    DEMAND_EXPERT,
    DEMAND_KEPT,
    DEMAND_TOKENS,
    DEMANDS,
    EXPERT_BYTES,
    EXPERTS,
    FAULT,
    FREE_BYTES,
    FREED_BY_HITS,
    GPU,
    H2D,
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
    PEAK,
    PREFETCH,
    QUEUED,
    READY_EXPERTS,
    READY_STAGED,
    READY_TOKENS,
    RUNNING_STAGED,
    SHARED,
    SHARED_DUE,
    SHARED_US,
    SLOTS,
    TOKENS,
    USED,
    WAITING,
)

# ruff: noqa: ANN001, ANN201, ANN202


@merged
def start(time, work, lane, kind, duration_us, layer, expert, experts, tokens):
    """Start a job on an idle lane; its duration is what it takes with the other lanes idle."""
    note_job(work, lane, kind, layer, expert, experts, tokens)
    time[LEFT + lane] = duration_us
    time[BEGAN + lane] = time[NOW]
    if not duration_us >= 0.0:  # NaN: the profile does not reach so far
        work[FAULT] = kind


@inlined
def note_job(work, lane, kind, layer, expert, experts, tokens):
    """Write down what a lane works on from now on."""
    work[KIND + lane] = kind
    work[JOB_LAYER + lane] = layer
    work[JOB_EXPERT + lane] = expert
    work[JOB_EXPERTS + lane] = experts
    work[JOB_TOKENS + lane] = tokens


@inlined
def log_job(work, log, lane, began_us, now_us):
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
def next_gpu_job(time, work, tables):
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
    note_job(work, GPU, kind, work[LAYER], -1, experts, tokens)
    if kind == SHARED:
        return kind, time[SHARED_US]
    noticed_us = 0.0
    if kind == ARRIVALS and work[INCOMING] == 0:
        noticed_us = tables.per_arrival_us
    return kind, noticed_us + gpu_experts_us(tables, experts, tokens)


@inlined
def next_copy(lanes, queue, work, demand, taken_us):
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
        note_job(work, H2D, DEMAND, work[LAYER], expert, 1, tokens)
        return DEMAND, np.inf
    if work[QUEUED] == 0:
        return IDLE, np.inf
    if taken_us > 0.0:
        return IDLE, taken_us
    start_prefetch(lanes, queue)
    return work[KIND + H2D], np.inf


@inlined
def start_prefetch(lanes, queue):
    """Start the first queued prefetch if one more staging slot stays free for demand."""
    work = lanes.work
    if work[USED] >= work[SLOTS] - 1:
        return
    row = first_in_queue(work, queue)
    layer, expert = queue.entry[row, 0], queue.entry[row, 1]
    begin_prefetch(work, queue, row, lanes.expert_bytes[layer])
    work[PEAK] = max(work[PEAK], work[USED])
    start(lanes.time, work, H2D, PREFETCH, lanes.prefetch_us[layer], layer, expert, 1, 0)


@inlined
def _take_staging(work, size):
    work[USED] += 1
    work[PEAK] = max(work[PEAK], work[USED])
    work[COPIED_BYTES] += size


@inlined
def start_cpu(work, tables):
    """Take up the CPU's job; return its duration with the other lanes idle."""
    work[CPU_DUE] = 0
    experts, tokens = work[CPU_EXPERTS], work[CPU_TOKENS]
    note_job(work, CPU, EXPERTS, work[LAYER], -1, experts, tokens)
    link_us = cpu_link_us(tables, work[TOKENS])
    if work[DEMANDS] > 0:
        link_us += tables.per_cpu_job_beside_copies_us
    return link_us + cpu_experts_us(tables, experts, tokens)


@inlined
def end_gpu(work, kind):
    """Free what a job of the GPU lane was the last to read: pool slots, or staging slots."""
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
def land(work, demand, kind):
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
def _move_in(work):
    """Give an arrival a free slot of the pool, which ends its stay in staging."""
    work[FREE_BYTES] -= work[EXPERT_BYTES]
    work[USED] -= 1
