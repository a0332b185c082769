"""Least frequently used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Compiled, Event, Policy, RequestInfo, Setting, param

from ._kernels import decide_lfu, split_data
from ._load_split import Dispatch, split_by_load


@dataclass
class LFU(Policy):
    """LFU, the second classic rule that the OLED-MoE paper compares with (figure 15 b).

    The paper gives no details. Chosen here:

    - Counts are kept per layer and expert, for residents and others alike (an expert that comes
      back continues its count). They grow by 1 per event; ``count=tokens`` adds the tokens.
    - Counts last over the run; ``reset=request`` starts them anew with every request.
    - Equal counts fall back to the engine's order: most recent use, then lowest id.
    - Every miss is transferred; ``dispatch=load`` splits misses by load alone.
    """

    count: Literal["event", "tokens"] = param("event", "what one activation adds")
    reset: Literal["never", "request"] = param("never", "when counts start anew")
    dispatch_by: Dispatch = param("transfer", "what becomes of misses", name="dispatch")

    def place(self, setting: Setting) -> None:
        """Start with no counts."""
        self._setting = setting
        self.clear()

    def clear(self) -> None:
        """Forget all counts."""
        layers = len(self._setting.routing.layers)
        self._counts = np.zeros((layers, self.experts))

    def begin_request(self, info: RequestInfo) -> tuple[()]:
        """Forget all counts if they belong to one request."""
        if self.reset == "request":
            self.clear()
        return ()

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Transfer every miss, or split misses by load."""
        if self.dispatch_by == "load":
            return split_by_load(event, self._setting)
        return super().dispatch(event)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Count the event and return the counts of its layer."""
        if event is not None:
            self._counts[layer, event.experts] += 1 if self.count == "event" else event.tokens
        return self._counts[layer]

    @property
    def stack(self) -> bool:
        """Whether all misses are transferred."""
        return self.dispatch_by == "transfer"

    def compiled(self) -> Compiled:
        """Offer the same as a kernel."""
        how = split_data(self._setting, self.dispatch_by)
        return Compiled(decide_lfu, (how, self._counts, self.count == "tokens"))
