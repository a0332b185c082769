"""Least recently used: the paper's Naive-LRU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Compiled, Event, Policy, Setting, param

from ._kernels import decide_lru, split_data
from ._load_split import Dispatch, split_by_load


@dataclass
class LRU(Policy):
    """Naive-LRU of the OLED-MoE paper (section 5.1): keep the most recently used experts.

    The paper says "an inter-iteration expert cache with LRU replacement" and no more. Chosen here:

    - Every miss is transferred and may be retained; ``dispatch=load`` splits misses between
      transfer and CPU by load alone.
    - Inside an event the expert routed last counts as used last (the engine's recency order), so
      with more activated experts than slots those of the last tokens stay.
    - Experts that no token activates age; nothing else does.
    """

    dispatch_by: Dispatch = param("transfer", "what becomes of misses", name="dispatch")

    def place(self, setting: Setting) -> None:
        """Remember the costs."""
        self._setting = setting

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Transfer every miss, or split misses by load."""
        if self.dispatch_by == "load":
            return split_by_load(event, self._setting)
        return super().dispatch(event)

    @property
    def stack(self) -> bool:
        """Whether all misses are transferred."""
        return self.dispatch_by == "transfer"

    def compiled(self) -> Compiled:
        """Offer the same as a kernel."""
        return Compiled(decide_lru, split_data(self._setting, self.dispatch_by), scores=False)
