"""What changes with the expert-cache capacity (figure 13)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oled_sim.experiment.relative import SETTING, relative
from oled_sim.plotting.captions import policy_name
from oled_sim.plotting.pages import Page
from oled_sim.plotting.style import styled

REFERENCE = "ideal"


def draw_gap(table: pd.DataFrame) -> Figure:
    """Draw TPOT (left) and how far it is above the ideal bound's (right); a row per setting.

    Bands: 95 % bootstrap interval of the ratio over requests, pooled over data sets.

    Args:
        table: of ``fig13``: a row per profile, trace, cache, policy and request.
    """
    ratios = relative(table, REFERENCE, [*SETTING, "cache"])
    with styled():
        page = Page(table, 2)
        for setting, rows, (left, right) in page.rows():
            draw_means(left, rows, "tpot_us", 1e-3)
            inside = ratios[(ratios[list(SETTING)] == list(setting)).all(axis=1)]
            _draw_gaps(right, inside)
            left.set_ylabel("TPOT (ms)")
            left.set_ylim(bottom=0)
            for axes in (left, right):
                axes.set_xlabel("cache (experts per layer)")
            page.legend(left)
    return page.figure


def draw_means(axes: Axes, rows: pd.DataFrame, quantity: str, scale: float) -> None:
    """Draw means over requests against the capacity, a line per policy."""
    for policy, points in rows.groupby("policy", sort=False):
        means = points.groupby("cache")[quantity].mean() * scale
        axes.plot(means.index, means.to_numpy(), label=policy_name(str(policy)))


def _draw_gaps(axes: Axes, ratios: pd.DataFrame) -> None:
    for policy, points in ratios.groupby("policy", sort=False):
        gap, low, high = (100 * (points[name] - 1) for name in ("ratio", "low", "high"))
        (line,) = axes.plot(points["cache"], gap)
        if policy != REFERENCE:
            axes.fill_between(
                points["cache"], low, high, color=line.get_color(), alpha=0.15, linewidth=0
            )
    axes.set_ylabel("TPOT above ideal (%)")
