"""The ideal cache bound: perfect knowledge of the activated experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, Lane, Policy, Setting

from ._exact_split import best_split


@dataclass
class Ideal(Policy):
    """The ideal cache bound of the OLED-MoE paper (section 5.1), read literally.

    The paper: "perfect knowledge of the activated experts to maximize the number of activated
    experts already resident in the GPU cache before each layer executes". So before each layer
    min(C, |A|) activated experts are resident, put there free of charge, with a fixed C per layer
    (budget never moves between layers, and one pool for all layers is shared equally, since a
    pool that every layer could use whole would be full residency).

    Chosen here: *which* experts are resident and how misses are split is whatever makes the
    layer shortest by the engine's own lane model. For every number x of experts sent to the CPU,
    the lowest-load x go there, the rest is resident as far as slots reach, heaviest first, and
    what is left over is transferred. x may exceed the number of misses: then residents go to the
    CPU too, where that is faster. So no policy that neither prefetches nor moves budget between
    layers has a shorter layer. Its residents are hits wherever they are computed.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "future"})

    def place(self, setting: Setting) -> None:
        """Remember costs and slots."""
        self._setting = setting

    def reside(self, event: Event) -> NDArray[np.int64]:
        """Choose residents and lanes of the event together, by time."""
        slots = event.capacity
        if self._setting.scope == "global":
            slots = int(self._setting.capacity[event.layer])
        timer = self._setting.timer
        order = np.argsort(event.tokens, kind="stable")
        on_cpu, resident = best_split(
            timer.lanes,
            timer.queue,
            timer.tables,
            event.layer,
            len(event.routes),
            event.tokens,
            order,
            slots,
        )
        count = len(order)
        self._lanes = np.full(count, Lane.TRANSFER, np.int64)
        self._lanes[order[:on_cpu]] = Lane.CPU
        hits = order[count - resident :] if resident else order[:0]
        self._lanes[hits] = Lane.GPU
        # Slots that the GPU's hits leave over hold experts that the CPU computes.
        spare = order[max(0, on_cpu - (min(slots, count) - resident)) : on_cpu]
        return np.concatenate([event.experts[hits], event.experts[spare]])

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lanes chosen with the residents."""
        return self._lanes

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Keep arrivals first: they then leave staging as early as can be; the rest is free."""
        scores = np.zeros(self.experts)
        if event is not None:
            scores[event.experts] = np.where(self._lanes == Lane.TRANSFER, 2.0, 0.0)
            scores[event.experts[self._lanes == Lane.GPU]] = 1.0
        return scores
