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
    and every run of x neighbours in the order of load, the others are resident as far as slots
    reach, heaviest first, and what is left over is transferred. x may exceed the number of misses:
    then residents go to the CPU too, where that is faster; they are hits wherever they are
    computed. Where the GPU's time depends on the number of experts alone this is the shortest
    layer of all. Where it depends on tokens too, tests against exhaustive search find it within
    1 % if a CPU expert takes several times as long as one on the GPU, and within 15 % if it takes
    about as long. To that extent no policy that neither prefetches nor moves budget between layers
    has a lower TPOT.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "future"})

    def place(self, setting: Setting) -> None:
        """Remember costs and slots."""
        self._setting = setting
        self._floor_us = float(np.nanmin(setting.costs.profile.gpu_experts.median_us))

    def reside(self, event: Event) -> NDArray[np.int64]:
        """Choose residents and lanes of the event together, by time."""
        slots = event.capacity
        if self._setting.scope == "global":
            slots = int(self._setting.capacity[event.layer])
        timer = self._setting.timer
        self._lanes = np.empty(len(event.experts), np.int64)
        order = np.argsort(event.tokens, kind="stable")
        best_split(
            timer.lanes,
            timer.queue,
            timer.tables,
            event.layer,
            len(event.routes),
            event.tokens,
            order,
            slots,
            self._floor_us,
            self._lanes,
        )
        hits = event.experts[self._lanes == Lane.GPU]
        # Slots that the GPU's hits leave over hold experts that the CPU computes.
        spare = event.experts[order][self._lanes[order] == Lane.CPU]
        return np.concatenate([hits, spare[: min(slots, len(order)) - len(hits)]])

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lanes chosen with the residents."""
        return self._lanes

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Keep the first arrivals, which frees staging as early as can be; then hits."""
        scores = np.zeros(self.experts)
        if event is not None:
            scores[event.experts[self._lanes == Lane.GPU]] = 1.0
            arrivals = event.experts[self._lanes == Lane.TRANSFER]
            scores[arrivals] = 2.0 + np.arange(len(arrivals))[::-1]
        return scores
