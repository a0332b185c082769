"""Time per output token against GPU memory: what a plan looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oled_sim.plotting.style import page_figure, styled

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pandas as pd

    from oled_sim.planning.answer import Answer


def draw_answer(found: Answer) -> Figure:
    """Draw what a plan looked at, its answer and the knee."""
    import pandas as pd

    marks = {
        name: (row["gpu_bytes"] / 2**30, row["tpot_us"] / 1e3)
        for name, row in (("knee", found.row(found.found.knee)), ("plan", found.row(found.choice)))
        if row is not None
    }
    curve = pd.DataFrame(found.curve)
    shown = pd.DataFrame(
        {
            "policy": curve["policy"],
            "gpu_gib": curve["gpu_bytes"] / 2**30,
            "tpot_ms": curve["tpot_us"] / 1e3,
            "low_ms": curve["low_us"] / 1e3,
            "high_ms": curve["high_us"] / 1e3,
        }
    )
    return draw_plan(
        shown,
        target_ms=found.question.target_us / 1e3,
        memory_gib=found.gpu_memory_bytes / 2**30,
        marks=marks,
        title=found.caption,
    )


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
        axes.legend(loc="upper right", bbox_to_anchor=(0.9, 1.0))
    return figure


def _draw_limits(axes: Axes, target_ms: float, memory_gib: float) -> None:
    look = {"color": "black", "linewidth": 0.8, "linestyle": "--", "marker": ""}
    axes.axhline(target_ms, **look)
    axes.annotate("target", (0.0, target_ms), (3, 3), xycoords=("axes fraction", "data"),
                  textcoords="offset points")  # fmt: skip
    axes.axvline(memory_gib, **look)
    axes.annotate("memory", (memory_gib, 1.0), (-3, -3), xycoords=("data", "axes fraction"),
                  textcoords="offset points", ha="right", va="top", rotation=90)  # fmt: skip
