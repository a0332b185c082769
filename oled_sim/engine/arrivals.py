"""When prefetches started and arrived in a run on hardware, and the engine in that order.

What a prefetching policy finds at a gate depends on what has arrived by then, and that on times no
simulation predicts to the microsecond. Given the order in which hardware did things, every
decision follows from it (spec §7): :class:`RecordedPace` goes through that order, without times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from oled_sim.engine.events import end_pass
from oled_sim.engine.prefetch_queue import begin_prefetch, first_in_queue, release_held
from oled_sim.engine.state import (
    APPROACHING,
    ARRIVED,
    AT_GATE,
    BEGIN_PASS,
    COPIED_BYTES,
    DECIDE,
    DEMAND_KEPT,
    DEMANDS,
    EVENT,
    EXPERT_BYTES,
    FREE_BYTES,
    FREED_BY_HITS,
    H2D,
    HEADING,
    HELD,
    IDLE,
    JOB_EXPERT,
    JOB_LAYER,
    KIND,
    LATE,
    LATE_KEPT,
    LEAVING,
    PASS,
    PASS_ENDED,
    PHASE,
    PREFETCH,
    QUEUED,
    USED,
)
from oled_sim.errors import MeasurementError

if TYPE_CHECKING:
    from oled_sim.engine.batch import Batch
    from oled_sim.engine.simulation import Simulation
    from oled_sim.engine.state import Course


class Step(IntEnum):
    """What hardware did.

    ``START``: a prefetch left the queue for the copy engine. ``LAND``: it has arrived. ``HOLD``:
    it waits for the end of the layer whose pool it is for. ``ASK``: the policy is asked to let it
    in. ``GATE``: the routing of the next event is known. ``DONE``: the lanes of an event are
    through. ``END``: of a pass.
    """

    START = 0
    LAND = 1
    HOLD = 2
    ASK = 3
    GATE = 4
    DONE = 5
    END = 6


class Moment(NamedTuple):
    """One step; ``layer`` counts MoE layers from 0. Both are -1 for steps of the whole event."""

    step: int
    layer: int = -1
    expert: int = -1


_OUTCOME = {Step.ASK: ARRIVED, Step.GATE: DECIDE, Step.END: PASS_ENDED}


class RecordedPace:
    """Lets pass, in place of time, the order of a run on hardware.

    Counts are those of the run but for ``staging_peak`` and ``free_bytes``, which depend on times;
    all times are 0.

    Args:
        moments: of one request, in order.
        name: what errors call the record.
    """

    def __init__(self, moments: Iterable[Moment], name: str) -> None:
        self._moments: Iterator[Moment] = iter(moments)
        self._name = name

    def enter(self, simulation: Simulation, batch: Batch, course: Course) -> None:
        """Start a group."""
        self._state, self._work, self._course = simulation.state, simulation.work, course

    def run_on(self) -> int:
        """Go on to the next decision. Return DECIDE, ARRIVED or PASS_ENDED.

        Raises:
            MeasurementError: the record does not fit what was decided.
        """
        work = self._work
        while True:
            if work[PHASE] == BEGIN_PASS:
                self._go_to(int(self._course.pass_event[work[PASS]]))
            elif work[PHASE] == LEAVING and work[HELD] == 0:
                self._go_to(int(work[EVENT]) + 1)
            moment = next(self._moments, None)
            if moment is None:
                raise self._unfit("ends too early")
            self._do(moment)
            if (outcome := _OUTCOME.get(Step(moment.step))) is not None:
                return outcome

    def leave(self) -> None:
        """End a group.

        Raises:
            MeasurementError: the record goes on.
        """
        if next(self._moments, None) is not None:
            raise self._unfit("goes on after the last pass")

    def _unfit(self, how: str) -> MeasurementError:
        return MeasurementError(
            f"the recorded order of {self._name} {how}: it is damaged, or the policy decides"
            " otherwise than when it was recorded"
        )

    def _go_to(self, v: int) -> None:
        self._work[EVENT] = v
        more = v < self._course.pass_event[self._work[PASS] + 1]
        self._work[PHASE] = APPROACHING if more else HEADING

    def _do(self, moment: Moment) -> None:
        step, layer, expert = moment
        if step == Step.START:
            self._start(layer, expert)
        elif step == Step.LAND:
            self._land(layer, expert)
        elif step == Step.HOLD:
            self._hold(layer, expert)
        elif step == Step.ASK:
            self._ask(layer, expert)
        elif step == Step.GATE:
            self._require(APPROACHING)
            self._work[PHASE] = AT_GATE
        elif step == Step.DONE:
            self._finish_layer()
        else:
            self._require(HEADING)
            end_pass(self._state.lanes.time, self._work, self._course)

    def _require(self, phase: int) -> None:
        if self._work[PHASE] != phase:
            raise self._unfit("does not go through the passes of the request")

    def _start(self, layer: int, expert: int) -> None:
        work, state = self._work, self._state
        self._land_late()  # as it has, if another starts behind it
        row = first_in_queue(work, state.queue) if work[QUEUED] > 0 else -1
        if row < 0 or work[KIND + H2D] != IDLE:
            raise self._unfit(f"starts a prefetch of expert {expert} that nobody waits for")
        if tuple(state.queue.entry[row, :2].astype(int)) != (layer, expert):
            raise self._unfit(f"starts a prefetch of expert {expert} out of turn")
        begin_prefetch(work, state.queue, row, state.lanes.expert_bytes[layer])

    def _land(self, layer: int, expert: int) -> None:
        work = self._work
        flying = work[KIND + H2D], work[JOB_LAYER + H2D], work[JOB_EXPERT + H2D]
        if flying != (PREFETCH, layer, expert):
            raise self._unfit(f"lets expert {expert} arrive, which is not on its way")
        work[KIND + H2D] = IDLE

    def _hold(self, layer: int, expert: int) -> None:
        self._state.queue.held[self._work[HELD]] = layer, expert
        self._work[HELD] += 1

    def _ask(self, layer: int, expert: int) -> None:
        queue = self._state.queue
        if self._work[PHASE] == LEAVING:
            release_held(self._work, queue)
            if tuple(queue.arrived) != (layer, expert):
                raise self._unfit(f"asks about expert {expert} out of turn")
        queue.arrived[:] = layer, expert

    def _finish_layer(self) -> None:
        """Do the accounts of an event: demand and a late prefetch have come, staging is empty."""
        work = self._work
        demand = self._state.lanes.demand[: work[DEMANDS]]
        self._land_late()
        work[COPIED_BYTES] += len(demand) * work[EXPERT_BYTES]
        kept = int(demand[:, DEMAND_KEPT].sum())
        work[FREE_BYTES] += work[FREED_BY_HITS] - kept * work[EXPERT_BYTES]
        work[FREED_BY_HITS] = 0
        work[PHASE] = LEAVING

    def _land_late(self) -> None:
        """Let the prefetch arrive, if there is one, that the event waits for."""
        work = self._work
        if work[KIND + H2D] == LATE:
            work[KIND + H2D], work[JOB_EXPERT + H2D] = IDLE, -1
            work[USED] -= 1
            work[FREE_BYTES] -= work[LATE_KEPT] * work[EXPERT_BYTES]
