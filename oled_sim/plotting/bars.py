"""Groups of bars, one bar per policy, told apart by colour and by hatching."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from oled_sim.plotting.captions import policy_name

HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
"""Tell bars apart in print without colour."""

Array = NDArray[np.float64]


def draw_bars(
    axes: Axes, heights: pd.DataFrame, whiskers: tuple[pd.DataFrame, pd.DataFrame] | None = None
) -> None:
    """Draw a group of bars per row, one bar per column.

    Args:
        axes: where.
        heights: labels of groups as index, policies as columns.
        whiskers: the lower and the upper ends, of the same shape; NaN draws none.
    """
    width = 0.85 / len(heights.columns)
    colours: list[Any] = rcParams["axes.prop_cycle"].by_key()["color"]
    for i, policy in enumerate(heights.columns):
        values = heights[policy].to_numpy(float)
        at = np.arange(len(values)) + (i - (len(heights.columns) - 1) / 2) * width
        axes.bar(
            at, values, width, label=policy_name(str(policy)), color=colours[i % len(colours)],
            hatch=HATCHES[i % len(HATCHES)], edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        if whiskers is not None:
            low, high = (ends[policy].to_numpy(float) for ends in whiskers)
            lengths = np.nan_to_num(np.stack([values - low, high - values])).clip(min=0)
            axes.errorbar(at, values, lengths, fmt="none", ecolor="0.2", linewidth=0.7)
    axes.set_xticks(range(len(heights)), [str(label) for label in heights.index])
    axes.grid(axis="x", visible=False)


def spread(
    rows: pd.DataFrame, quantity: str, groups: Sequence[str], label: Any
) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Return mean, least and greatest over requests, groups as rows and policies as columns.

    ``label``: from the values of ``groups`` to what the axis shows.
    """
    labelled = rows.assign(
        group=[label(*key) for key in rows[list(groups)].itertuples(index=False)]
    )
    order = list(dict.fromkeys(labelled["group"])), list(dict.fromkeys(rows["policy"]))
    by = labelled.groupby(["group", "policy"], sort=False)[quantity]
    mean, low, high = (by.agg(how).unstack("policy") for how in ("mean", "min", "max"))
    mean, low, high = (table.loc[order[0], order[1]] for table in (mean, low, high))
    return mean, low, high


def percent_axis(axes: Axes, *, limit: bool = True) -> None:
    """Write the upright axis as percent; the unit stands in its label."""
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    if limit:
        axes.set_ylim(0, 1)
