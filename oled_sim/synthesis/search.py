"""A seeded search for parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

Note = Callable[[str], None]

SMALLEST_STEP = 0.04


class Search:
    """A seeded random walk downhill over bounded parameters, on log or logit scale.

    Args:
        bounds: name: (low, high); positive ranges are searched by their logarithm.
        loss: of a candidate.
        seed: of the walk.
    """

    def __init__(
        self,
        bounds: Mapping[str, tuple[float, float]],
        loss: Callable[[dict[str, float]], float],
        seed: int = 0,
    ) -> None:
        self.bounds, self.loss = bounds, loss
        self.rng = np.random.default_rng(seed)

    def run(
        self, start: Mapping[str, float], trials: int, note: Note = lambda _: None
    ) -> dict[str, float]:
        """Return the best of ``trials`` candidates around ``start``."""
        best = {name: float(start[name]) for name in self.bounds}
        lowest, step = self.loss(best), 0.4
        for trial in range(trials):
            candidate = self._near(best, step)
            value = self.loss(candidate)
            better = value < lowest
            step = min(0.6, step * 1.25) if better else step * 0.96
            if step < SMALLEST_STEP:  # look further away again
                step = 0.4
            if better:
                best, lowest = candidate, value
            if trial % 50 == 49:
                note(f"  {trial + 1} trials: loss {lowest:.2f}, step {step:.3f}")
        return best

    def _near(self, best: dict[str, float], step: float) -> dict[str, float]:
        names = list(self.bounds)
        count = int(self.rng.integers(1, min(4, len(names)) + 1))
        moved = self.rng.choice(len(names), count, replace=False)
        found = dict(best)
        for i in moved:
            name = names[i]
            low, high = self.bounds[name]
            shift = step * self.rng.normal()
            value = found[name] * math.exp(shift) if low > 0 else found[name] + shift
            found[name] = min(max(value, low), high)
        return found
