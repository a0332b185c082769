"""Figures of simulated runs, from the table that ``oled-sim run --out`` writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oled_sim.plotting.style import page_figure, styled

if TYPE_CHECKING:
    import pandas as pd


def draw_capacity(results: pd.DataFrame, title: str = "") -> Figure:
    """Draw time per output token and cache utilization against the cache size, per policy.

    Args:
        results: rows per policy, ``cache`` and request with ``tpot_us`` and ``utilization``, as
            written by ``oled-sim run --out``.
        title: what the results are of.

    Returns:
        Two panels; points are means over requests.
    """
    with styled():
        figure = page_figure(2.8)
        left, right = figure.subplots(1, 2)
        for policy, rows in results.groupby("policy", sort=False):
            by_cache = rows.groupby("cache")
            tpot_ms = by_cache["tpot_us"].mean() / 1000
            left.plot(tpot_ms.index, tpot_ms, label=str(policy))
            utilization = by_cache["utilization"].mean()
            right.plot(utilization.index, utilization, label=str(policy))
        _finish(left, "time per output token (ms)")
        _finish(right, "cache utilization")
        right.yaxis.set_major_formatter(PercentFormatter(1.0))
        left.legend()
        figure.suptitle(title)
    return figure


def _finish(axes: Axes, quantity: str) -> None:
    axes.set(xlabel="cache (experts per layer)", ylabel=quantity)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
