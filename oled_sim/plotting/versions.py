"""LLaDA2.0 beside 2.1, and what deciding costs (figure 18)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from oled_sim.plotting.captions import policy_name, provenance
from oled_sim.plotting.lines import settings
from oled_sim.plotting.style import page_figure, styled

HATCHES = ("", "////")


def draw_fig18(rows: pd.DataFrame) -> Figure:
    """Draw figure 18: (a) TPOT of both versions per setting, (b) time to decide per forward pass.

    Args:
        rows: ``part`` is ``version`` (per run and request) or ``overhead`` (per replayed point).

    (a): means over requests and data sets, whiskers over data sets. (b): measured, a dot per
    replayed data set; left absolute, right over the time of the pass.
    """
    versions, overhead = (rows[rows["part"] == part] for part in ("version", "overhead"))
    with styled():
        found = list(settings(versions))
        lower = 2.3 if len(overhead) else 0
        upper = 2.1 * ((len(found) + 1) // 2)
        figure = page_figure(upper + lower)
        top, *bottom = figure.subfigures(
            2 if lower else 1, 1, squeeze=False, height_ratios=[upper, lower] if lower else None
        )[:, 0]
        cells = top.subplots((len(found) + 1) // 2, min(2, len(found)), squeeze=False).ravel()
        for axes, (title, inside) in zip(cells, found, strict=False):
            _draw_versions(axes, inside)
            axes.set_title(f"(a) {title}")
        for axes in cells[len(found) :]:
            axes.set_axis_off()
        if bottom:
            _draw_overhead(bottom[0], overhead)
        figure.supxlabel(provenance(versions), fontsize=6)
    return figure


def _draw_versions(axes: Axes, rows: pd.DataFrame) -> None:
    colours = rcParams["axes.prop_cycle"].by_key()["color"]
    caches = sorted(rows["cache"].unique())
    versions = rows.groupby("version", sort=True)
    for i, (version, inside) in enumerate(versions):
        by_trace = inside.groupby(["cache", "trace"])["tpot_us"].mean().groupby(level=0)
        means, low, high = by_trace.mean() / 1e3, by_trace.min() / 1e3, by_trace.max() / 1e3
        at = np.arange(len(caches)) + (i - 0.5) * 0.4
        axes.bar(
            at, means[caches], 0.36, label=str(version), color=colours[i], hatch=HATCHES[i],
            edgecolor="white", linewidth=0.3,
        )  # fmt: skip
        axes.errorbar(
            at, means[caches], [(means - low)[caches], (high - means)[caches]], fmt="none",
            ecolor="0.2", linewidth=0.7,
        )  # fmt: skip
    axes.set_xticks(range(len(caches)), [f"C = {cache}" for cache in caches])
    axes.set_ylabel("TPOT (ms)")
    axes.grid(axis="x", visible=False)
    axes.legend()


def _draw_overhead(part: SubFigure, rows: pd.DataFrame) -> None:
    left, right, key = part.subplots(1, 3, width_ratios=[1, 1, 0.55])
    for policy, inside in rows.groupby("policy", sort=False):
        of_cache = inside.groupby("cache")
        left.plot(of_cache["decide_us"].mean() / 1e3, label=policy_name(str(policy)))
        right.plot(of_cache["share"].mean() * 100, label=policy_name(str(policy)))
    left.axhspan(3.69, 6.03, color="0.85", zorder=0, label="paper, OLED")
    right.axhspan(0.59, 4.53, color="0.85", zorder=0)
    left.set(ylabel="deciding (ms per forward pass)", title="(b) measured on hardware")
    right.set(ylabel="deciding / forward pass (%)")
    for axes in (left, right):
        axes.set(xlabel="cache (experts per layer)", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
    key.set_axis_off()
    handles, labels = left.get_legend_handles_labels()
    key.legend(handles, labels, loc="center left")
