"""Prefetches on the hardware: one at a time from the engine's queue, reported when here."""

from __future__ import annotations

import time

from oled_sim.engine.arrivals import Moment, Step
from oled_sim.engine.state import (
    COPIED_BYTES,
    H2D,
    HELD,
    IDLE,
    JOB_EXPERT,
    JOB_LAYER,
    KIND,
    PREFETCH,
    PREFETCHED,
    PREFETCHED_BYTES,
    QUEUED,
    SLOTS,
    USED,
    State,
)
from oled_sim.engine.timeline import dequeue, first_in_queue
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.machine import ExpertMachine
from oled_sim.hardware.slot_map import SlotMap


class Prefetches:
    """The copy engine between demand transfers.

    Attributes:
        flying: the prefetch that is being copied, or None.
        finished: copies that have come and that nobody has asked for yet.
        moments: what happened, in order; others add what they do.
    """

    def __init__(self, machine: ExpertMachine, slots: SlotMap, state: State) -> None:
        self._machine, self._slots, self._state = machine, slots, state
        self._landed: dict[tuple[int, int], int] = {}
        self.flying: Copy | None = None
        self.finished: list[Copy] = []
        self.moments: list[Moment] = []

    def start(self) -> None:
        """Start the first one queued if the engine is idle and a staging slot stays for demand."""
        state, work = self._state, self._state.lanes.work
        if work[QUEUED] == 0 or work[KIND + H2D] != IDLE or work[USED] >= work[SLOTS] - 1:
            return
        if self._slots.free < 2:  # one stays for demand
            return
        row = first_in_queue(work, state.queue)
        layer, expert = (int(n) for n in state.queue.entry[row, :2])
        dequeue(work, state.queue, row)
        slot, after = self._slots.take()
        self.flying = Copy(layer, expert, slot)
        self.moments.append(Moment(Step.START, layer, expert))
        self._machine.copies.submit([(self.flying, after)])
        size = state.lanes.expert_bytes[layer]
        work[KIND + H2D], work[JOB_LAYER + H2D], work[JOB_EXPERT + H2D] = PREFETCH, layer, expert
        work[USED] += 1
        work[COPIED_BYTES] += size
        work[PREFETCHED] += 1
        work[PREFETCHED_BYTES] += size

    def arrived(self) -> tuple[int, int] | None:
        """Return layer and expert of the prefetch that has arrived since the last call, or None.

        One that an event waits for is that event's own.
        """
        copy, work = self.flying, self._state.lanes.work
        if copy is None or work[KIND + H2D] != PREFETCH or not copy.done:
            return None
        work[KIND + H2D] = IDLE
        self.flying = None
        self.finished.append(copy)
        self._landed[copy.layer, copy.expert] = copy.slot
        self.moments.append(Moment(Step.LAND, copy.layer, copy.expert))
        return copy.layer, copy.expert

    def hold(self, layer: int, expert: int) -> None:
        """Let an arrival wait for the end of the layer whose pool it is for."""
        self.moments.append(Moment(Step.HOLD, layer, expert))
        queue, work = self._state.queue, self._state.lanes.work
        queue.held[work[HELD], 0], queue.held[work[HELD], 1] = layer, expert
        work[HELD] += 1

    def late(self) -> Copy | None:
        """Take the copy in flight out of our hands: its expert is needed now."""
        copy, self.flying = self.flying, None
        if copy is not None:
            self.finished.append(copy)
        return copy

    def abandon(self) -> None:
        """Wait for the copy in flight, and give its slot back."""
        if self.flying is not None:
            while not self.flying.done:
                time.sleep(1e-5)
            self._slots.release(self.flying.slot, None)
            self.flying = None

    def settle(self, layer: int, expert: int) -> None:
        """Note where an arrival lies, now that the engine has let it in, or give its slot back.

        Whoever made room for it may still be read by the work queued on the GPU.
        """
        slots, resident = self._slots, self._state.pools.resident
        slot = self._landed.pop((layer, expert))
        mark = self._machine.clock.mark()
        slots.drop_all_gone(resident, mark)
        if resident[layer, expert] and slots.slot[layer, expert] < 0:
            slots.slot[layer, expert] = slot
        else:
            slots.release(slot, mark)
