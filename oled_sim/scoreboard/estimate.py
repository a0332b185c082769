"""Figures over requests with bootstrap intervals.

What makes a request slow makes it slow under every policy. So the requests of a trace are drawn
once per resample, for all settings that ran on it, and a figure is worked out anew from the means
of each resample. Traces are resampled on their own: settings that share one are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.comparison import LEVEL

if TYPE_CHECKING:
    import pandas as pd

RESAMPLES = 2_000

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A figure in the claim's unit, with the 95 % interval over requests.

    ``low``, ``high``: NaN where fewer than two requests count, or where nothing is resampled.
    ``requests``: counted requests that it rests on.
    """

    value: float
    low: float
    high: float
    requests: int


class MissingSettingError(LookupError):
    """A table lacks a setting that a figure needs."""


@dataclass(frozen=True)
class Panel:
    """Means over requests per setting: one per resample, or one alone.

    Attributes:
        names: what a setting is told apart by.
        means: float64 [R] by (column, value of each name).
    """

    names: tuple[str, ...]
    means: Mapping[tuple[Any, ...], Array]

    def levels(self, name: str) -> list[Any]:
        """Return the values of a name, in the order of their first appearance."""
        at = 1 + self.names.index(name)
        return list(dict.fromkeys(key[at] for key in self.means))

    def settings(self, *names: str) -> list[dict[str, Any]]:
        """Return the combinations of some names that occur, in the order of appearance."""
        at = [1 + self.names.index(name) for name in names]
        found = dict.fromkeys(tuple(key[i] for i in at) for key in self.means)
        return [dict(zip(names, values, strict=True)) for values in found]

    def has(self, **setting: Any) -> bool:
        """Whether some setting has these values."""
        return any(self._fits(key, setting) for key in self.means)

    def mean(self, column: str, **setting: Any) -> Array:
        """Return the mean of a column over the settings with these values, each counting alike.

        Settings without a figure (NaN) count for nothing.

        Raises:
            MissingSettingError: there is none.
        """
        found = [
            m for key, m in self.means.items() if key[0] == column and self._fits(key, setting)
        ]
        if not found:
            raise MissingSettingError(f"no {column} of {setting}")
        return _over_settings(np.stack(found))

    def _fits(self, key: tuple[Any, ...], setting: Mapping[str, Any]) -> bool:
        return all(key[1 + self.names.index(n)] == v for n, v in setting.items())


Statistic = Callable[[Panel], Array]
"""Works a figure out from means, for all resamples at once: float64 [R]."""


def estimate(
    rows: pd.DataFrame,
    names: Sequence[str],
    columns: Sequence[str],
    statistic: Statistic,
    *,
    seed: int,
    resamples: int = RESAMPLES,
) -> Estimate:
    """Work a figure out over requests, with its interval.

    Args:
        rows: per setting and request; the columns ``trace`` and ``request`` say which request.
        names: columns that tell settings apart; ``trace`` is added if it is not among them.
        columns: what the statistic needs means of; NaN counts for nothing.
        statistic: the figure.
        seed: of the resampling.
        resamples: how many.
    """
    names = tuple(dict.fromkeys((*names, "trace")))
    rng = np.random.default_rng(seed)
    plain: dict[tuple[Any, ...], Array] = {}
    drawn: dict[tuple[Any, ...], Array] = {}
    requests = []
    for _, part in rows.groupby("trace", sort=True):
        ids = np.unique(part["request"].to_numpy())
        requests.append(len(ids))
        every = np.ones((1, len(ids)))
        weights = rng.multinomial(len(ids), np.full(len(ids), 1 / len(ids)), resamples)
        for column in columns:
            for setting, values in _by_setting(part, names, column, ids):
                plain[column, *setting] = _weighted(values, every)
                drawn[column, *setting] = _weighted(values, weights.astype(np.float64))
    value = float(statistic(Panel(names, plain))[0])
    low, high = float("nan"), float("nan")
    if min(requests, default=0) > 1 and not np.isnan(value):
        tail = (1 - LEVEL) / 2
        low, high = map(float, np.nanquantile(statistic(Panel(names, drawn)), [tail, 1 - tail]))
    return Estimate(value, low, high, sum(requests))


def _over_settings(means: Array) -> Array:
    """Return the mean over rows of what is not NaN, float64 [R]; NaN where nothing is left."""
    known = ~np.isnan(means)
    total = np.where(known, means, 0.0).sum(axis=0)
    return total / np.where(known.any(axis=0), known.sum(axis=0), np.nan)


def _by_setting(
    part: pd.DataFrame, names: Sequence[str], column: str, ids: NDArray[Any]
) -> list[tuple[tuple[Any, ...], Array]]:
    """Return a column per setting, one value per request of ``ids``, NaN where it has none.

    Raises:
        ValueError: a setting has two rows of one request.
    """
    found = []
    for setting, rows in part.groupby(list(names), sort=False, dropna=False):
        values = np.full(len(ids), np.nan)
        at = np.searchsorted(ids, rows["request"].to_numpy())
        if len(np.unique(at)) < len(at):
            raise ValueError(f"{dict(zip(names, setting, strict=True))} has a request twice")
        values[at] = rows[column].to_numpy(np.float64)
        found.append((tuple(setting), values))
    return found


def _weighted(values: Array, weights: Array) -> Array:
    """Return the mean of what is not NaN under each row of weights; NaN if nothing is left."""
    known = ~np.isnan(values)
    total = weights @ known
    with np.errstate(invalid="ignore"):
        return (weights @ np.where(known, values, 0.0)) / np.where(total > 0, total, np.nan)
