"""Prefetches from the asking to the arrival: the queue, and those that wait for a pool.

Highest priority first, among equals the one queued first. An entry's row is found by layer and
expert (``Queue.place``), so one that is asked for again only changes its turn.
"""

from __future__ import annotations

from oled_sim.engine.jit import inlined, lean, merged
from oled_sim.engine.state import (
    COPIED_BYTES,
    H2D,
    HELD,
    JOB_EXPERT,
    JOB_LAYER,
    KIND,
    PREFETCH,
    PREFETCHED,
    PREFETCHED_BYTES,
    QUEUED,
    SEQUENCE,
    USED,
)

# ruff: noqa: ANN001, ANN201, ANN202, SIM110


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


@inlined
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


@lean
def begin_prefetch(work, queue, row, size):
    """Make an entry of the queue the job of the copy engine, and account for its ``size`` bytes."""
    work[KIND + H2D] = PREFETCH
    work[JOB_LAYER + H2D] = queue.entry[row, 0]
    work[JOB_EXPERT + H2D] = queue.entry[row, 1]
    dequeue(work, queue, row)
    work[USED] += 1
    work[COPIED_BYTES] += size
    work[PREFETCHED] += 1
    work[PREFETCHED_BYTES] += size


@inlined
def take_arrival(work, arrived):
    """Remember which prefetch arrived; it keeps its staging slot until it is admitted."""
    arrived[0] = work[JOB_LAYER + H2D]
    arrived[1] = work[JOB_EXPERT + H2D]


@inlined
def hold_arrival(work, held):
    """Let a prefetch that arrived wait for the running layer to end."""
    held[work[HELD], 0] = work[JOB_LAYER + H2D]
    held[work[HELD], 1] = work[JOB_EXPERT + H2D]
    work[HELD] += 1


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
