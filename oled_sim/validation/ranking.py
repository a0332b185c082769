"""Whether policies come in the same order on hardware and in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import nan, sqrt

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pearson(a: ArrayLike, b: ArrayLike) -> float:
    """Return Pearson's correlation; NaN below two values, or where one side does not vary."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if len(x) < 2:
        return nan
    x, y = x - x.mean(), y - y.mean()
    scale = sqrt(float((x * x).sum()) * float((y * y).sum()))
    # Rounding must not carry a perfect correlation past 1.
    return float(np.clip((x * y).sum() / scale, -1.0, 1.0)) if scale else nan


def ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Return ranks from 1, equal values sharing the mean of theirs, float64 [n]."""
    x = np.asarray(values, np.float64)
    below = (x[:, None] > x[None, :]).sum(axis=1)
    equal = (x[:, None] == x[None, :]).sum(axis=1)
    return below + (equal + 1) / 2


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Return Spearman's rank correlation, ties sharing their mean rank; NaN as :func:`pearson`."""
    return pearson(ranks(a), ranks(b))


def kendall(a: ArrayLike, b: ArrayLike) -> float:
    """Return Kendall's τ-b, which corrects for ties; NaN where one side does not vary."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    first, second = np.triu_indices(len(x), 1)
    dx, dy = np.sign(x[first] - x[second]), np.sign(y[first] - y[second])
    scale = sqrt(float((dx != 0).sum()) * float((dy != 0).sum()))
    return float((dx * dy).sum()) / scale if scale else nan


@dataclass(frozen=True)
class Contest:
    """A policy in a group. ``spread_us``: of its measured time over repetitions, NaN unknown."""

    policy: str
    predicted_us: float
    measured_us: float
    spread_us: float


@dataclass(frozen=True)
class Ranking:
    """The order of policies with one cache on one data set.

    Attributes:
        where: cache and data set.
        contests: fastest on hardware first.
        pearson, spearman, kendall: of predicted and measured TPOT.
        pairs: of policies. separated: those whose measured times are further apart than the larger
            of their spreads. unknown: those of which a spread is unknown.
        swapped: separated pairs that the simulator puts the other way round, or calls equal.
    """

    where: str
    contests: tuple[Contest, ...]
    pearson: float
    spearman: float
    kendall: float
    pairs: int
    separated: int
    unknown: int
    swapped: tuple[str, ...]


def rank(where: str, contests: Sequence[Contest]) -> Ranking:
    """Compare the order of some policies."""
    order = tuple(sorted(contests, key=lambda c: (c.measured_us, c.policy)))
    predicted, measured = [c.predicted_us for c in order], [c.measured_us for c in order]
    separated, unknown, swapped = 0, 0, []
    for fast, slow in combinations(order, 2):
        spread = max(fast.spread_us, slow.spread_us, key=_nan_last)
        gap = slow.measured_us - fast.measured_us
        if spread != spread:
            unknown += 1
        elif gap > spread:
            separated += 1
            swapped += [_swap(fast, slow)] if fast.predicted_us >= slow.predicted_us else []
    return Ranking(
        where=where,
        contests=order,
        pearson=pearson(predicted, measured),
        spearman=spearman(predicted, measured),
        kendall=kendall(predicted, measured),
        pairs=len(order) * (len(order) - 1) // 2,
        separated=separated,
        unknown=unknown,
        swapped=tuple(swapped),
    )


def _nan_last(value: float) -> float:
    """Return a key under which an unknown spread is the largest."""
    return np.inf if value != value else value


def _swap(fast: Contest, slow: Contest) -> str:
    return (
        f"{fast.policy} is faster than {slow.policy} on hardware ({fast.measured_us / 1e3:.4g} and"
        f" {slow.measured_us / 1e3:.4g} ms) and not in the simulator"
        f" ({fast.predicted_us / 1e3:.4g} and {slow.predicted_us / 1e3:.4g} ms)"
    )
