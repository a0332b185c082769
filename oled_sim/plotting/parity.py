"""Predicted against measured time per output token."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oled_sim.plotting.style import styled

if TYPE_CHECKING:
    import pandas as pd

BAND = 0.10
"""Relative error within which a prediction is called good; the shaded band."""

MARGIN = 1.25
"""Free space around the points, as a factor."""


def draw_parity(points: pd.DataFrame) -> Figure:
    """Draw predicted over measured TPOT, both logarithmic, one marker per policy.

    Args:
        points: a row per measured point: ``policy``, ``predicted_tpot_us``, ``measured_tpot_us``,
            and ``measured_fastest_us`` to ``measured_slowest_us``, which become a bar.
    """
    with styled():
        figure = Figure(figsize=(4.6, 3.4))
        axes = figure.subplots()
        limits = _limits(points)
        _draw_band(axes, limits)
        for (policy, rows), look in zip(
            points.groupby("policy", sort=False), _looks(), strict=False
        ):
            _draw_policy(axes, str(policy), rows, look)
        axes.set(
            xscale="log", yscale="log", xlim=limits, ylim=limits, aspect="equal",
            xlabel="measured TPOT (ms)", ylabel="predicted TPOT (ms)",
        )  # fmt: skip
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("{x:g}" if limits[1] / limits[0] < 10 else "")
        axes.legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def _looks() -> Any:
    """Yield colour and marker of the style; the second time round, and so on, hollow."""
    styles = list(mpl.rcParams["axes.prop_cycle"])
    filled = [{"color": s["color"], "marker": s["marker"]} for s in styles]
    hollow = [look | {"markerfacecolor": "white"} for look in filled]
    return cycle(filled + hollow)


def _limits(points: pd.DataFrame) -> tuple[float, float]:
    columns = ["predicted_tpot_us", "measured_fastest_us", "measured_slowest_us"]
    values = points[columns].to_numpy() / 1e3
    return float(values.min()) / MARGIN, float(values.max()) * MARGIN


def _draw_band(axes: Axes, limits: tuple[float, float]) -> None:
    x = np.array(limits)
    axes.fill_between(
        x, x * (1 - BAND), x * (1 + BAND), color="0.9", linewidth=0, label=f"±{BAND:.0%}"
    )
    axes.plot(x, x, color="black", linewidth=0.8, linestyle="-", marker="", label="equal")


def _draw_policy(axes: Axes, policy: str, rows: pd.DataFrame, look: dict[str, Any]) -> None:
    measured = rows["measured_tpot_us"].to_numpy() / 1e3
    below = measured - rows["measured_fastest_us"].to_numpy() / 1e3
    above = rows["measured_slowest_us"].to_numpy() / 1e3 - measured
    axes.errorbar(
        measured, rows["predicted_tpot_us"].to_numpy() / 1e3, xerr=np.maximum([below, above], 0),
        linestyle="none", elinewidth=0.8, label=policy, **look,
    )  # fmt: skip
