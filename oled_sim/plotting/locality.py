"""Figures of the locality of traces (figures 4, 7 and 10 of the paper, reuse, popularity).

Every function takes tables of :func:`oled_sim.analysis.side_by_side`, so with the columns
``trace`` and ``origin``, and returns one figure with one line, or one row of panels, per trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis, YAxis
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from oled_sim.analysis.paper import CLAIMS
from oled_sim.analysis.tally import pooled
from oled_sim.plotting.style import by_trace, page_figure, styled

STATES = {
    "masked": "still masked",
    "accepted": "just accepted",
    "decoded": "decoded",
    "edited": "just edited",
}

_REFERENCE: dict[str, Any] = {
    "color": "0.45", "linewidth": 0.8, "linestyle": (0, (4, 2)), "marker": "none",
}  # fmt: skip
_CLAIMS = {claim.key: claim for claim in CLAIMS}


def draw_all(tables: dict[str, pd.DataFrame]) -> dict[str, Figure]:
    """Return every figure that the tables allow, by name; without confidence not that one."""
    draw: dict[str, Callable[[], Figure]] = {
        "footprint": lambda: footprint_figure(tables["block_footprint"], tables["footprint"]),
        "locality": lambda: locality_figure(tables["locality"]),
        "activation": lambda: activation_figure(tables["activation_ratio"]),
        "reuse": lambda: reuse_figure(tables["reuse_distance"], tables["lru_hits"]),
        "popularity": lambda: popularity_figure(tables["popularity"]),
    }
    if len(tables.get("confidence_bins", ())):
        draw["confidence"] = lambda: confidence_figure(
            tables["confidence_bins"], tables["confidence_joint"]
        )
    return {name: function() for name, function in draw.items()}


def footprint_figure(blocks: pd.DataFrame, passes: pd.DataFrame) -> Figure:
    """Draw activated experts and expert FLOPs against one token (figure 4).

    Left: the first b tokens of a block (``block_footprint``), means over layers. Right: whole
    passes of every kind by their tokens (``footprint``).
    """
    with styled():
        figure = page_figure()
        left, right = figure.subplots(1, 2)
        _draw_blocks(left, blocks)
        for label, rows in by_trace(passes):
            means = pooled(rows, ["tokens"], "footprint_ratio", "events")
            right.plot(means["tokens"], means["footprint_ratio"], linestyle="none", label=label)
        for axis in (left.xaxis, left.yaxis, right.xaxis):
            _log_scale(axis, base=2)
        left.set(xlabel="block length b (tokens)", ylabel="against one token (×)")
        right.set(xlabel="tokens of the pass", ylabel="activated experts / k (×)")
        right.set_ylim(bottom=0)
        left.legend()
    return figure


def _draw_blocks(axes: Axes, blocks: pd.DataFrame) -> None:
    for label, rows in by_trace(blocks):
        means = pooled(rows, ["block_length"], "footprint_ratio", "events")
        axes.plot(means["block_length"], means["footprint_ratio"], label=label)
    lengths = np.sort(blocks["block_length"].unique())
    axes.plot(lengths, lengths, **_REFERENCE, label="expert FLOPs (every trace)")
    axes.plot(
        16, _CLAIMS["footprint_ratio"].mini.low, linestyle="none", marker="*", color="k",
        markersize=8, label="paper, ≈8×",
    )  # fmt: skip


def locality_figure(locality: pd.DataFrame) -> Figure:
    """Draw cosine and expert-set overlap by iteration gap (figure 7), means over layers.

    Left: hidden-state cosine within blocks. Middle: overlap across block boundaries. Right:
    overlap within blocks. Grey: the paper's numbers for adjacent passes.
    """
    with styled():
        figure = page_figure()
        panels = figure.subplots(1, 3)
        _draw_gaps(panels[0], locality, "within", "cosine", "cosine_pairs")
        _draw_gaps(panels[1], locality, "across", "overlap", "pairs")
        _draw_gaps(panels[2], locality, "within", "overlap", "pairs")
        titles = ("within blocks", "across a block boundary", "within blocks")
        keys = ("cosine", "overlap_across", "overlap_within")
        for axes, title, key in zip(panels, titles, keys, strict=True):
            axes.set(title=title, xlabel="iteration gap (passes)", xlim=(0.5, 8.5))
            axes.set_xticks(range(1, 9))
            _mark_paper(axes, key)
        panels[0].set_ylabel("hidden-state cosine")
        panels[0].set_ylim(top=1.005)
        for axes in panels[1:]:
            axes.set_ylabel("expert set kept (%)")
            _percent(axes.yaxis)
            axes.set_ylim(0, 1.02)
        for axes in panels[:2]:
            axes.legend(handles=axes.collections[-1:])  # the paper's mark
        panels[2].legend(loc="lower left")
    return figure


def _draw_gaps(axes: Axes, locality: pd.DataFrame, span: str, value: str, weight: str) -> None:
    drawn = False
    for label, rows in by_trace(locality):
        means = pooled(rows[rows["span"] == span], ["gap"], value, weight)
        axes.plot(means["gap"], means[value], label=label)
        drawn |= len(means) > 0
    if not drawn:
        axes.text(0.5, 0.5, "not recorded", ha="center", transform=axes.transAxes)


def _mark_paper(axes: Axes, key: str) -> None:
    """Mark what the paper prints for adjacent passes, where the axis reads gap 1."""
    printed = _CLAIMS[key].mini  # of both models
    high = printed.high if printed.high < 1 else printed.low
    axes.fill_between(
        [0.7, 1.3], printed.low, high, facecolor="0.8", edgecolor="0.45", linewidth=1, zorder=0,
        label=f"paper, {printed.text}",
    )  # fmt: skip


def activation_figure(activation: pd.DataFrame) -> Figure:
    """Draw the share of its experts that each layer activates in a denoise pass (figure 10c).

    Line: mean. Band: 5th to 95th percentile of the passes.
    """
    with styled():
        figure = page_figure()
        draw_activation(figure.subplots(), activation)
    return figure


def draw_activation(axes: Axes, activation: pd.DataFrame) -> None:
    """Draw :func:`activation_figure` into axes."""
    for label, rows in by_trace(activation[activation["kind"] == "denoise"]):
        experts = rows["activated"] / rows["activation_ratio"]
        line = axes.plot(rows["layer"], rows["activation_ratio"], label=label)[0]
        low, high = rows["activated_p05"] / experts, rows["activated_p95"] / experts
        axes.fill_between(rows["layer"], low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    claim = _CLAIMS["activation_ratio"]
    for printed, model in ((claim.mini, "mini"), (claim.flash, "flash")):
        assert printed is not None
        level = printed.low
        axes.axhline(level, **_REFERENCE)
        axes.annotate(
            f"paper, {model}", (1, level), (2, 0), xycoords=("axes fraction", "data"),
            textcoords="offset points", fontsize=6, color="0.3", va="center",
        )  # fmt: skip
    axes.set(xlabel="MoE layer (the model's own index)", ylabel="activated experts |A| / E (%)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _percent(axes.yaxis)
    axes.set_ylim(bottom=0)
    axes.legend()


def confidence_figure(bins: pd.DataFrame, joint: pd.DataFrame) -> Figure:
    """Draw confidence against route stability, one row of panels per trace (figure 10a and 10b).

    Left: mean kept share by confidence and token state; the area of a dot grows with the number of
    transitions. Right: how kept shares are distributed at each confidence, all states together.
    """
    with styled():
        figure = page_figure(0.3 + 2.3 * len(list(by_trace(bins))))
        draw_confidence(figure, bins, joint)
    return figure


def draw_confidence(part: Figure | SubFigure, bins: pd.DataFrame, joint: pd.DataFrame) -> None:
    """Draw :func:`confidence_figure` into a figure or a part of one."""
    traces = list(by_trace(bins))
    cells = dict(by_trace(joint))
    panels = part.subplots(len(traces), 2, squeeze=False)
    for (left, right), (label, rows) in zip(panels, traces, strict=True):
        _draw_states(left, rows)
        _draw_joint(part, right, cells[label])
        left.set(title=label, ylabel="experts of a token kept (%)", xlim=(0, 1), ylim=(0, 1.05))
        right.set(title="all tokens", ylabel="experts of a token kept (%)")
        for axes in (left, right):
            _percent(axes.yaxis)
    for axes in panels[-1]:
        axes.set_xlabel("confidence after the earlier pass")
    panels[0][0].legend(loc="best")


def _draw_states(axes: Axes, bins: pd.DataFrame) -> None:
    largest = bins["transitions"].max()
    for state, label in STATES.items():
        rows = bins[bins["state"] == state]
        if rows.empty:
            continue
        middle = (rows["confidence_low"] + rows["confidence_high"]) / 2
        line = axes.plot(middle, rows["kept"], markersize=2, label=label)[0]
        area = 60 * rows["transitions"] / largest
        axes.scatter(middle, rows["kept"], s=area, color=line.get_color(), alpha=0.35, linewidths=0)


def _draw_joint(figure: Figure | SubFigure, axes: Axes, joint: pd.DataFrame) -> None:
    cells = joint[joint["state"] == "all"]
    bins = round(1 / (cells["confidence_high"] - cells["confidence_low"]).iloc[0])
    counts = np.zeros((bins, bins))
    column = (cells["confidence_low"] * bins).round().astype(int)
    row = (cells["kept_low"] * bins).round().astype(int)
    counts[row, column] = cells["transitions"]
    total = counts.sum(axis=0)
    share = np.ma.masked_invalid(np.divide(counts, np.where(total > 0, total, np.nan)))
    edges = np.linspace(0, 1, bins + 1)
    mesh = axes.pcolormesh(edges, edges, share, vmin=0, rasterized=True)
    axes.grid(False)
    bar = figure.colorbar(mesh, ax=axes)
    _percent(bar.ax.yaxis)
    bar.set_label("tokens of that confidence (%)")


def reuse_figure(distances: pd.DataFrame, hits: pd.DataFrame) -> Figure:
    """Draw when experts are used again, and what LRU makes of it; decode passes, all layers.

    Left: activations whose expert was used at most d events of the layer ago. Right: hit rate of a
    set-valued LRU with C slots per layer.
    """
    with styled():
        figure = page_figure()
        left, right = figure.subplots(1, 2)
        for label, rows in by_trace(_decode(distances)):
            share = _cumulative(rows)
            left.plot(
                share.index, share.to_numpy(), drawstyle="steps-post", marker="none", label=label
            )
        for label, rows in by_trace(_decode(hits)):
            totals = rows.groupby("capacity")[["hits", "activations"]].sum()
            rate = totals["hits"] / totals["activations"]
            right.plot(totals.index, rate, marker="none", label=label)
        _log_scale(left.xaxis, base=2)
        left.set(xlabel="reuse distance d (events of the layer)", ylabel="activations (%)")
        right.set(xlabel="cache size C (experts per layer)", ylabel="LRU hit rate (%)")
        right.set_xlim(left=0)
        for axes in (left, right):
            _percent(axes.yaxis)
            axes.set_ylim(0, 1.02)
        right.legend(loc="lower right")
    return figure


def _decode(table: pd.DataFrame) -> pd.DataFrame:
    return table[table["phase"] == "decode"]


def _cumulative(distances: pd.DataFrame) -> pd.Series:
    """Return the share of activations by event distance at most d; first touches never come."""
    rows = distances[distances["measure"] == "events"]
    known = rows[rows["distance"].notna()]
    counts = known.groupby(known["distance"].astype(int))["activations"].sum().sort_index()
    return counts.cumsum() / rows["activations"].sum()


def popularity_figure(popularity: pd.DataFrame) -> Figure:
    """Draw the share of tokens on the most popular experts, mean over layers."""
    with styled():
        figure = page_figure()
        axes = figure.subplots()
        tokens = popularity[popularity["weight"] == "tokens"]
        for label, rows in by_trace(tokens):
            means = rows.groupby("top_percent")["share"].mean()
            axes.plot(means.index, means.to_numpy(), label=label)
        percent = np.sort(tokens["top_percent"].unique())
        axes.plot(percent, percent / 100, **_REFERENCE, label="all experts alike")
        _log_scale(axes.xaxis, base=10)
        axes.set(xlabel="most popular experts of a layer (%)", ylabel="tokens routed to them (%)")
        axes.set_xticks(percent, [str(p) for p in percent])
        axes.minorticks_off()
        _percent(axes.yaxis)
        axes.set_ylim(0, 1.02)
        axes.legend()
    return figure


def _log_scale(axis: XAxis | YAxis, base: int) -> None:
    scale = axis.axes.set_xscale if isinstance(axis, XAxis) else axis.axes.set_yscale
    scale("log", base=base)
    axis.set_major_formatter("{x:g}")


def _percent(axis: Axis) -> None:
    """Write shares as percent; the unit stands in the label."""
    axis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
