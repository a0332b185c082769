"""The experts of a model's layers, carried out as a policy decides: one request at a time.

The model drives. Its gate hands the routing over, then its block waits for the weighted sum of the
routed experts; in between the engine decides and the lanes work. The phases of ``Lanes.work`` are
kept as :class:`oled_sim.hardware.live.LivePace` keeps them, so that decisions and accounts are
those of a replay. Times are the host's, less the time of decisions at gates.
"""

from __future__ import annotations

import time
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.engine.events import end_pass
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.state import (
    APPROACHING,
    AT_GATE,
    EVENT,
    FREE_BYTES,
    GLOBAL,
    H2D,
    HEADING,
    HELD,
    KIND,
    LATE,
    LEAVING,
    MERGING,
    N_FREE_BYTES,
    N_STAGING_PEAK,
    NOW,
    PEAK,
    PHASE,
    STARTING,
    Course,
)
from oled_sim.engine.unfolding import PassStart, Unfolding
from oled_sim.hardware.arrange import Arranger
from oled_sim.hardware.clock import Mark, now_us
from oled_sim.hardware.layer_run import Lanes, LayerMarks, LayerRun
from oled_sim.hardware.live import NAP_S
from oled_sim.hardware.machine import ExpertMachine
from oled_sim.hardware.measured import PassMarks, note_times
from oled_sim.hardware.prefetches import Prefetches
from oled_sim.hardware.replay import load_residents
from oled_sim.hardware.rows import event_rows
from oled_sim.hardware.slot_map import SlotMap
from oled_sim.model.generate import PassRecord
from oled_sim.offloaded.activations import HostRouting, StaticActivations


class OffloadedLayers:
    """Runs the routed experts of a model under the policy of a simulation.

    Args:
        machine: the lanes.
        slots: who lies where; as many as the slab has.
        simulation: decides, and keeps the accounts.
        most_tokens: of a pass.
        signals: optional ones that the policy sees: ``full_gate``.

    Attributes:
        decide_us: what decisions of each pass of this request took, µs: preparing an event for
            the policy, its hooks, and the engine's settling.
        routes, gates, full_gates: what gates of this request chose, per pass and layer: int64 and
            float16 [T, k], float16 [E].
        copies: experts that were copied so far, prefetches included.
    """

    def __init__(
        self, machine: ExpertMachine, slots: SlotMap, simulation: Simulation, most_tokens: int,
        signals: Collection[str] = (),
    ) -> None:  # fmt: skip
        cost = machine.experts.cost
        self._machine, self._slots, self._simulation = machine, slots, simulation
        self._naps = not machine.place.cuda
        self._arranger = Arranger(cost.experts)
        self._wants_full_gate = "full_gate" in signals
        self._activations = StaticActivations(machine.place, cost, most_tokens)
        self._routing = HostRouting(machine.place, most_tokens, cost.top_k, cost.experts)
        machine.grouped.capture(self._activations.x, self._activations.out)
        self._paused_us = 0.0
        self.copies = 0
        self._load()

    def _load(self) -> None:
        """Start with the engine's residents in the slab, and nothing under way."""
        self._state = self._simulation.state
        self._work = self._state.lanes.work
        self._prefetches = Prefetches(self._machine, self._slots, self._state)
        self._lanes = Lanes(
            self._machine, self._activations, self._slots, self._state, self._arranger
        )
        load_residents(self._machine, self._slots, self._state.pools.resident)

    def enter(self, unfolding: Unfolding, course: Course) -> None:
        """Start a request; a cold start has emptied the engine's caches by now."""
        if self._simulation.state is not self._state:
            self._await_prefetch()
            self._load()
        self._unfolding, self._course = unfolding, course
        self.decide_us: list[float] = []
        self.routes: list[list[NDArray[np.int64]]] = []
        self.gates: list[list[NDArray[np.float16]]] = []
        self.full_gates: list[list[NDArray[np.float16]]] = []

    def start_over(self) -> None:
        """Go back to the engine's residents, and nothing under way."""
        self._await_prefetch()
        self._load()
        self.copies = 0

    def close(self) -> None:
        """Wait for the prefetch in flight."""
        self._await_prefetch()

    def _await_prefetch(self) -> None:
        flying = self._prefetches.flying
        while flying is not None and not flying.done:
            time.sleep(NAP_S)

    def begin_pass(self, start: PassStart) -> None:
        """Let the policy speak before a pass, then start the clock."""
        simulation, unfolding, machine = self._simulation, self._unfolding, self._machine
        began, p = now_us(), unfolding.passes
        unfolding.begin_pass(start)
        simulation.open_pass(unfolding, p)
        self.decide_us.append(now_us() - began)
        for kept in (self.routes, self.gates, self.full_gates):
            kept.append([])
        self._slots.drop_all_gone(self._state.pools.resident)  # of a new allocation
        self._slots.all_read()
        machine.clock.start()
        self._marks = PassMarks(self._now_us(), self._paused_us)
        self._work[EVENT] = self._course.pass_event[p] - 1
        self._work[PHASE] = STARTING
        self._start = machine.clock.mark()

    def _now_us(self) -> float:
        return now_us() - self._paused_us

    def _nap(self) -> None:
        if self._naps:
            time.sleep(NAP_S)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor) -> None:
        """Take over what the gate of the next layer has chosen; launches only.

        Args:
            x: [T, h]. ids: int64 [T, k]. weights: fp32 [T, k], scaling included.
            logits: fp32 [T, E].
        """
        full = logits.sigmoid().mean(0).half() if self._wants_full_gate else None
        self._routing.send(ids, weights, full)
        marks = LayerMarks(self._start, self._machine.clock.mark())
        marks.paused_before_us = self._paused_us
        self._marks.layers.append(marks)
        self._activations.take(x)
        self._work[EVENT] += 1
        self._work[PHASE] = APPROACHING

    def experts(self) -> Tensor:
        """Return the weighted sum of each token's experts, [T, h], for the gate before."""
        work, course, marks = self._work, self._course, self._marks.layers[-1]
        v = int(work[EVENT])
        self._wait_for(marks.routed)
        marks.gate_us = now_us()
        work[PHASE] = AT_GATE
        run = self._begin_layer(v, self._decide(v), marks)
        while not run.poll():
            self._meanwhile(run, int(course.event_layer[v]))
            self._nap()
        from_cpu = run.finish()
        course.counts[v, N_STAGING_PEAK] = work[PEAK]
        course.counts[v, N_FREE_BYTES] = work[FREE_BYTES]
        work[PHASE] = LEAVING
        while work[HELD] > 0:
            self._admit(*self._prefetches.release())
        total = self._activations.merged(from_cpu)
        self.copies += len(marks.copies)
        self._start = marks.end = self._machine.clock.mark()
        marks.paused_end_us = self._paused_us
        work[PHASE] = MERGING
        return total

    def _wait_for(self, mark: Mark) -> None:
        """Wait for the GPU while prefetches go on."""
        while True:
            arrived = self._pump()
            if arrived is not None:
                self._admit(*arrived)
            elif mark.passed:
                return
            else:
                self._nap()

    def _pump(self) -> tuple[int, int] | None:
        """Keep the copy engine busy with prefetches; return one that has arrived."""
        arrived = self._prefetches.arrived()
        self._prefetches.start()
        return arrived

    def _meanwhile(self, run: LayerRun, layer: int) -> None:
        """Take in a prefetch that arrives while a layer's lanes work."""
        arrived = self._prefetches.arrived() if run.waiting_for_copies else self._pump()
        if arrived is None:
            return
        if arrived[0] == layer or self._work[GLOBAL]:
            self._prefetches.hold(*arrived)
        else:
            self._admit(*arrived)

    def _admit(self, layer: int, expert: int) -> None:
        began = now_us()
        self._state.queue.arrived[:] = layer, expert
        self._simulation.admit()
        self.decide_us[-1] += now_us() - began
        self._prefetches.settle(layer, expert)

    def _decide(self, v: int) -> NDArray[np.int64]:
        """Let the policy decide; the lanes wait, and the clock stands still."""
        began, routing = now_us(), self._routing
        gates = (routing.weights / np.float32(self._machine.scale)).astype(np.float16)
        self._unfolding.at_gate(v, routing.ids, gates, routing.full_gate)
        decided = self._simulation.decide(self._unfolding, self._course)
        self.routes[-1].append(routing.ids.copy())
        self.gates[-1].append(gates)
        if routing.full_gate is not None:
            self.full_gates[-1].append(routing.full_gate.copy())
        taken = now_us() - began
        self._paused_us += taken
        self.decide_us[-1] += taken
        return decided

    def _begin_layer(self, v: int, decided: NDArray[np.int64], marks: LayerMarks) -> LayerRun:
        course = self._course
        experts = course.experts[course.offset[v] : course.offset[v + 1]]
        late = self._prefetches.late() if self._work[KIND + H2D] == LATE else None
        marks.paused_us = self._paused_us
        run = LayerRun(self._lanes, int(course.event_layer[v]), experts, decided, late, marks)
        run.begin_copies()
        routing = self._routing
        run.begin(event_rows(routing.ids, routing.weights, experts, self._machine.scale))
        return run

    def end_pass(self, record: PassRecord) -> None:
        """Note what was measured, now that the sampled tokens are on the host."""
        marks, simulation, clock = self._marks, self._simulation, self._machine.clock
        p = self._unfolding.passes - 1
        marks.head = self._start, clock.mark()
        marks.end_us, marks.decide_us = self._now_us(), self.decide_us[-1]
        marks.prefetches, self._prefetches.finished = self._prefetches.finished, []
        self.copies += len(marks.prefetches)
        self._work[PHASE] = HEADING
        self._state.lanes.time[NOW] = marks.end_us
        end_pass(self._state.lanes.time, self._work, self._course)
        note_times(clock, marks, self._course, p)
        began = now_us()
        self._unfolding.finish_pass(record.kind, record.confidence, record.accepted, record.edited)
        simulation.end_pass(self._unfolding, p)
        self.decide_us[-1] += now_us() - began
