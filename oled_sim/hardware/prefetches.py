"""Prefetches on the hardware: one at a time from the engine's queue, reported when here."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.arrivals import Moment, Step
from oled_sim.engine.jit import compiled_for, lean
from oled_sim.engine.packing import Packer, unpacked
from oled_sim.engine.prefetch_queue import begin_prefetch, first_in_queue, release_held
from oled_sim.engine.state import (
    GLOBAL,
    H2D,
    HELD,
    IDLE,
    KIND,
    PREFETCH,
    QUEUED,
    SLOTS,
    USED,
    State,
)
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.machine import ExpertMachine
from oled_sim.hardware.slot_map import SlotMap

# ruff: noqa: ANN001, ANN202


class Books(NamedTuple):
    """What the kernels of this file read and write, all of it.

    ``state``: the engine's. ``slot``: int32 [L, E], where each expert lies. ``gone``: int64 [E],
    scratch.
    """

    state: State
    slot: NDArray[np.int32]
    gone: NDArray[np.int64]


class Prefetches:
    """The copy engine between demand transfers.

    Between the end of a copy and the start of the next one lies all that is done here, so arrays
    are looked at by kernels, which need a fraction of the time that numpy takes for a few numbers.

    Attributes:
        flying: the prefetch that is being copied, or None.
        finished: copies that have come and that nobody has asked for yet.
        moments: what happened, in order; others add what they do.
    """

    def __init__(self, machine: ExpertMachine, slots: SlotMap, state: State) -> None:
        self._machine, self._slots, self._state = machine, slots, state
        self._work, self._experts = state.lanes.work, slots.slot.shape[1]
        self._gone = np.empty(self._experts, np.int64)
        self._books = Packer().pack(Books(state, slots.slot, self._gone))
        self._start = compiled_for(_start_first, self._books)
        self._release = compiled_for(_release_held, self._books)
        self._find_gone = compiled_for(_find_gone, self._books, 0)
        self._landed: dict[tuple[int, int], int] = {}
        self.flying: Copy | None = None
        self.finished: list[Copy] = []
        self.moments: list[Moment] = []

    def start(self) -> None:
        """Start the first one queued if the engine is idle and a staging slot stays for demand."""
        if self.flying is not None or self._slots.free < 2:  # one stays for demand
            return
        first = self._start(self._books)
        if first < 0:
            return
        layer, expert = divmod(first, self._experts)
        slot, after = self._slots.take()
        self.flying = Copy(layer, expert, slot)
        self._machine.copies.submit(((self.flying, after),))
        self.moments.append(Moment(Step.START, layer, expert))

    def arrived(self) -> tuple[int, int] | None:
        """Return layer and expert of the prefetch that has arrived since the last call, or None.

        One that an event waits for is that event's own.
        """
        copy, work = self.flying, self._work
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
        queue, work = self._state.queue, self._work
        queue.held[work[HELD], 0], queue.held[work[HELD], 1] = layer, expert
        work[HELD] += 1

    def release(self) -> tuple[int, int]:
        """Return layer and expert of the first arrival that was held, which waits no more."""
        self._release(self._books)
        layer, expert = self._state.queue.arrived.tolist()
        return layer, expert

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

        Whoever made room for it may still be read by the work queued on the GPU; its own slot, if
        it was not let in, nobody has read.
        """
        slots, resident = self._slots, self._state.pools.resident
        slot = self._landed.pop((layer, expert))
        if self._work[GLOBAL]:
            slots.drop_all_gone(resident, self._machine.clock.mark())
        elif gone := self._find_gone(self._books, layer):
            mark = self._machine.clock.mark()
            for other in self._gone[:gone].tolist():
                slots.drop(layer, other, mark)
        if resident[layer, expert] and slots.slot[layer, expert] < 0:
            slots.slot[layer, expert] = slot
        else:
            slots.release(slot, None)


@lean
def _start_first(books):
    """Make the first prefetch queued the job of the copy engine, if one can start.

    Returns:
        Its number, layer · E + expert, or -1.
    """
    state = unpacked(books).state
    work, queue = state.lanes.work, state.queue
    if work[QUEUED] == 0 or work[KIND + H2D] != IDLE or work[USED] >= work[SLOTS] - 1:
        return -1
    row = first_in_queue(work, queue)
    layer, expert = queue.entry[row, 0], queue.entry[row, 1]
    begin_prefetch(work, queue, row, state.lanes.expert_bytes[layer])
    return layer * state.pools.resident.shape[1] + expert


@lean
def _release_held(books):
    state = unpacked(books).state
    release_held(state.lanes.work, state.queue)


@lean
def _find_gone(books, layer):
    """Write to ``gone`` who lies in a slot but has left the layer's pool; return how many."""
    state, slot, gone = unpacked(books)
    resident, n = state.pools.resident[layer], 0
    for expert in range(len(resident)):
        if slot[layer, expert] >= 0 and not resident[expert]:
            gone[n] = expert
            n += 1
    return n
