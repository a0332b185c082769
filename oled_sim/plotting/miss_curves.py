"""Miss rates over the cache size on a real trace and on synthetic ones made after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from oled_sim.plotting.style import page_figure, styled

LOOKS = {"real": ("-", 1.4), "synthetic": ((0, (2, 1.2)), 0.9)}
"""Line style and width by the origin of the trace; colours and markers tell policies apart."""


def draw_miss_curves(curves: pd.DataFrame) -> Figure:
    """Draw miss rates, real and synthetic over each other, and below how far they are apart.

    Args:
        curves: rows per ``data_set`` (a column of panels each), ``policy``, ``trace``, ``origin``
            (``real``, of one trace, or ``synthetic``) and ``cache`` with ``misses`` and
            ``activations``, summed over whatever else tells rows apart.
    """
    sets = list(curves.groupby("data_set", sort=False))
    with styled():
        figure = page_figure(3.9)
        panels = figure.subplots(2, len(sets), squeeze=False, sharex=True, sharey="row")
        for column, (name, rows) in enumerate(sets):
            upper, lower = panels[0][column], panels[1][column]
            _draw_rates(upper, rows)
            _draw_differences(lower, rows)
            upper.set_title(str(name))
            lower.set_xlabel("cache (experts per layer)")
        panels[0][0].set_ylabel("experts missed (%)")
        panels[1][0].set_ylabel("synthetic less real\n(percentage points)")
        panels[0][0].set_ylim(bottom=0)
        panels[0][0].set_xlim(left=0)
        for row in panels:
            row[0].yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
        panels[0][-1].legend(handles=_legend(curves))
    return figure


def _lines(rows: pd.DataFrame) -> Iterator[tuple[str, str, pd.Series]]:
    """Yield policy, origin and miss rate by cache size of every trace."""
    for (policy, _, origin), found in rows.groupby(["policy", "trace", "origin"], sort=False):
        sums = found.groupby("cache")[["misses", "activations"]].sum()
        yield str(policy), str(origin), sums["misses"] / sums["activations"]


def _look(rows: pd.DataFrame) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every policy with its colour and marker."""
    cycle = rcParams["axes.prop_cycle"].by_key()
    for policy, color, marker in zip(
        rows["policy"].unique(), cycle["color"], cycle["marker"], strict=False
    ):
        yield str(policy), {"color": color, "marker": marker, "markersize": 2.5}


def _draw_rates(axes: Axes, rows: pd.DataFrame) -> None:
    looks = dict(_look(rows))
    for policy, origin, rate in _lines(rows):
        style, width = LOOKS[origin]
        axes.plot(rate.index, rate, linestyle=style, linewidth=width, **looks[policy])


def _draw_differences(axes: Axes, rows: pd.DataFrame) -> None:
    looks, found = dict(_look(rows)), list(_lines(rows))
    real = {policy: rate for policy, origin, rate in found if origin == "real"}
    style, width = LOOKS["synthetic"]
    axes.axhline(0, color="black", linewidth=0.8)
    for policy, origin, rate in found:
        if origin != "real":
            apart = rate - real[policy]
            axes.plot(apart.index, apart, linestyle=style, linewidth=width, **looks[policy])


def _legend(curves: pd.DataFrame) -> list[Line2D]:
    return [
        Line2D([], [], linestyle=style, linewidth=width, label=f"{policy}, {origin}", **look)
        for policy, look in _look(curves)
        for origin, (style, width) in LOOKS.items()
    ]
