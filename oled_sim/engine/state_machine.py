"""The state of a run and what changes it, as Python calls it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.admission import admit
from oled_sim.engine.allotment import Allotment
from oled_sim.engine.events import RUN_ON, SETTLE, proceed
from oled_sim.engine.jit import direct
from oled_sim.engine.prefetch_queue import ask_prefetches
from oled_sim.engine.residents import change_capacities, set_residents
from oled_sim.engine.state import (
    BUDGET_BYTES,
    EQUAL,
    GLOBAL,
    H2D,
    IDLE,
    KIND,
    PREFETCH,
    USED,
    Course,
    State,
    new_lanes,
    new_pools,
    new_queue,
)

_NO_LANES, _NO_SCORES = np.empty(0, np.int64), np.empty(0)
_NO_PREFETCHES = np.empty((0, 3))


class StateMachine:
    """The state of one run, and the kernels over it.

    Kernels are called by their machine code, which is looked up once: arrays keep their types.

    Args:
        allotment: how much may be resident.
        costs: lane costs of the cost geometry.
        staging: slots where transfers land.
        equal: whether the policy scores no expert.
        logs: whether jobs of the lanes are logged.

    Attributes:
        state: all that changes; another one after :meth:`reset`.
        tables: costs as kernels read them.
    """

    def __init__(
        self, allotment: Allotment, costs: LaneCosts, staging: int, *, equal: bool, logs: bool
    ) -> None:
        self._allotment, self._staging = allotment, staging
        self._equal, self._logs = equal, logs
        self._copy_us = np.array([costs.h2d_us(float(size)) for size in allotment.expert_bytes])
        self.tables = costs.tables
        self._proceed, self._admit = direct(proceed), direct(admit)
        self._ask_prefetches = direct(ask_prefetches)
        self._set_residents = direct(set_residents)
        self._change_capacities = direct(change_capacities)
        self.reset()

    def reset(self) -> None:
        """Go to the state before the first request: empty, at time zero."""
        allotment, experts = self._allotment, self._allotment.experts
        layers = len(allotment.expert_bytes)
        self.state = State(
            pools=new_pools(layers, experts, allotment.capacity, allotment.expert_bytes),
            lanes=new_lanes(
                experts,
                self._copy_us,
                allotment.expert_bytes,
                self._staging,
                on_lane_us=self.tables.prefetch_on_lane_us,
                log=4 * experts + 64 if self._logs else 0,
            ),
            queue=new_queue(layers, experts, self._staging),
        )
        self.work[GLOBAL] = int(not allotment.per_layer)
        self.work[BUDGET_BYTES] = allotment.total_bytes
        self.work[EQUAL] = int(self._equal)

    @property
    def work(self) -> NDArray[np.int64]:
        """``Lanes.work``."""
        return self.state.lanes.work

    def copies(self) -> tuple[NDArray[Any], ...]:
        """Return copies of all arrays."""
        return tuple(array.copy() for part in self.state for array in part)

    def restore(self, copies: tuple[NDArray[Any], ...]) -> None:
        """Take over what was copied before."""
        arrays = (array for part in self.state for array in part)
        for array, saved in zip(arrays, copies, strict=True):
            array[...] = saved

    def run_on(self, course: Course) -> int:
        """Run to the next decision; see :func:`~oled_sim.engine.events.advance`."""
        return self._proceed(self.state, course, self.tables, RUN_ON, _NO_LANES, _NO_SCORES)

    def settle(
        self,
        course: Course,
        decided: NDArray[np.int64],
        scores: NDArray[np.float64],
        *,
        run_on: bool = False,
    ) -> int:
        """Carry out a decision at a gate, and perhaps run on to the next in the same call.

        Returns:
            0, or the next decision point, or what is wrong with the decision.
        """
        what = SETTLE + RUN_ON if run_on else SETTLE
        return self._proceed(self.state, course, self.tables, what, decided, scores)

    def admit(self, scores: NDArray[np.float64]) -> int:
        """Let the prefetch in ``queue.arrived`` in, or drop it. Return what is wrong, or 0."""
        return self._admit(self.state, scores)

    def ask_prefetches(self, wanted: NDArray[np.float64], *, replace: bool) -> None:
        """Queue prefetches, float64 [n, 3]: layer, expert, priority. None change nothing."""
        if len(wanted):
            self._ask_prefetches(self.state, wanted, replace)

    def forget_copies(self) -> None:
        """Drop the prefetch in flight and those that are queued, which hardware has not begun."""
        work = self.work
        if work[KIND + H2D] == PREFETCH:
            work[KIND + H2D] = IDLE
            work[USED] -= 1
        self._ask_prefetches(self.state, _NO_PREFETCHES, True)

    def set_residents(self, layer: int, ids: NDArray[np.int64]) -> None:
        """Make exactly ``ids`` resident in a layer, free of charge."""
        self._set_residents(self.state, layer, ids)

    def change_capacities(self, capacity: NDArray[np.int64]) -> None:
        """Change the slots of layers; those that shrink drop their lowest-scored residents."""
        self._change_capacities(self.state.pools, self.work, capacity)
