"""Belady's rule for sets: the most hits that a policy without prefetching can have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, Policy, Setting, param

from ._load_split import Dispatch, split_by_load


@dataclass
class Belady(Policy):
    """Keep what is used soonest (Belady 1966), a set at a time, with bypass.

    After an event the residents and the transferred compete, and the C whose next use comes first
    stay; so a transferred expert may be dropped at once. Two consecutive uses of an expert are an
    interval, keeping it in between is one hit, and no more than C intervals may overlap: taking
    those that end first is the greedy solution of that problem, and optimal (Carlisle and Lloyd
    1995), also while capacities change. No policy without prefetching has more hits, given the
    same capacities, scope and initial residents (tested against exhaustive search).

    Under global scope there is one pool over the events of all layers in order. Next uses are
    numbers of events of the run, which do not age, so residents of other layers need no new
    score. If expert sizes differ there, the rule is a heuristic: it counts experts, not bytes.

    It promises hits, not time: with CPU lanes a policy that hits less may be faster. A miss is
    transferred, since what the CPU computes cannot stay; ``dispatch=load`` splits misses by load,
    which is often faster, and no longer the most hits. Who is kept among experts without a
    further use, and among those of one event, changes no number of hits; the engine's order of
    ties decides.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "future"})

    bound: ClassVar[Literal["no", "residency", "hits"]] = "hits"

    dispatch_by: Dispatch = param("transfer", "what becomes of misses", name="dispatch")

    def place(self, setting: Setting) -> NDArray[np.bool_] | None:
        """Remember the costs; start with nothing."""
        self._setting = setting
        self.clear()
        return None

    def clear(self) -> None:
        """Note that no layer has had an event."""
        self._begun = False

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Transfer every miss, or split misses by load."""
        if self.dispatch_by == "load":
            return split_by_load(event, self._setting)
        return super().dispatch(event)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return how soon each expert is used."""
        assert event is not None, "nothing is prefetched"
        self._future = event.future
        return -event.future.next_use(layer).astype(np.float64)

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Score initial residents of layers without an event so far; later, nothing ages."""
        if self._begun:
            return None
        self._begun = True
        return -np.stack([self._future.next_use(layer) for layer in range(len(resident))]).astype(
            np.float64
        )
