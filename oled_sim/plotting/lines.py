"""Lines of means over requests, with bands over data sets."""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from oled_sim.experiment.relative import SETTING
from oled_sim.plotting.captions import setting_name


def settings(rows: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the title and the rows of each setting."""
    for (profile, origin, model), inside in rows.groupby(list(SETTING), sort=False):
        yield setting_name(str(profile), str(origin), str(model)), inside


def means_by(rows: pd.DataFrame, x: str, value: str) -> pd.DataFrame:
    """Return the mean over requests of each trace, then over traces.

    Returns:
        Indexed by ``x``, ascending: ``mean``, and ``low`` and ``high``, the extremes over traces.
    """
    of_trace = rows.groupby([x, "trace"])[value].mean().groupby(level=0)
    return pd.DataFrame({"mean": of_trace.mean(), "low": of_trace.min(), "high": of_trace.max()})


def draw_line(
    axes: Axes, rows: pd.DataFrame, x: str, value: str, label: str, scale: float = 1.0
) -> Line2D:
    """Draw means against ``x``; the band spans the traces, if there are several."""
    found = means_by(rows, x, value) * scale
    (line,) = axes.plot(found.index, found["mean"], label=label)
    axes.fill_between(
        found.index, found["low"], found["high"], color=line.get_color(), alpha=0.15, linewidth=0
    )
    return line


def log_ticks(axes: Axes, rows: pd.DataFrame, x: str) -> None:
    """Put the values of ``x`` on a logarithmic axis."""
    values = sorted(rows[x].unique())
    axes.set_xscale("log", base=2)
    axes.set_xticks(values, [f"{v:g}" for v in values])
    axes.minorticks_off()
