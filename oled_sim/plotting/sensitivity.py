"""What OLED is sensitive to: batch size, block length, cache capacity, link (figures 16, 17)."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oled_sim.plotting.captions import provenance
from oled_sim.plotting.lines import draw_line, log_ticks, means_by, settings
from oled_sim.plotting.style import page_figure, styled

TPOT = "TPOT (ms)"


def draw_fig16(rows: pd.DataFrame) -> Figure:
    """Draw figure 16: a row of panels per setting for batch sizes, then one for block lengths.

    Args:
        rows: per run and request, as the experiment writes them; ``part`` is ``batch`` or
            ``block``.

    Lines are means over requests, then over data sets, which the bands span. TPOT in a batch is
    that of a request; dotted, the batch's time over all its tokens. Circles mark the least TPOT
    with each cache.
    """
    batches, blocks = (list(settings(rows[rows["part"] == part])) for part in ("batch", "block"))
    with styled():
        heights = [len(batches), (len(blocks) + 1) // 2]
        figure = page_figure(2.1 * sum(heights))
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
        panels = top.subplots(len(batches), 3, squeeze=False)
        for row, (title, inside) in zip(panels, batches, strict=True):
            _draw_batches(row, inside)
            row[0].set_title(f"(a) {title}")
        cells = bottom.subplots((len(blocks) + 1) // 2, min(2, len(blocks)), squeeze=False).ravel()
        for axes, (title, inside) in zip(cells, blocks, strict=False):
            _draw_blocks(axes, inside)
            axes.set_title(f"(b) {title}")
        for axes in cells[len(blocks) :]:
            axes.set_axis_off()
        figure.supxlabel(provenance(rows), fontsize=6)
    return figure


def _draw_batches(panels: list[Axes], rows: pd.DataFrame) -> None:
    decode_events = rows["passes"] * rows["layers"]
    rows = rows.assign(activation=rows["activations"] / decode_events / rows["experts"])
    tpot, activation, utilization = panels
    for cache, inside in rows.groupby("cache"):
        line = draw_line(tpot, inside, "batch", "tpot_us", f"C = {cache}", 1e-3)
        together = means_by(inside, "batch", "batch_tpot_us")["mean"] * 1e-3
        tpot.plot(together.index, together, ":", color=line.get_color(), marker="")
        draw_line(activation, inside, "batch", "activation", f"C = {cache}")
        draw_line(utilization, inside, "batch", "utilization", f"C = {cache}")
    tpot.set_ylabel(TPOT)
    tpot.set_ylim(bottom=0)
    activation.set_ylabel("activated |A| / E (%)")
    utilization.set_ylabel("cache utilization (%)")
    for axes in panels:
        log_ticks(axes, rows, "batch")
        axes.set_xlabel("batch size (requests)")
    for axes in (activation, utilization):
        _shares(axes.yaxis)
        axes.set_ylim(0, 1.02)
    tpot.legend()


def _draw_blocks(axes: Axes, rows: pd.DataFrame) -> None:
    for cache, inside in rows.groupby("cache"):
        means = means_by(inside, "block_length", "tpot_us")["mean"] * 1e-3
        (line,) = axes.plot(means.index, means, label=f"C = {cache}", markersize=2)
        axes.plot(
            means.idxmin(), means.min(), "o", color=line.get_color(), markersize=7,
            fillstyle="none",
        )  # fmt: skip
    log_ticks(axes, rows, "block_length")
    axes.set(xlabel="block length (tokens)", ylabel=TPOT)
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2, fontsize=5.5)


def draw_fig17(rows: pd.DataFrame) -> Figure:
    """Draw figure 17: TPOT against the cache (left) and against the link (right) per setting.

    Args:
        rows: per run and request; ``part`` is ``capacity`` or ``link``.

    Grey, left: full residency. Lines are means over requests, then over data sets, which the bands
    span.
    """
    found = list(settings(rows))
    with styled():
        figure = page_figure(2.1 * len(found))
        panels = figure.subplots(len(found), 2, squeeze=False)
        for (left, right), (title, inside) in zip(panels, found, strict=True):
            _draw_capacities(left, inside[inside["part"] == "capacity"])
            _draw_links(right, inside[inside["part"] == "link"])
            left.set_title(title)
        figure.supxlabel(provenance(rows), fontsize=6)
    return figure


def _draw_capacities(axes: Axes, rows: pd.DataFrame) -> None:
    draw_line(axes, rows, "cache", "tpot_us", "OLED", 1e-3)
    means = means_by(rows, "cache", "tpot_us")["mean"] * 1e-3
    axes.axhline(
        means.iloc[-1], color="0.45", linewidth=0.8, linestyle=(0, (4, 2)), label="full residency"
    )
    if 100 in means.index:
        more = means[100] / means.iloc[-1] - 1
        axes.annotate(
            f"C = 100: {more:+.0%}", (100, means[100]), (3, 4), textcoords="offset points",
            fontsize=6,
        )  # fmt: skip
    axes.set(xlabel="cache (experts per layer)", ylabel=TPOT)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.legend()


def _draw_links(axes: Axes, rows: pd.DataFrame) -> None:
    for cache, inside in rows.groupby("cache"):
        draw_line(axes, inside, "link_gb_s", "tpot_us", f"C = {cache}", 1e-3)
    log_ticks(axes, rows, "link_gb_s")
    axes.set(xlabel="host-to-GPU link (GB/s)", ylabel=TPOT)
    axes.set_ylim(bottom=0)
    axes.legend()


def _shares(axis: Axis) -> None:
    axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
