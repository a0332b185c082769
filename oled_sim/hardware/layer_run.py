"""One event on the hardware: what was decided at a gate, carried out on three lanes.

The rules are those of the simulated lanes (docs/engine.md, "One layer"): residents as one grouped
kernel, then the shared expert, then whatever has arrived whenever the GPU is free; copies in the
order of the demand transfers, as far as staging slots allow; the CPU's experts as one job. The
entries of ``Lanes.work`` that count staging slots and free slots move as they do there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.state import (
    COPIED_BYTES,
    DEMAND_EXPERT,
    DEMAND_KEPT,
    DEMANDS,
    EXPERT_BYTES,
    FREE_BYTES,
    FREED_BY_HITS,
    GLOBAL,
    H2D,
    IDLE,
    JOB_EXPERT,
    KIND,
    LATE_KEPT,
    PEAK,
    SLOTS,
    USED,
    WAITING,
)
from oled_sim.hardware.arrange import Arranger
from oled_sim.hardware.clock import Mark
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.rows import EventRows

if TYPE_CHECKING:
    from torch import Tensor

    from oled_sim.engine.state import State
    from oled_sim.hardware.machine import ExpertMachine
    from oled_sim.hardware.slot_map import SlotMap

FIRST, EAGER = 1, 3
"""Copies that are queued before anything else, so that the copy engine starts at once, and those
that follow when the CPU has its job, so that it does not run dry: queueing all takes a while."""


class Activations(Protocol):
    """Where an event's inputs are, where its outputs go, and what runs beside its experts."""

    @property
    def x(self) -> Tensor:
        """[T, h], inputs of the experts."""
        ...

    @property
    def out(self) -> Tensor:
        """[T·k, h], weighted outputs of routed experts, one row per token and slot."""
        ...

    def shared(self, layer: int) -> None:
        """Launch the shared expert of MoE layer ``layer``, if it is not under way already."""
        ...


class Lanes(NamedTuple):
    """What carries out events: the machine, who lies where, and the engine's state."""

    machine: ExpertMachine
    activations: Activations
    slots: SlotMap
    state: State
    arranger: Arranger


@dataclass(slots=True)
class LayerMarks:
    """When things happened in one event; marks are read after the pass.

    How long decisions had kept the run waiting so far: ``paused_before_us`` at the start,
    ``paused_gate_us`` when the host saw the gate, ``paused_us`` once it had decided there,
    ``paused_end_us`` at the end. ``launched_us``: what leads to the gate had been launched, with
    decisions. ``kernels``: begin and end of every grouped kernel and of the shared expert.
    """

    start: Mark
    routed: Mark
    launched_us: float = 0.0
    gate_us: float = 0.0
    paused_before_us: float = 0.0
    paused_gate_us: float = 0.0
    paused_us: float = 0.0
    paused_end_us: float = 0.0
    kernels: list[tuple[Mark, Mark]] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    cpu_us: tuple[float, float] | None = None
    lanes: Mark | None = None
    end: Mark | None = None


class LayerRun:
    """Carries out one event: :meth:`begin_copies`, :meth:`begin`, :meth:`poll` until it is true,
    :meth:`finish`.

    Args:
        lanes: what works, on the engine's state as just settled.
        layer: index of the MoE layer.
        experts: [A], activated. decided: int64 [A], a lane each.
        late: the prefetch in flight that the event waits for, or None.
        marks: where to note what happened when.
    """

    def __init__(
        self,
        lanes: Lanes,
        layer: int,
        experts: NDArray[np.uint16],
        decided: NDArray[np.int64],
        late: Copy | None,
        marks: LayerMarks,
    ) -> None:
        self._activations = lanes.activations
        self._machine, self._slots, self._layer, self.marks = (
            lanes.machine,
            lanes.slots,
            layer,
            marks,
        )
        state = lanes.state
        self._work = work = state.lanes.work
        self._late = late
        resident = state.pools.resident
        self._arranged = lanes.arranger.arrange(
            experts, decided, self._slots.slot[layer], resident[layer],
            -1 if late is None else late.expert,
        )  # fmt: skip
        self._place = lanes.arranger.place
        if work[GLOBAL]:
            self._slots.drop_all_gone(resident)
        demand = state.lanes.demand[: work[DEMANDS]]
        self._wanted: list[int] = demand[:, DEMAND_EXPERT].tolist()
        self._kept: list[int] = demand[:, DEMAND_KEPT].tolist()
        self._submitted = 0
        self._flying: deque[tuple[Copy, bool]] = deque()
        if late is not None:
            self._flying.append((late, bool(work[LATE_KEPT])))
        self._ready: list[Copy] = []
        self._dropped: set[int] = set()
        self._left = len(self._wanted) + len(self._flying)
        self._staged: deque[tuple[Mark, int]] = deque()
        self._hits_mark: Mark | None = None
        self._last: Mark | None = None
        self._computed = len(self._arranged.cpu) == 0

    @property
    def waiting_for_copies(self) -> bool:
        """Whether a demand transfer waits for a staging slot."""
        return self._submitted < len(self._wanted)

    def begin_copies(self) -> None:
        """Free the slots of who was dropped, and queue the first copy: the rest can wait."""
        for slot in self._arranged.freed.tolist():
            self._slots.release(slot, None)
        self._submit(FIRST)

    def begin(self, rows: EventRows) -> None:
        """Hand the CPU its experts, launch residents and shared expert, queue all copies.

        Args:
            rows: the event's routed rows, of the same experts in the same order.
        """
        machine, arranged = self._machine, self._arranged
        if not self._computed:
            machine.cpu.submit(self._layer, self._activations.x, rows, arranged.cpu)
        self._submit(EAGER)
        self._look_after_cpu()
        machine.grouped.load(rows)
        if len(arranged.hits):
            self._launch(arranged.hits, arranged.slots)
            self._hits_mark = self._last
        for slot in arranged.freed_by_hits.tolist():
            self._slots.release(slot, self._hits_mark)
        self._look_after_cpu()
        begun = machine.clock.mark()
        self._activations.shared(self._layer)
        self._last = machine.clock.mark()
        self.marks.kernels.append((begun, self._last))
        self._look_after_cpu()
        self._submit(len(self._wanted))

    def poll(self) -> bool:
        """Take note of what has arrived, and start what can start. Return whether all is done."""
        self._land()
        self._move_up()
        if self.waiting_for_copies:
            self._submit(len(self._wanted))
        if self._ready and (self._last is None or self._last.passed):
            self._launch_arrivals()
        self._look_after_cpu()
        return self._computed and self._left == 0 and not self._ready

    def finish(self) -> Tensor | None:
        """Close the event's accounts; return the CPU's sums, which the GPU will wait for."""
        self._move_up(wait=True)
        while self._staged:
            self._work[USED] -= self._staged.popleft()[1]
        from_cpu = None
        if len(self._arranged.cpu):
            from_cpu = self._machine.cpu.result()
            times = self._machine.cpu.times
            self.marks.cpu_us = times.begin_us, times.end_us
        self.marks.lanes = self._machine.clock.mark()
        return from_cpu

    def _look_after_cpu(self) -> None:
        """Move the CPU's job on: its workers start once the activations are on the host."""
        self._computed = self._computed or self._machine.cpu.poll()

    def _submit(self, most: int) -> None:
        """Queue demand transfers up to number ``most``, while staging slots are free."""
        work, slots, first = self._work, self._slots, self._submitted
        room = min(most - first, len(self._wanted) - first, int(work[SLOTS] - work[USED]))
        if min(room, slots.free) <= 0:  # without a free slot the rest waits for the hits kernel
            return
        batch = []
        for i in range(first, first + min(room, slots.free)):
            slot, after = slots.take()
            copy = Copy(self._layer, self._wanted[i], slot)
            batch.append((copy, after))
            self._flying.append((copy, bool(self._kept[i])))
            self.marks.copies.append(copy)
        self._machine.copies.submit(batch)
        self._submitted += len(batch)
        work[USED] += len(batch)
        work[PEAK] = max(work[PEAK], work[USED])
        work[COPIED_BYTES] += len(batch) * work[EXPERT_BYTES]

    def _land(self) -> None:
        """Take in the copies that have arrived, in their order."""
        work = self._work
        while self._flying and self._flying[0][0].done:
            copy, kept = self._flying.popleft()
            self._left -= 1
            self._ready.append(copy)
            if copy is self._late:
                work[KIND + H2D] = IDLE
                work[JOB_EXPERT + H2D] = -1
            if not kept:
                self._dropped.add(copy.expert)
                continue
            self._slots.slot[self._layer, copy.expert] = copy.slot
            if work[FREE_BYTES] >= work[EXPERT_BYTES]:
                self._move_in()
            else:
                work[WAITING] += 1

    def _move_in(self) -> None:
        self._work[FREE_BYTES] -= self._work[EXPERT_BYTES]
        self._work[USED] -= 1

    def _move_up(self, *, wait: bool = False) -> None:
        """Let arrivals leave staging: for slots that the hits gave up, or once computed."""
        work = self._work
        if work[FREED_BY_HITS] and (wait or self._hits_mark is None or self._hits_mark.passed):
            work[FREE_BYTES] += work[FREED_BY_HITS]
            work[FREED_BY_HITS] = 0
        while work[WAITING] > 0 and work[FREE_BYTES] >= work[EXPERT_BYTES]:
            work[WAITING] -= 1
            self._move_in()
        while self._staged and self._staged[0][0].passed:
            work[USED] -= self._staged.popleft()[1]

    def _launch_arrivals(self) -> None:
        """Compute all that has arrived as one grouped kernel."""
        ready, self._ready = self._ready, []
        which = self._place[[c.expert for c in ready]]
        self._launch(which, np.array([c.slot for c in ready], np.int32))
        gone = [c for c in ready if c.expert in self._dropped]
        assert self._last is not None
        for copy in gone:
            self._slots.release(copy.slot, self._last)
        if gone:
            self._staged.append((self._last, len(gone)))

    def _launch(self, which: NDArray[np.int32], slots: NDArray[np.int32]) -> None:
        machine = self._machine
        begun = machine.clock.mark()
        machine.grouped.run(self._activations.x, which, slots, self._activations.out)
        self._last = machine.clock.mark()
        self.marks.kernels.append((begun, self._last))
