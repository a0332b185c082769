"""Which slot of the GPU holds which expert, and which are free.

The engine counts: capacities, staging slots, who stays. Where an expert lies is decided here. All
slots are alike, so an arrival that is kept stays where it landed and only the names change.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from oled_sim.hardware.clock import Mark


class SlotMap:
    """Slots of one slab.

    Attributes:
        slot: int32 [L, E], the slot of each expert, -1 if it has none.
    """

    def __init__(self, layers: int, experts: int, slots: int) -> None:
        self.slot = np.full((layers, experts), -1, np.int32)
        self.slots = slots
        self._free: deque[tuple[int, Mark | None]] = deque((s, None) for s in range(slots))

    @property
    def free(self) -> int:
        """Number of free slots, those included whose last reader still runs."""
        return len(self._free)

    def take(self) -> tuple[int, Mark | None]:
        """Take a free slot, and the mark of its last reader if that may still run.

        Raises:
            RuntimeError: there is none, though the engine counted one.
        """
        if not self._free:
            raise RuntimeError("no slot is free: the engine and the slab disagree")
        return self._free.popleft()

    def release(self, slot: int, after: Mark | None) -> None:
        """Give a slot back; who reads it until ``after`` need not be waited for now."""
        if after is None:
            self._free.appendleft((slot, None))
        else:
            self._free.append((slot, after))

    def all_read(self) -> None:
        """Forget the marks of last readers: the GPU is idle."""
        self._free = deque((slot, None) for slot, _ in self._free)

    def drop(self, layer: int, expert: int, after: Mark | None = None) -> None:
        """Forget where an expert was, and free its slot."""
        self.release(int(self.slot[layer, expert]), after)
        self.slot[layer, expert] = -1

    def drop_all_gone(self, resident: NDArray[np.bool_], after: Mark | None = None) -> None:
        """Free the slots of all experts that are no longer resident, bool [L, E]."""
        for layer, expert in np.argwhere((self.slot >= 0) & ~resident).tolist():
            self.drop(layer, expert, after)

    def fill(self, resident: NDArray[np.bool_]) -> list[tuple[int, int, int]]:
        """Start anew with these residents, bool [L, E]; return (layer, expert, slot) of each."""
        self.slot[:] = -1
        self._free = deque((s, None) for s in range(self.slots))
        places = []
        for layer, expert in np.argwhere(resident).tolist():
            slot, _ = self.take()
            self.slot[layer, expert] = slot
            places.append((layer, expert, slot))
        return places
