"""The smallest cache, and the best policy, that meet a target."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from oled_sim.engine.runner import Result
from oled_sim.scoreboard.estimate import Estimate, estimate

BEND = 0.05
"""Least depth of a knee below the line between the ends, as part of the whole fall."""

SEED = 0
"""Of the intervals."""

GRID = 12
"""Cache sizes that a search looks at first."""


@dataclass(frozen=True)
class Candidate:
    """A policy with a cache size, and its time per output token over requests, in µs."""

    policy: str
    cache: int
    tpot_us: Estimate

    @property
    def mean_us(self) -> float:
        """Mean over requests."""
        return self.tpot_us.value


Simulate = Callable[[Sequence[str], Sequence[int]], Sequence[Result]]
"""Runs policies, by label, with cache sizes, every combination."""


@dataclass(frozen=True)
class Found:
    """What a search looked at, and what it found.

    Attributes:
        candidates: everything that was simulated, by policy and cache.
        target_us: the time per output token to meet.
        margins: by policy how many times the predicted time hardware may take, for :attr:`safe`;
            empty where nothing is known about it.
    """

    candidates: tuple[Candidate, ...]
    target_us: float
    margins: Mapping[str, float] = field(default_factory=dict)

    @property
    def choice(self) -> Candidate | None:
        """The smallest cache whose mean meets the target, with the fastest policy; or None."""
        return _smallest(c for c in self.candidates if c.mean_us <= self.target_us)

    @property
    def safe(self) -> Candidate | None:
        """As :attr:`choice`, with the interval's upper end times the margin for the mean."""
        return _smallest(
            c
            for c in self.candidates
            if c.policy in self.margins
            and c.tpot_us.high * self.margins[c.policy] <= self.target_us
        )

    @property
    def fastest(self) -> Candidate:
        """The best that can be had, whatever the cache."""
        return min(self.candidates, key=lambda c: (c.mean_us, c.cache))

    def of(self, policy: str) -> list[Candidate]:
        """Return the candidates of a policy by cache size."""
        return sorted((c for c in self.candidates if c.policy == policy), key=lambda c: c.cache)

    @property
    def policies(self) -> list[str]:
        """The policies, in the order given."""
        return list(dict.fromkeys(c.policy for c in self.candidates))

    def smallest_of(self, policy: str) -> Candidate | None:
        """Return the smallest cache with which a policy meets the target, if one does."""
        return _smallest(c for c in self.of(policy) if c.mean_us <= self.target_us)

    @property
    def knee(self) -> Candidate | None:
        """Where more cache stops paying for the best policy at each size, see :func:`knee`."""
        best = {c.cache: c for c in sorted(self.candidates, key=lambda c: -c.mean_us)}
        caches = sorted(best)
        at = knee(caches, [best[c].mean_us for c in caches])
        return None if at is None else best[caches[at]]


def _smallest(candidates: Iterable[Candidate]) -> Candidate | None:
    return min(candidates, key=lambda c: (c.cache, c.mean_us), default=None)


def search(
    simulate: Simulate,
    policies: Sequence[str],
    *,
    least: int,
    largest: int,
    target_us: float,
    margins: Mapping[str, float] | None = None,
) -> Found:
    """Look for the smallest cache that meets a target.

    First :data:`GRID` cache sizes between ``least`` and ``largest`` are simulated with every
    policy, both ends among them; then, for every policy, all sizes between the last that is too
    slow and the first that is not. Time need not fall with the cache: a size below the last that is
    too slow, and off the grid, is not found.

    Args:
        simulate: runs policies with cache sizes.
        policies: labels.
        least, largest: the cache sizes to consider, in experts per layer.
        target_us: mean time per output token to meet.
        margins: see :class:`Found`.
    """
    coarse = np.unique(np.linspace(least, largest, GRID).round().astype(int)).tolist()
    candidates = _candidates(simulate(policies, coarse))
    for policy in policies:
        curve = sorted((c.cache, c.mean_us) for c in candidates if c.policy == policy)
        if between := gap(curve, target_us):
            candidates += _candidates(simulate([policy], between))
    order = {policy: i for i, policy in enumerate(policies)}
    candidates.sort(key=lambda c: (order[c.policy], c.cache))
    return Found(tuple(candidates), target_us, margins or {})


def gap(curve: Sequence[tuple[int, float]], target_us: float) -> list[int]:
    """Return the cache sizes between the last that is too slow and the first that is not.

    Args:
        curve: (cache, µs), ascending.
        target_us: what is fast enough.
    """
    before = None
    for cache, time in curve:
        if time <= target_us:
            return [] if before is None else list(range(before + 1, cache))
        before = cache
    return []


def _candidates(results: Iterable[Result]) -> list[Candidate]:
    return [
        Candidate(result.spec, int(result.budget.cache or 0), mean_tpot(result))
        for result in results
    ]


def mean_tpot(result: Result) -> Estimate:
    """Return the mean time per output token over requests, in µs, with its interval."""
    rows = pd.DataFrame(
        {"trace": "", "request": r.request, "tpot_us": r.tpot_us} for r in result.requests
    )
    return estimate(rows, [], ["tpot_us"], lambda panel: panel.mean("tpot_us"), seed=SEED)


def knee(x: Sequence[float], y: Sequence[float]) -> int | None:
    """Return where a falling curve bends most: the point farthest below the line between its ends.

    Both axes are scaled to 0..1, as in Satopää et al., "Finding a 'Kneedle' in a haystack" (2011).

    Args:
        x: ascending. y: of the same length.

    Returns:
        An index; None for fewer than three points, or where the curve is nearly straight.
    """
    if len(x) < 3 or y[0] <= y[-1]:
        return None
    across = (np.array(x, np.float64) - x[0]) / (x[-1] - x[0])
    down = (np.array(y, np.float64) - y[-1]) / (y[0] - y[-1])
    below = (1.0 - across) - down
    at = int(np.argmax(below))
    return at if below[at] >= BEND else None
