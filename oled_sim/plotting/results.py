"""Figures of simulated runs, from the table that ``oled-sim run --out`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import PercentFormatter

from oled_sim.plotting.style import page_figure, styled

if TYPE_CHECKING:
    import pandas as pd


QUANTITIES = {
    "tpot_us": "time per output token (ms)",
    "utilization": "cache utilization",
    "hit_rate": "hit rate",
}
"""What can be drawn against the cache size, and what the axis says."""


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
        _draw_row(figure, results, ("tpot_us", "utilization"))
        figure.suptitle(title)
    return figure


def draw_sweep(results: pd.DataFrame) -> Figure:
    """Draw a sweep: a row of panels per trace, batch size and link, one line per policy.

    Args:
        results: as :func:`draw_capacity`, with ``trace``, ``batch``, ``link_gb_s``, ``hits`` and
            ``activations`` too.
    """
    runs = list(results.groupby(["trace", "batch", "link_gb_s"], sort=False))
    with styled():
        figure = page_figure(2.8 * len(runs))
        parts = figure.subfigures(len(runs), 1, squeeze=False)[:, 0]
        for part, ((trace, batch, link), rows) in zip(parts, runs, strict=True):
            _draw_row(part, rows, tuple(QUANTITIES))
            part.suptitle(f"{trace}, batch {batch}, link {link:.3g} GB/s")
    return figure


def draw_ratios(rows: pd.DataFrame, reference: str) -> Figure:
    """Draw times per output token relative to a reference against the cache size.

    Args:
        rows: per ``run`` (a panel each), ``policy`` and ``cache`` the ``ratio`` and its interval
            ``low`` to ``high``, NaN where there is none.
        reference: what the others are relative to.
    """
    runs = list(rows.groupby("run", sort=False))
    with styled():
        figure = page_figure(2.8 * len(runs))
        panels = figure.subplots(len(runs), 1, squeeze=False)[:, 0]
        for axes, (run, inside) in zip(panels, runs, strict=True):
            for policy, points in inside.groupby("policy", sort=False):
                below, above = points["ratio"] - points["low"], points["high"] - points["ratio"]
                interval = [below.fillna(0.0), above.fillna(0.0)]
                axes.errorbar(
                    points["cache"], points["ratio"], interval, label=str(policy), capsize=2
                )
            axes.axhline(1.0, color="black", linewidth=0.8)
            _finish(axes, f"TPOT / TPOT of {reference}")
            axes.set_title(str(run))
        panels[0].legend()
    return figure


def draw_curves(curves: pd.DataFrame) -> Figure:
    """Draw the hit rate with every cache size: a panel per trace, a line per policy.

    Args:
        curves: rows per ``trace``, ``policy`` and ``cache`` with ``hit_rate``.
    """
    traces = list(curves.groupby("trace", sort=False))
    with styled():
        figure = page_figure(2.8)
        panels = figure.subplots(1, len(traces), squeeze=False)[0]
        for axes, (trace, rows) in zip(panels, traces, strict=True):
            for policy, points in rows.groupby("policy", sort=False):
                axes.plot(points["cache"], points["hit_rate"], label=str(policy), marker="")
            _finish(axes, QUANTITIES["hit_rate"])
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
            axes.set_title(str(trace))
        panels[0].legend()
    return figure


def _draw_row(figure: Figure | SubFigure, results: pd.DataFrame, quantities: Sequence[str]) -> None:
    panels = dict(zip(quantities, figure.subplots(1, len(quantities)), strict=True))
    for policy, rows in results.groupby("policy", sort=False):
        by_cache = rows.groupby("cache")
        for quantity, axes in panels.items():
            values = _over_requests(by_cache, quantity)
            axes.plot(values.index, values, label=str(policy))
    for quantity, axes in panels.items():
        _finish(axes, QUANTITIES[quantity])
        if quantity != "tpot_us":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    panels[quantities[0]].legend()


def _over_requests(by_cache: Any, quantity: str) -> Any:
    """Return a figure of the run per cache size, from the rows of its requests."""
    if quantity == "hit_rate":
        return by_cache["hits"].sum() / by_cache["activations"].sum()
    return by_cache[quantity].mean() / (1000 if quantity == "tpot_us" else 1)


def _finish(axes: Axes, quantity: str) -> None:
    axes.set(xlabel="cache (experts per layer)", ylabel=quantity)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
