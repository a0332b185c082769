"""What the engine would charge for a decision, for policies that weigh decisions by time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.tables import CostTables, shared_expert_us
from oled_sim.engine.jit import merged
from oled_sim.engine.state import (
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
    HIT_EXPERTS,
    HIT_TOKENS,
    HITS_DUE,
    IDLE,
    INCOMING,
    KIND,
    LAYER,
    NOW,
    PLAN,
    PLAN_END,
    SHARED_DUE,
    SHARED_US,
    TOKENS,
    USED,
    Lanes,
    Queue,
    new_lanes,
    new_queue,
)
from oled_sim.engine.timeline import finish_layer
from oled_sim.policy import Event

AMPLE_BYTES = 1 << 60


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
