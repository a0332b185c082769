"""The policy's hooks decide, in Python: any policy, at every gate and arrival."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.faults import Faults
from oled_sim.engine.hooks import Hooks
from oled_sim.engine.job_log import JobLog
from oled_sim.engine.pace import Pace
from oled_sim.engine.residency import Residency
from oled_sim.engine.state import ARRIVED, DECIDE, EVENT, PASS, PASS_ENDED, Course
from oled_sim.engine.state_machine import StateMachine
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.engine.view import View
from oled_sim.policy import Event


class HookDecider:
    """Asks hooks, and settles what they answer.

    Attributes:
        decided: int64 [A], the lanes chosen at the last gate.
    """

    def __init__(
        self, machine: StateMachine, view: View, residency: Residency, hooks: Hooks, faults: Faults
    ) -> None:
        self._machine, self._view, self._residency = machine, view, residency
        self._hooks, self._faults = hooks, faults
        self._per_layer = residency.allotment.per_layer
        self.decided = np.empty(0, np.int64)

    def decide(self, batch: AnyBatch, course: Course) -> NDArray[np.int64]:
        """Let the policy decide at the gate of event ``work[EVENT]``, and settle it."""
        self._faults.check(self._at_gate(batch, course, run_on=False))
        return self.decided

    def admit(self) -> None:
        """Let the prefetch in ``queue.arrived`` into its pool, or drop it."""
        layer = int(self._machine.state.queue.arrived[0])
        self._faults.check(self._machine.admit(self._scores(layer, None)))

    def run_pass(
        self, batch: AnyBatch, course: Course, pace: Pace | None, log: JobLog | None
    ) -> None:
        """Run the next pass gate by gate."""
        p = int(self._machine.work[PASS])
        run_on = partial(self._machine.run_on, course) if pace is None else pace.run_on
        stop = run_on()
        while stop != PASS_ENDED:
            if log is not None:
                log.drain(p)
            if stop == DECIDE:
                stop = self._at_gate(batch, course, run_on=pace is None)
                if pace is not None and stop == 0:
                    stop = run_on()
            elif stop == ARRIVED:
                self.admit()
                stop = run_on()
            self._faults.check(stop)
        if log is not None:
            log.drain(p)

    def _at_gate(self, batch: AnyBatch, course: Course, *, run_on: bool) -> int:
        """Decide at a gate where the future, if the policy may know it, is open.

        ``run_on``: also run to the next decision on the simulated lanes, and return it.
        """
        v, cursor = int(self._machine.work[EVENT]), self._view.cursor
        if cursor is None:
            return self._ask(v, batch, course, run_on)
        cursor.open(v)
        try:
            return self._ask(v, batch, course, run_on)
        finally:
            cursor.close()

    def _ask(self, v: int, batch: AnyBatch, course: Course, run_on: bool) -> int:
        machine, hooks = self._machine, self._hooks
        hooks.layer = int(course.event_layer[v])
        event = self._view.event(batch, v, batch.confidence)
        hooks.request, hooks.pass_index = event.request, event.pass_index
        if hooks.overrides["reside"]:
            self._residency.set_residents(event, hooks.reside(event))
        self.decided = decided = hooks.dispatch(event)
        scores = self._scores(hooks.layer, event)
        if not hooks.overrides["prefetch"]:
            return machine.settle(course, decided, scores, run_on=run_on)
        wanted = hooks.prefetch(event)
        problem = machine.settle(course, decided, scores)
        if problem != 0:
            return problem
        machine.ask_prefetches(wanted, replace=hooks.policy.replaces_queue)
        return machine.run_on(course) if run_on else 0

    def _scores(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return the values of a layer; under global scope those of all layers may change."""
        hooks, pools = self._hooks, self._machine.state.pools
        scores = hooks.score(layer, event)
        if hooks.overrides["rescore"] and not self._per_layer:
            table = hooks.rescore(pools.resident.copy())
            if table is not None:
                pools.score[:] = table
                return np.ascontiguousarray(table[layer])
        return scores
