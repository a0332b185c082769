"""Nothing resident, nothing kept: the lower reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, Policy


@dataclass
class NoCache(Policy):
    """Every activated expert is transferred, computed and dropped, whatever the budget.

    The plain offloading that caches are measured against; from no paper. ``oled-sim run`` gives it
    a budget of none, so that its row shows the GPU memory that it takes; with a larger budget
    (from Python) the slots stay empty. Should every expert fit, the engine starts with all of them
    resident, by its own rule; they too are dropped at the first event of their layer.
    """

    residency: ClassVar[Literal["budget", "none", "all"]] = "none"

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Keep nothing."""
        return np.full(self.experts, -np.inf)
