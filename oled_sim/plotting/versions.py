"""LLaDA2.0 beside 2.1, and what deciding costs (figure 18)."""

from __future__ import annotations

from collections.abc import Sequence

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

    (a): means over requests and data sets, whiskers over data sets. (b): measured, a row per folder
    of replays, means over data sets; left absolute, right over the time of the pass.
    """
    versions, overhead = (rows[rows["part"] == part] for part in ("version", "overhead"))
    with styled():
        found = list(settings(versions))
        replays = list(overhead.groupby("folder", sort=False)) if len(overhead) else []
        lower = 2.0 * len(replays)
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
            _draw_overheads(bottom[0], replays)
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


def _draw_overheads(part: SubFigure, replays: Sequence[tuple[object, pd.DataFrame]]) -> None:
    panels = part.subplots(len(replays), 3, squeeze=False, width_ratios=[1, 1, 0.55])
    for (left, right, key), (folder, rows) in zip(panels, replays, strict=True):
        _draw_overhead(left, right, rows)
        layers = "/".join(f"{n:.0f}" for n in rows["layers"].unique())
        left.set_title(f"(b) measured, {layers} layers, {folder}")
        key.set_axis_off()
        handles, labels = left.get_legend_handles_labels()
        key.legend(handles, labels, loc="center left")


def _draw_overhead(left: Axes, right: Axes, rows: pd.DataFrame) -> None:
    for policy, inside in rows.groupby("policy", sort=False):
        of_cache = inside.groupby("cache")
        left.plot(of_cache["decide_us"].mean() / 1e3, label=policy_name(str(policy)))
        right.plot(of_cache["share"].mean() * 100, label=policy_name(str(policy)))
    left.axhspan(3.69, 6.03, color="0.85", zorder=0, label="paper, OLED")
    right.axhspan(0.59, 4.53, color="0.85", zorder=0)
    left.set_ylabel("deciding (ms per pass)")
    right.set_ylabel("deciding / pass (%)")
    for axes in (left, right):
        axes.set(xlabel="cache (experts per layer)", yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.minorticks_off()
