"""Least-Stale: evict first what the running forward pass has not touched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, Policy, Setting, param

PASSES = 2.0**26
"""More passes than a run has; stamps of two of them fit a float64 exactly."""


@dataclass
class LeastStale(Policy):
    """The eviction rule of SpecMD, known from its abstract and one re-implementation of it.

    Residents that the running forward pass has touched are kept before all others, and inside
    either class the first in is the first out. Every miss is transferred and may be retained.
    Chosen here:

    - *Stale* is who was not touched in the running pass: two classes (``stale=pass``). Under
      ``stale=age`` every pass makes a class of its own, the longest untouched going first.
    - *In* is the pass in which an expert was last loaded; in one pass the less recently used goes
      first. ``order=lru`` takes the last use instead, in both classes, which with a pool per
      layer is LRU itself: there every resident is touched by the layer's own events or by none.
    - With a pool per layer the running pass has touched what the event activates. In one pool for
      all layers also what earlier layers of the pass activated, and every expert of a later
      layer is stale.
    """

    stale: Literal["pass", "age"] = param("pass", "which residents are equally stale")
    order: Literal["fifo", "lru"] = param("fifo", "who goes first among equally stale ones")

    def place(self, setting: Setting) -> None:
        """Start without stamps."""
        self._shape = len(setting.routing.layers), self.experts
        self.clear()

    def clear(self) -> None:
        """Forget all stamps."""
        self._pass, self._running = 0.0, (-1, -1)
        self._touched = np.zeros(self._shape)
        self._loaded = np.zeros(self._shape)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Note what the event touches and loads; return the ranks of its layer."""
        if event is not None:
            self._count_pass(event)
            self._touched[layer, event.experts] = self._pass
            self._loaded[layer, event.experts[event.missed]] = self._pass
        return self._rank(self._touched[layer], self._loaded[layer])

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the ranks of all layers: they age with every pass."""
        return self._rank(self._touched, self._loaded)

    def _count_pass(self, event: Event) -> None:
        here = event.request, event.pass_index
        if here != self._running:
            self._pass, self._running = self._pass + 1.0, here

    def _rank(
        self, touched: NDArray[np.float64], loaded: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Return class first, then the pass of loading; the engine adds the most recent use."""
        group = touched if self.stale == "age" else np.where(touched == self._pass, 1.0, 0.0)
        return group * PASSES + (loaded if self.order == "fifo" else 0.0)
