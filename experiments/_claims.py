"""Figures that several claims are made of: ratios of means between policies, over settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.scoreboard.estimate import MissingSettingError, Panel, Statistic

from ._grids import CACHES, PRIOR

Array = NDArray[np.float64]
EACH = ("model", "data_set", "cache")
"""A setting of the paper's figures: averages over settings count each alike."""


def least(values: Sequence[Array]) -> Array:
    """Return the smallest over settings."""
    return np.min(np.stack(values), axis=0)


def most(values: Sequence[Array]) -> Array:
    """Return the largest over settings."""
    return np.max(np.stack(values), axis=0)


def average(values: Sequence[Array]) -> Array:
    """Return the mean over settings."""
    return np.mean(np.stack(values), axis=0)


def settings(panel: Panel, names: Sequence[str] = EACH) -> list[dict[str, Any]]:
    """Return the settings that a table has.

    Raises:
        MissingSettingError: none.
    """
    found = panel.settings(*names)
    if not found:
        raise MissingSettingError("no setting")
    return found


def each_prior(panel: Panel, column: str, setting: dict[str, Any]) -> list[Array]:
    """Return a column's mean of every prior system in a setting."""
    return [panel.mean(column, policy=policy, **setting) for policy in PRIOR]


def gain(over: Callable[[Panel], Sequence[Array]], pick: Callable[..., Array]) -> Statistic:
    """Return the statistic that picks among (least, most, average of) figures over settings."""
    return lambda panel: pick(over(panel))


def at_paper_caches(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with the paper's two capacities."""
    return table[table["cache"].isin(CACHES)]


def only(**wanted: Any) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what selects rows by the values of columns; a column that is missing selects none."""

    def select(table: pd.DataFrame) -> pd.DataFrame:
        for name, value in wanted.items():
            table = table[table[name] == value] if name in table else table.iloc[:0]
        return table

    return select


def both(
    first: Callable[[pd.DataFrame], pd.DataFrame], second: Callable[[pd.DataFrame], pd.DataFrame]
) -> Callable[[pd.DataFrame], pd.DataFrame]:
    """Return what selects with one, then with another."""
    return lambda table: second(first(table))
