"""The policy's kernels decide: whole passes in one compiled call, or gate by gate.

Gate by gate where something is prefetched or where time is not ours; otherwise the loop around the
gates is compiled, too, and only ends where the policy has a say in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine import compiled
from oled_sim.engine.faults import Faults
from oled_sim.engine.hook_decider import HookDecider
from oled_sim.engine.hooks import Hooks
from oled_sim.engine.jit import direct
from oled_sim.engine.pace import Pace
from oled_sim.engine.state import ARRIVED, DECIDE, EQUAL, EVENT, PASS, PASS_ENDED, Course
from oled_sim.engine.state_machine import StateMachine
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.engine.view import View
from oled_sim.errors import OledSimError
from oled_sim.policy import Compiled

_NO_PREFETCHES = np.empty((0, 3))


class KernelDecider:
    """Calls a policy's kernels, and settles what they answer.

    Args:
        machine, view, hooks, faults: of the run.
        by_hooks: decides what the policy has no kernel for.

    Attributes:
        decided: int64 [A], the lanes chosen at the last gate; scratch that the next one overwrites.
    """

    def __init__(
        self,
        machine: StateMachine,
        view: View,
        hooks: Hooks,
        faults: Faults,
        by_hooks: HookDecider,
    ) -> None:
        self._machine, self._view, self._hooks = machine, view, hooks
        self._faults, self._by_hooks = faults, by_hooks
        self._lanes, self._scores = np.empty(hooks.experts, np.int64), np.zeros(hooks.experts)
        self.decided = self._lanes[:0]
        self.forget()

    def forget(self) -> None:
        """Forget the kernels and what they read: the policy is another."""
        self._loop: tuple[Callable[..., None], Callable[..., int]] | None = None
        self._answering: compiled.Answering | None = None
        self._answers: compiled.Answers | None = None

    def open(self, batch: AnyBatch, course: Course, offered: Compiled) -> None:
        """Make what a policy offers ready to answer at the gates of a pass."""
        machine = self._machine
        machine.work[EQUAL] = int(not offered.scores)
        if self._answering is None or not self._answering.fits(offered):
            self._answering = compiled.Answering(offered)
        asked = compiled.Asked(
            machine.state,
            course,
            self._view.gate(batch),
            offered.own,
            self._lanes,
            self._scores,
            _NO_PREFETCHES if compiled.prefetch_of(offered) is None else self._wanted,
            bool(self._hooks.policy.replaces_queue),
        )
        try:
            self._answers = self._answering.answers(asked)
        except Exception as error:  # numba cannot compile it
            raise self._faults.in_kernel(error) from error

    @cached_property
    def _wanted(self) -> NDArray[np.float64]:
        """Scratch for prefetches, float64 [L·E, 3]."""
        return np.empty((self._machine.state.pools.resident.size, 3))

    def decide(self, batch: AnyBatch, course: Course) -> NDArray[np.int64]:
        """Let the policy decide at the gate of event ``work[EVENT]``, and settle it."""
        assert self._answers is not None
        v = int(self._machine.work[EVENT])
        try:
            problem = self._answers.step(self._answers.asked)
        except OledSimError:
            raise
        except Exception as error:
            self._faults.locate(batch, course)
            raise self._faults.in_kernel(error) from error
        self._faults.check_at(problem, batch, course)
        self.decided = self._lanes[: course.offset[v + 1] - course.offset[v]]
        return self.decided

    def admit(self) -> None:
        """Let the prefetch in ``queue.arrived`` into its pool, or drop it."""
        assert self._answers is not None
        asked, _, admission = self._answers
        if admission is None:
            self._by_hooks.admit()
            return
        try:
            problem = admission(asked)
        except OledSimError:
            raise
        except Exception as error:
            raise self._faults.in_kernel(error) from error
        self._faults.check(problem)

    def run_pass(self, batch: AnyBatch, course: Course, pace: Pace | None) -> None:
        """Run the next pass gate by gate.

        A live host finds everything cold that a decision touches, so that is little here.
        """
        assert self._answers is not None
        (asked, step, admission), lanes = self._answers, self._lanes
        run_on = partial(self._machine.run_on, course) if pace is None else pace.run_on
        p = int(self._machine.work[PASS])
        active = course.offset[course.pass_event[p] : course.pass_event[p + 1] + 1]
        sizes = iter(np.diff(active).tolist())
        while (stop := run_on()) != PASS_ENDED:
            problem = stop
            try:
                if stop == DECIDE:
                    problem = step(asked)
                    self.decided = lanes[: next(sizes)]
                elif stop == ARRIVED and admission is not None:
                    problem = admission(asked)
            except OledSimError:
                raise
            except Exception as error:
                self._faults.locate(batch, course)
                raise self._faults.in_kernel(error) from error
            if problem == ARRIVED:
                self._by_hooks.admit()
            elif problem != 0:
                self._faults.check_at(problem, batch, course)

    def run_passes(self, batch: AnyBatch, course: Course, offered: Compiled, last: int) -> None:
        """Run compiled to the end of pass ``last``."""
        machine = self._machine
        loop, gate = self._loop_for(offered.decide), self._view.gate(batch)
        machine.work[EQUAL] = int(not offered.scores)
        given = machine.state, course, machine.tables, gate, offered.own, self._lanes, self._scores
        while True:
            try:
                stop = loop(*given, last + 1)
            except OledSimError:
                raise
            except Exception as error:
                self._faults.locate(batch, course)
                raise self._faults.in_kernel(error) from error
            if stop == PASS_ENDED:
                return
            self._faults.locate(batch, course)
            if stop == ARRIVED:
                self._by_hooks.admit()
            self._faults.check(stop)

    def _loop_for(self, decide: Callable[..., None]) -> Callable[..., int]:
        """Return the loop around the policy's kernel."""
        if self._loop is None or self._loop[0] is not decide:
            self._loop = decide, direct(compiled.loop_for(decide))
        return self._loop[1]
