"""Time per output token against GPU memory: what a plan looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oled_sim.plotting.style import page_figure, styled

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd


def draw_plan(
    curve: pd.DataFrame,
    *,
    target_ms: float,
    memory_gib: float,
    marks: Mapping[str, tuple[float, float]],
    title: str,
) -> Figure:
    """Draw a line per policy with its interval, the target, the memory, and marked points.

    Args:
        curve: rows per ``policy`` and cache with ``gpu_gib``, ``tpot_ms``, ``low_ms``, ``high_ms``
            (NaN where there is no interval).
        target_ms: time per output token to meet.
        memory_gib: GPU memory that there is.
        marks: points to mark by what they are: (GiB, ms).
        title: of what, and whether real, synthetic or estimated.
    """
    with styled():
        figure = page_figure(3.0)
        axes = figure.subplots()
        for policy, rows in curve.groupby("policy", sort=False):
            (line,) = axes.plot(rows["gpu_gib"], rows["tpot_ms"], label=str(policy))
            axes.fill_between(
                rows["gpu_gib"], rows["low_ms"], rows["high_ms"],
                color=line.get_color(), alpha=0.15, linewidth=0,
            )  # fmt: skip
        _draw_limits(axes, target_ms, memory_gib)
        for name, (gib, ms) in marks.items():
            axes.plot([gib], [ms], "o", markersize=9, markerfacecolor="none", color="black")
            axes.annotate(name, (gib, ms), (6, 8), textcoords="offset points")
        axes.set(xlabel="GPU memory (GiB)", ylabel="time per output token (ms)", title=title)
        axes.set_ylim(bottom=0)
        axes.legend(loc="upper right", bbox_to_anchor=(0.95, 1.0))
    return figure


def _draw_limits(axes: Axes, target_ms: float, memory_gib: float) -> None:
    look = {"color": "black", "linewidth": 0.8, "linestyle": "--", "marker": ""}
    axes.axhline(target_ms, **look)
    axes.annotate("target", (0.0, target_ms), (3, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points")  # fmt: skip
    axes.axvline(memory_gib, **look)
    axes.annotate("memory", (memory_gib, 1.0), (-3, -3), xycoords=("data", "axes fraction"),
                  textcoords="offset points", ha="right", va="top", rotation=90)  # fmt: skip
