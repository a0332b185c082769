"""Systems side by side: TPOT and expert cache utilization (figures 5 and 12)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oled_sim.plotting.captions import policy_name, provenance
from oled_sim.plotting.style import page_figure, styled

SETTING = ["profile", "origin", "model"]
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
"""Tell bars apart in print without colour."""


def draw_overall(table: pd.DataFrame) -> Figure:
    """Draw TPOT (upper) and utilization (lower) per data set and cache, a column per setting.

    Args:
        table: a row per ``profile``, ``origin``, ``model``, ``data_set``, ``cache``, ``policy`` and
            request with ``tpot_us`` and ``utilization``.

    Bars are means over requests, whiskers span the requests.
    """
    settings = list(table.groupby(SETTING, sort=False))
    with styled():
        figure = page_figure(0.6 + 2.0 * len(settings))
        panels = figure.subplots(len(settings), 2, squeeze=False)
        for (tpot, utilization), (setting, rows) in zip(panels, settings, strict=True):
            draw_bars(tpot, rows, "tpot_us", 1e-3)
            draw_bars(utilization, rows, "utilization", 1.0)
            tpot.set(ylabel="TPOT (ms)", title=", ".join(map(str, setting)))
            utilization.set(ylabel="expert cache utilization (%)", ylim=(0, 1))
            utilization.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        figure.supxlabel(provenance(table), fontsize=6)
    return figure


def draw_bars(axes: Axes, rows: pd.DataFrame, quantity: str, scale: float) -> None:
    """Draw a group of bars per data set and cache, one bar per policy."""
    groups = list(rows.groupby(["data_set", "cache"], sort=False))
    policies = list(dict.fromkeys(rows["policy"]))
    width = 0.85 / len(policies)
    colours = rcParams["axes.prop_cycle"].by_key()["color"]
    for i, policy in enumerate(policies):
        values = [_of(inside, policy, quantity) * scale for _, inside in groups]
        at = np.arange(len(groups)) + (i - (len(policies) - 1) / 2) * width
        axes.bar(
            at, [float(v.mean()) for v in values], width, label=policy_name(policy),
            color=colours[i], hatch=HATCHES[i % len(HATCHES)], edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        axes.errorbar(
            at, [float(v.mean()) for v in values], _whiskers(values), fmt="none", ecolor="0.2",
            linewidth=0.7,
        )  # fmt: skip
    axes.set_xticks(range(len(groups)), [f"{name}\nC = {cache}" for (name, cache), _ in groups])
    axes.grid(axis="x", visible=False)


def _of(rows: pd.DataFrame, policy: str, quantity: str) -> np.ndarray:
    return rows.loc[rows["policy"] == policy, quantity].to_numpy(float)


def _whiskers(values: Sequence[np.ndarray]) -> np.ndarray:
    """Return lengths below and above the means, float64 [2, n]: the range over requests."""
    means = np.array([v.mean() for v in values])
    low, high = (np.array([f(v) for v in values]) for f in (np.min, np.max))
    return np.stack([means - low, high - means])
