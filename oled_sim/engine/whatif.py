"""What the engine would charge for a decision, for policies that weigh decisions by time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.tables import CostTables, gpu_experts_us, shared_expert_us
from oled_sim.engine.jit import merged
from oled_sim.engine.state import (
    ARRIVALS,
    CPU,
    CPU_DUE,
    CPU_EXPERTS,
    CPU_TOKENS,
    DECIDE,
    DEMAND_EXPERT,
    DEMAND_KEPT,
    DEMAND_TOKENS,
    DEMANDS,
    EXPERT_BYTES,
    FAULT,
    FREE_BYTES,
    GATE,
    GPU,
    H2D,
    HIT_EXPERTS,
    HIT_TOKENS,
    HITS,
    HITS_DUE,
    IDLE,
    INCOMING,
    KIND,
    LAYER,
    NOW,
    PLAN,
    PLAN_END,
    SHARED,
    SHARED_DUE,
    SHARED_US,
    TOKENS,
    USED,
    Lanes,
    Queue,
    new_lanes,
    new_queue,
)
from oled_sim.engine.timeline import finish_layer, left_after, until_next
from oled_sim.policy import Event

AMPLE_BYTES = 1 << 60
DEMANDED = 1
"""``Lane.TRANSFER``."""


class LayerTimer:
    """Times decisions by the engine's own lane model, on lanes of its own.

    ``lanes``, ``queue`` and ``tables`` are for kernels of a policy: :func:`open_trial`, then
    :func:`add_hit` and the like, then :func:`run_trial`.
    """

    def __init__(
        self,
        experts: int,
        copy_us: NDArray[np.float64],
        expert_bytes: NDArray[np.int64],
        staging: int,
        costs: LaneCosts,
    ) -> None:
        self.lanes: Lanes = new_lanes(experts, copy_us, expert_bytes, staging)
        self.queue: Queue = new_queue(1, 1, staging)
        self.tables: CostTables = costs.tables

    def layer_us(self, event: Event, lanes: NDArray[np.int64]) -> float:
        """Return the time from the gate to the end of all lanes.

        Copies and workers are idle at the gate, and every arrival finds a free slot.

        Args:
            event: the event.
            lanes: int64 [A], a ``Lane`` per activated expert.
        """
        decided = np.ascontiguousarray(lanes, np.int64)
        rows = len(event.routes)
        return layer_us(
            self.lanes, self.queue, self.tables, event.layer, rows, event.tokens, decided
        )


# ruff: noqa: ANN001, ANN201


@merged
def layer_us(lanes, queue, tables, layer, rows, tokens, decided):
    """Time a decision with ample free slots; see :meth:`LayerTimer.layer_us`.

    Args:
        lanes, queue, tables: of a :class:`LayerTimer`.
        layer: index of the layer. rows: tokens of the event.
        tokens: int64 [A], tokens per activated expert. decided: int64 [A], their lanes.
    """
    work, demand = lanes.work, lanes.demand
    open_trial(lanes, tables, layer, rows, AMPLE_BYTES)
    for i in range(len(decided)):
        if decided[i] == 0:
            add_hit(work, tokens[i])
        elif decided[i] == 1:
            add_transfer(work, demand, i, tokens[i], True)
        else:
            add_cpu(work, tokens[i])
    return run_trial(lanes, queue, tables)


@merged
def open_trial(lanes, tables, layer, rows, free_bytes):
    """Clear the trial: idle lanes at a gate, ``free_bytes`` of free slots."""
    work, time = lanes.work, lanes.time
    time[NOW] = 0.0
    time[GATE] = 0.0
    work[KIND : KIND + 3] = IDLE
    work[PLAN:PLAN_END] = 0
    work[LAYER] = layer
    work[TOKENS] = rows
    work[EXPERT_BYTES] = lanes.expert_bytes[layer]
    work[FREE_BYTES] = free_bytes
    work[USED] = 0
    work[FAULT] = IDLE
    time[SHARED_US] = shared_expert_us(tables, rows)


@merged
def add_hit(work, tokens):
    """Add a resident that is computed on the GPU."""
    work[HIT_EXPERTS] += 1
    work[HIT_TOKENS] += tokens


@merged
def add_cpu(work, tokens):
    """Add an expert that is computed on the CPU."""
    work[CPU_EXPERTS] += 1
    work[CPU_TOKENS] += tokens


@merged
def add_transfer(work, demand, expert, tokens, kept):
    """Add a demand transfer, after those added before; ``kept``: it is retained."""
    row = work[DEMANDS]
    demand[row, DEMAND_EXPERT] = expert
    demand[row, DEMAND_TOKENS] = tokens
    demand[row, DEMAND_KEPT] = int(kept)
    work[DEMANDS] += 1
    work[INCOMING] += 1


@merged
def run_trial(lanes, queue, tables):
    """Return the time from the gate until all lanes have ended.

    NaN outside the profile.
    """
    work = lanes.work
    work[HITS_DUE] = int(work[HIT_EXPERTS] > 0)
    work[CPU_DUE] = int(work[CPU_EXPERTS] > 0)
    work[SHARED_DUE] = 1
    if finish_layer(lanes, queue, tables, 0) != DECIDE:
        return np.nan
    return lanes.time[NOW]


@merged
def least_us(tables, slowed, copies_us, cpu):
    """Return a time that :func:`split_us` does not undercut but by rounding.

    Args:
        tables: costs. slowed: from :func:`least_slowdowns`.
        copies_us: of all misses that are transferred, alone. cpu: as there.
    """
    if cpu[0] == 0:
        return copies_us
    if not cpu[1] >= 0.0:  # NaN: unknown
        return 0.0
    beside_cpu_us = min(copies_us * slowed[0], copies_us + cpu[1] * (1.0 - 1.0 / slowed[0]))
    beside_copies_us = min(cpu[1] * slowed[1], cpu[1] + copies_us * (1.0 - 1.0 / slowed[1]))
    after_us = tables.per_arrival_us if copies_us > 0.0 else 0.0
    return max(beside_cpu_us + after_us, beside_copies_us)


@merged
def least_slowdowns(tables):
    """Return the least factors by which copies and CPU slow each other, whatever the GPU does."""
    both, copies, cpu = 1 << H2D | 1 << CPU, np.inf, np.inf
    for busy in (both, both | 1 << GPU):
        copies = min(copies, tables.interference[H2D, busy])
        cpu = min(cpu, tables.interference[CPU, busy])
    return copies, cpu


@merged
def split_us(tables, copy_us, hits, cpu, shared_us, lane, tokens):
    """Time a split of misses: what :func:`run_trial` returns with ample free slots, to the bit.

    A search that times dozens of splits at a gate has no use for what else the engine keeps of a
    layer: paths, a log, the plan. Here is only what its end depends on, all of it in registers.

    Args:
        tables: costs. copy_us: of one expert.
        hits, cpu: number of experts that stay on the GPU or go to the CPU, and what they take there
            with the other lanes idle, µs.
        shared_us: the shared expert.
        lane: int64 [M], of each miss. tokens: int64 [M].

    Returns:
        µs from the gate until all lanes have ended, NaN outside the profile.
    """
    slow, now, due = tables.interference, 0.0, HITS if hits[0] > 0 else SHARED
    incoming = 0
    for i in range(len(lane)):
        incoming += int(lane[i] == DEMANDED)
    gpu, h2d, cpu_busy = False, False, cpu[0] > 0
    left_gpu, left_h2d, left_cpu = 0.0, 0.0, cpu[1]
    if cpu_busy and not left_cpu >= 0.0:
        return np.nan
    following, moving, ready, ready_tokens = 0, 0, 0, 0
    while True:
        if not gpu:
            gpu = True
            if due == HITS:
                due, left_gpu = SHARED, hits[1]
            elif due == SHARED:
                due, left_gpu = ARRIVALS, shared_us
            elif ready > 0:
                noticed_us = tables.per_arrival_us if incoming == 0 else 0.0
                left_gpu = noticed_us + gpu_experts_us(tables, ready, ready_tokens)
                ready, ready_tokens = 0, 0
            else:
                gpu = False
            if gpu and not left_gpu >= 0.0:
                return np.nan
        if not h2d:
            while following < len(lane) and lane[following] != DEMANDED:
                following += 1
            if following < len(lane):
                h2d, left_h2d, moving = True, copy_us, tokens[following]
                following += 1
        if not gpu and not cpu_busy and incoming == 0:
            return now
        busy = int(gpu) | int(h2d) << H2D | int(cpu_busy) << CPU
        wait = until_next(slow, busy, left_gpu, left_h2d, left_cpu)
        now += wait
        if gpu:
            left_gpu = left_after(left_gpu, slow[GPU, busy], wait)
            gpu = left_gpu != 0.0
        if h2d:
            left_h2d = left_after(left_h2d, slow[H2D, busy], wait)
            if left_h2d == 0.0:
                h2d, incoming, ready, ready_tokens = (
                    False, incoming - 1, ready + 1, ready_tokens + moving,
                )  # fmt: skip
        if cpu_busy:
            left_cpu = left_after(left_cpu, slow[CPU, busy], wait)
            cpu_busy = left_cpu != 0.0
