"""The pace of hardware: lets time pass for the engine by doing the work.

:class:`LivePace` goes through the phases of a pass as :func:`oled_sim.engine.events.advance` does
and stops where that stops: at a gate, when a prefetch arrives, at the end of a pass. Between them
it runs real kernels, real copies and CPU workers, and polls. Times are the host's, less the time
by which decisions keep the GPU waiting: at gates all of it, where a prefetch arrives what goes
beyond the work that is under way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from oled_sim.engine.arrivals import Moment, Step
from oled_sim.engine.events import end_pass
from oled_sim.engine.state import (
    APPROACHING,
    ARRIVED,
    AT_GATE,
    BEGIN_PASS,
    DECIDE,
    EVENT,
    FREE_BYTES,
    GLOBAL,
    H2D,
    HEADING,
    HELD,
    IN_LAYER,
    KIND,
    LATE,
    LEAVING,
    MERGING,
    N_FREE_BYTES,
    N_STAGING_PEAK,
    NOW,
    PASS,
    PASS_ENDED,
    PEAK,
    PHASE,
    Course,
)
from oled_sim.hardware.arrange import Arranger
from oled_sim.hardware.clock import Mark, now_us
from oled_sim.hardware.layer_run import Lanes, LayerMarks, LayerRun
from oled_sim.hardware.lossless import LosslessCheck, Sample
from oled_sim.hardware.machine import Machine
from oled_sim.hardware.measured import PassMarks, note_times
from oled_sim.hardware.prefetches import Prefetches
from oled_sim.hardware.rows import event_rows
from oled_sim.hardware.slot_map import SlotMap

if TYPE_CHECKING:
    from torch import Tensor

    from oled_sim.engine.batch import Batch
    from oled_sim.engine.simulation import Simulation

NAP_S = 2e-5
"""Between looks at the lanes, where they are threads of this machine's CPU."""

PassEnded = Callable[[int, PassMarks], None]
"""Called outside the clock with the number of a pass and its marks."""


class LivePace:
    """Runs the events of a group of one request on a machine, with the trace's routing.

    Args:
        machine: the lanes.
        slots: who lies where; residents must lie in the slab.
        check: compares samples with full residency, or None.
        on_pass: called after every pass, while the clock stands still.

    Attributes:
        decide_us: of the pass that runs, time spent on decisions.
    """

    def __init__(
        self,
        machine: Machine,
        slots: SlotMap,
        check: LosslessCheck | None = None,
        on_pass: PassEnded | None = None,
    ) -> None:
        self._machine, self._slots, self._check, self._on_pass = machine, slots, check, on_pass
        # Without a GPU the lanes are threads on the same cores, which a busy loop would starve.
        self._naps = not machine.place.cuda
        self._sample: Sample | None = None
        self._paused_us = 0.0
        self._left_us = 0.0
        self._asked = PASS_ENDED
        self._awaited: Mark | None = None
        self.decide_us = 0.0

    def enter(self, simulation: Simulation, batch: Batch, course: Course) -> None:
        """Start a group."""
        self._simulation, self._batch, self._course = simulation, batch, course
        self._state = simulation.state
        self._work = simulation.work
        self._prefetches = Prefetches(self._machine, self._slots, self._state)
        arranger = Arranger(simulation.geometry.experts)
        self._lanes = Lanes(
            self._machine, self._machine.backbone, self._slots, self._state, arranger
        )
        self._run: LayerRun | None = None
        self._from_cpu: Tensor | None = None
        self._admitting: tuple[int, int] | None = None
        self._asked = PASS_ENDED
        self._left_us = now_us()

    @property
    def moments(self) -> list[Moment]:
        """In which order things happened in the group."""
        return self._prefetches.moments

    def _note(self, step: Step, layer: int = -1, expert: int = -1) -> None:
        self._prefetches.moments.append(Moment(step, layer, expert))

    def leave(self) -> None:
        """End a group: wait for the prefetch that is still being copied, and forget it."""
        self._prefetches.abandon()
        self._simulation.forget_copies()

    def run_on(self) -> int:
        """Work to the next decision. Return DECIDE, ARRIVED or PASS_ENDED."""
        self._resume()
        self._asked = self._advance()
        self._left_us = now_us()
        return self._asked

    def _resume(self) -> None:
        """Account for the decision that was made since the last stop."""
        taken = now_us() - self._left_us
        if self._asked == DECIDE:  # the GPU has waited for it
            self._paused_us += taken
            self.decide_us += taken
        elif self._asked == ARRIVED and self._admitting is not None:
            self.decide_us += taken
            self._paused_us += self._kept_waiting(taken)
            self._prefetches.settle(*self._admitting)
            self._admitting = None

    def _kept_waiting(self, taken_us: float) -> float:
        """Return how much of a decision came after what the host waits for, µs."""
        if self._awaited is None or not self._awaited.passed:
            return 0.0
        return min(taken_us, max(0.0, now_us() - self._machine.clock.time_us(self._awaited)))

    def _advance(self) -> int:
        work = self._work
        while True:
            phase = work[PHASE]
            if phase == BEGIN_PASS:
                self._begin_pass()
            elif phase == APPROACHING:
                if self._approach() == ARRIVED:
                    return ARRIVED
                return DECIDE
            elif phase in (AT_GATE, IN_LAYER):
                if self._work_layer() == ARRIVED:
                    return ARRIVED
            elif phase == LEAVING:
                if work[HELD] > 0:
                    self._awaited = self._marks.layers[-1].lanes
                    return self._ask_about(*self._prefetches.release())
                self._merge()
            else:
                if self._head() == ARRIVED:
                    return ARRIVED
                self._end_pass()
                return PASS_ENDED

    def _now_us(self) -> float:
        """Return the time of the run, in which decisions take none."""
        return now_us() - self._paused_us

    def _begin_pass(self) -> None:
        machine, work, course = self._machine, self._work, self._course
        p = int(work[PASS])
        self._slots.drop_all_gone(self._state.pools.resident)  # of a new allocation
        self._slots.all_read()
        machine.clock.start()
        self.decide_us = 0.0
        self._marks = PassMarks(self._now_us(), self._paused_us)
        first = int(course.pass_event[p])
        member, i = self._batch.present[p][0]
        machine.backbone.begin_pass(int(course.rows[first]), int(member.trace.context[i]))
        work[EVENT] = first - 1
        self._start = machine.clock.mark()
        self._next_event()

    def _next_event(self) -> None:
        machine, work, course = self._machine, self._work, self._course
        v = int(work[EVENT]) + 1
        work[EVENT] = v
        if v < course.pass_event[work[PASS] + 1]:
            machine.backbone.to_gate(int(course.event_layer[v]))
            marks = LayerMarks(self._start, machine.clock.mark(), now_us())
            marks.paused_before_us = self._paused_us
            self._marks.layers.append(marks)
            work[PHASE] = APPROACHING
        else:
            machine.backbone.head()
            self._marks.head = self._start, machine.clock.mark()
            work[PHASE] = HEADING

    def _approach(self) -> int:
        """Wait for the gate."""
        marks = self._marks.layers[-1]
        if self._wait_for(marks.routed) == ARRIVED:
            return ARRIVED
        self._machine.backbone.wait_routing()
        marks.gate_us = now_us() - (self._paused_us - marks.paused_before_us)
        marks.paused_gate_us = self._paused_us
        self._work[PHASE] = AT_GATE
        self._note(Step.GATE)
        return DECIDE

    def _wait_for(self, mark: Mark) -> int:
        """Wait for the GPU while prefetches go on. Return ARRIVED if one is here first."""
        self._awaited = mark
        while not mark.passed:
            arrived = self._pump()
            if arrived is not None:
                return self._ask_about(*arrived)
            self._nap()
        return DECIDE

    def _nap(self) -> None:
        if self._naps:
            time.sleep(NAP_S)

    def _pump(self) -> tuple[int, int] | None:
        """Keep the copy engine busy with prefetches; return one that has arrived."""
        arrived = self._prefetches.arrived()
        self._prefetches.start()
        return arrived

    def _ask_about(self, layer: int, expert: int) -> int:
        arrived = self._state.queue.arrived
        arrived[0], arrived[1] = layer, expert
        self._admitting = layer, expert
        self._note(Step.ASK, layer, expert)
        return ARRIVED

    def _work_layer(self) -> int:
        """Carry out what was decided at the gate. Return ARRIVED if a prefetch came meanwhile."""
        work, course, v = self._work, self._course, int(self._work[EVENT])
        layer = int(course.event_layer[v])
        run = self._run or self._begin_layer(v, layer)
        self._awaited = None
        while not run.poll():
            arrived = self._prefetches.arrived() if run.waiting_for_copies else self._pump()
            if arrived is not None:
                if arrived[0] != layer and not work[GLOBAL]:
                    return self._ask_about(*arrived)
                self._prefetches.hold(*arrived)
            self._nap()
        self._from_cpu = run.finish()
        self._run = None
        self._note(Step.DONE)
        course.counts[v, N_STAGING_PEAK] = work[PEAK]
        course.counts[v, N_FREE_BYTES] = work[FREE_BYTES]
        work[PHASE] = LEAVING
        return DECIDE

    def _begin_layer(self, v: int, layer: int) -> LayerRun:
        """Start what the engine settled at the gate of event ``v``."""
        batch, course, marks = self._batch, self._course, self._marks.layers[-1]
        experts = course.experts[course.offset[v] : course.offset[v + 1]]
        late = self._prefetches.late() if self._work[KIND + H2D] == LATE else None
        marks.paused_us = self._paused_us
        run = LayerRun(self._lanes, layer, experts, self._simulation.decided, late, marks)
        run.begin_copies()
        routed = slice(batch.rows[v], batch.rows[v + 1])
        gates = None if batch.gates is None else batch.gates[routed]
        rows = event_rows(batch.routes[routed], gates, experts, self._machine.scale)
        self._sample = self._check.at_gate(layer, rows) if self._check else None
        run.begin(rows)
        self._run = run
        return run

    def _merge(self) -> None:
        """Sum all parts of the layer, and go on to the next without waiting for the GPU."""
        v = int(self._work[EVENT])
        self._machine.backbone.merge(int(self._course.event_layer[v]), self._from_cpu)
        self._start = self._machine.clock.mark()
        self._marks.layers[-1].end = self._start
        self._marks.layers[-1].paused_end_us = self._paused_us
        if self._check is not None:
            self._check.at_end(self._sample)
        self._work[PHASE] = MERGING
        self._next_event()

    def _head(self) -> int:
        """Wait for the LM head's answer on the host."""
        assert self._marks.head is not None
        if self._wait_for(self._marks.head[1]) == ARRIVED:
            return ARRIVED
        self._machine.backbone.wait_head()
        return DECIDE

    def _end_pass(self) -> None:
        """Note what was measured; nothing from here on is on the clock."""
        marks, work, course = self._marks, self._work, self._course
        marks.end_us, marks.decide_us = self._now_us(), self.decide_us
        marks.kept_waiting_us = self._paused_us - marks.paused_us
        self._note(Step.END)
        marks.prefetches, self._prefetches.finished = self._prefetches.finished, []
        p = int(work[PASS])
        self._state.lanes.time[NOW] = marks.end_us
        end_pass(self._state.lanes.time, work, course)
        note_times(self._machine.clock, marks, course, p)
        if self._check is not None:
            self._check.compare()
        if self._on_pass is not None:
            self._on_pass(p, marks)
