"""A search for parameters: damped least squares over the misses of all statistics."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Note = Callable[[str], None]

DIFFERENCE = 0.15
"""By how much a parameter is moved to see what it does: in its logarithm or log odds."""

FINEST = 0.05
"""The search ends when differences no larger than this are of no use."""

LONGEST = 1.0
"""How far one step may move a parameter."""

DAMPINGS = (0.02, 0.3, 3.0)
"""Tried at every step, from bold to careful (Levenberg and Marquardt)."""

ENOUGH = 0.01
"""A step that lowers the loss by a smaller part is of no use."""


class Search:
    """Least squares over bounded parameters, on a logarithmic scale.

    The misses are smooth but for what a parameter does to the use of random numbers, so slopes are
    taken over :data:`DIFFERENCE` and not over something tiny. It draws nothing: the same misses
    give the same parameters.

    Args:
        bounds: name: (low, high); positive ranges are searched by logarithm, within 0..1 by log
            odds, others as they are.
        misses: of a candidate, [n], in tolerances; the sum of their squares is lowered.
    """

    def __init__(
        self,
        bounds: Mapping[str, tuple[float, float]],
        misses: Callable[[dict[str, float]], NDArray[np.float64]],
    ) -> None:
        self.bounds, self.misses = bounds, misses
        ends = [
            (self._forward(n, low), self._forward(n, high)) for n, (low, high) in bounds.items()
        ]
        self.low, self.high = np.array(ends).T

    def run(
        self, start: Mapping[str, float], steps: int, note: Note = lambda _: None
    ) -> dict[str, float]:
        """Return the best parameters after at most so many steps from ``start``."""
        place = self._clip(np.array([self._forward(n, float(start[n])) for n in self.bounds]))
        now, difference = self.misses(self._values(place)), DIFFERENCE
        slopes, fresh = self._slopes(place, now, difference), True
        for step in range(steps):
            found, then = self._step(place, now, slopes)
            before, after = float(now @ now), float(then @ then)
            note(f"  step {step + 1}: loss {before:.2f} to {after:.2f}")
            moved, learnt = found - place, then - now
            if after < before:
                place, now = found, then
            if after <= (1 - ENOUGH) * before:  # Broyden: what this step showed, other slopes stay
                slopes = slopes + np.outer(learnt - slopes @ moved, moved) / (moved @ moved)
                fresh = False
                continue
            if fresh:  # perhaps what these slopes showed was too coarse
                difference /= 2
            if difference < FINEST:
                break
            slopes, fresh = self._slopes(place, now, difference), True
        return self._values(place)

    def _slopes(
        self, place: NDArray[np.float64], now: NDArray[np.float64], difference: float
    ) -> NDArray[np.float64]:
        """Return the change of each miss with each parameter [n, p]."""
        found = np.empty((len(now), len(place)))
        for i in range(len(place)):
            moved = place.copy()
            moved[i] += difference if place[i] + difference <= self.high[i] else -difference
            found[:, i] = (self.misses(self._values(moved)) - now) / (moved[i] - place[i])
        return found

    def _step(
        self, place: NDArray[np.float64], now: NDArray[np.float64], slopes: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the best of a few damped steps and its misses."""
        square = slopes.T @ slopes
        scale = np.diag(square) + 0.05 * np.diag(square).mean()
        tried = []
        for damping in DAMPINGS:
            shift = np.linalg.solve(square + damping * np.diag(scale), -slopes.T @ now)
            there = self._clip(place + np.clip(shift, -LONGEST, LONGEST))
            tried.append((there, self.misses(self._values(there))))
        return min(tried, key=lambda pair: float(pair[1] @ pair[1]))

    def _clip(self, place: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.clip(place, self.low, self.high)

    def _forward(self, name: str, value: float) -> float:
        low, high = self.bounds[name]
        if low <= 0:
            return value
        return float(np.log(value / (1 - value)) if high < 1 else np.log(value))

    def _values(self, place: NDArray[np.float64]) -> dict[str, float]:
        found = {}
        for (name, (low, high)), x in zip(self.bounds.items(), place, strict=True):
            value = x if low <= 0 else (1 / (1 + np.exp(-x)) if high < 1 else np.exp(x))
            found[name] = float(min(max(value, low), high))
        return found
