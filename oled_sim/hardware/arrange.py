"""Who goes where in one event: hits and their slots, the CPU's experts, freed slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel
from oled_sim.engine.state import ON_CPU, ON_GPU


class Arrangement(NamedTuple):
    """What was decided at a gate, in terms of slots. Positions count the activated experts.

    Attributes:
        hits: int32 [H], positions of the residents that the GPU computes. slots: int32 [H], theirs.
        cpu: int32 [C], positions of the experts that the CPU computes.
        freed: int32 [F], slots of dropped residents that nothing reads any more.
        freed_by_hits: int32 [D], slots of dropped residents that the hits read first.
    """

    hits: NDArray[np.int32]
    slots: NDArray[np.int32]
    cpu: NDArray[np.int32]
    freed: NDArray[np.int32]
    freed_by_hits: NDArray[np.int32]


class Arranger:
    """Arranges events; keeps scratch for the largest.

    Args:
        experts: per layer.

    Attributes:
        place: int32 [E], position of each activated expert of the last event.
    """

    def __init__(self, experts: int) -> None:
        self.place = np.full(experts, -1, np.int32)
        self._found = np.empty((5, experts), np.int32)
        self._counts = np.zeros(5, np.int64)

    def arrange(
        self,
        experts: NDArray[np.uint16],
        decided: NDArray[np.int64],
        slot: NDArray[np.int32],
        resident: NDArray[np.bool_],
        late: int,
    ) -> Arrangement:
        """Return who goes where; experts that are no longer resident lose their slot.

        Args:
            experts: [A], activated. decided: [A], a lane each.
            slot: [E] of the layer, -1 none; changed.
            resident: [E] of the layer, as the engine has settled it.
            late: the expert whose prefetch is in flight, which no lane computes but the GPU; or -1.
        """
        _arrange(experts, decided, slot, resident, late, self.place, self._found, self._counts)
        found = zip(self._found, self._counts.tolist(), strict=True)
        return Arrangement(*(row[:count].copy() for row, count in found))


@kernel
def _arrange(experts, decided, slot, resident, late, place, found, counts):  # noqa: ANN001, ANN202
    place[:] = -1
    counts[:] = 0
    for i in range(len(experts)):
        expert = experts[i]
        place[expert] = i
        if decided[i] == ON_GPU:
            found[0, counts[0]] = i
            found[1, counts[0]] = slot[expert]
            counts[0] += 1
        elif decided[i] == ON_CPU and expert != late:
            found[2, counts[2]] = i
            counts[2] += 1
    counts[1] = counts[0]
    for expert in range(len(slot)):
        if slot[expert] >= 0 and not resident[expert]:
            i = place[expert]
            row = 4 if i >= 0 and decided[i] == ON_GPU else 3
            found[row, counts[row]] = slot[expert]
            counts[row] += 1
            slot[expert] = -1
