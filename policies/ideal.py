"""The ideal cache bound: perfect knowledge of the activated experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, Lane, Policy, Setting, param

from ._exact_split import best_split, new_search
from ._pass_split import new_plans, plan_pass, planned_lanes


@dataclass
class Ideal(Policy):
    """The ideal cache bound of the OLED-MoE paper (section 5.1), read literally.

    The paper: "perfect knowledge of the activated experts to maximize the number of activated
    experts already resident in the GPU cache before each layer executes". So before each layer
    min(C, |A|) activated experts are resident, put there free of charge. By default C is fixed per
    layer; ``split=total`` shares the budget anew over the layers of every pass, so that the pass
    is as short as it can be with the most hits possible, min(Σ C, Σ |A|). A global pool is
    shared in the same two ways: one that every layer could use whole would be full residency.

    Chosen here: *which* experts are resident and how misses are split is whatever makes the
    layer shortest by the engine's own lane model. For every number x of experts sent to the CPU,
    and every run of x neighbours in the order of load, the others are resident as far as slots
    reach, heaviest first, and what is left over is transferred. x may exceed the number of misses:
    then residents go to the CPU too, where that is faster; they are hits wherever they are
    computed. Where the GPU's time depends on the number of experts alone this is the shortest
    layer of all. Where it depends on tokens too, tests against exhaustive search find it within
    1 % if a CPU expert takes several times as long as one on the GPU, and within 15 % if it takes
    about as long. To that extent no policy that neither prefetches nor moves budget between layers
    has a lower TPOT; with ``split=total`` none that does not prefetch.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "future"})

    bound: ClassVar[Literal["no", "residency", "hits"]] = "residency"
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {"total": {"split": "total"}}

    split: Literal["layer", "total"] = param("layer", "what the budget is shared over: see above")

    def place(self, setting: Setting) -> None:
        """Remember costs and slots."""
        self._setting = setting
        self._search = new_search(setting.costs, self.experts)
        self._slots = setting.capacity
        self._plans = new_plans(len(setting.capacity), self.experts)

    def foresee(self, events: Iterable[Event]) -> NDArray[np.int64] | None:
        """Share the budget over the layers of the pass."""
        if self.split == "layer":
            return None
        self._slots = plan_pass(self._plans, self._setting, self._search, list(events))
        return self._slots

    def reside(self, event: Event) -> NDArray[np.int64]:
        """Choose residents and lanes of the event together, by time."""
        slots, count = event.capacity, len(event.experts)
        if self._setting.scope == "global" or self.split == "total":
            slots = int(self._slots[event.layer])
        order = np.argsort(event.tokens, kind="stable")
        if self.split == "total":
            self._lanes = planned_lanes(self._plans, self._setting, self._search, event, slots)
        else:
            self._lanes = self._shortest(event, order, slots)
        hits = event.experts[self._lanes == Lane.GPU]
        # Slots that the GPU's hits leave over hold experts that the CPU computes.
        spare = event.experts[order][self._lanes[order] == Lane.CPU]
        return np.concatenate([hits, spare[: min(slots, count) - len(hits)]])

    def _shortest(self, event: Event, order: NDArray[np.int64], slots: int) -> NDArray[np.int64]:
        timer, lanes = self._setting.timer, np.empty(len(order), np.int64)
        best_split(
            timer.lanes,
            timer.queue,
            timer.tables,
            self._search,
            event.layer,
            len(event.routes),
            event.tokens,
            order,
            slots,
            lanes,
        )
        return lanes

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
