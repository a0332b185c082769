"""Figures 4, 7 and 10 of the paper from the tidy tables of their experiments.

A tidy table holds several tables (column ``table``). Traces of one ``group``, a model on several
data sets, are drawn as one line.
"""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from oled_sim.analysis.tally import pooled
from oled_sim.plotting.captions import provenance
from oled_sim.plotting.locality import (
    draw_activation,
    draw_confidence,
    footprint_figure,
    locality_figure,
)
from oled_sim.plotting.style import page_figure, styled

BIN = ["state", "confidence_low", "confidence_high"]
CELL = [*BIN, "kept_low", "kept_high"]
WHO = ["trace", "origin"]


def draw_fig04(rows: pd.DataFrame) -> Figure:
    """Draw figure 4: experts touched and FLOPs against one token, by block length and by pass."""
    figure = footprint_figure(_table(rows, "block_footprint"), _table(rows, "footprint"))
    return _with_provenance(figure, rows)


def draw_fig07(rows: pd.DataFrame) -> Figure:
    """Draw figure 7: cosine and overlap of expert sets, by the gap between passes."""
    return _with_provenance(locality_figure(_table(rows, "locality")), rows)


def draw_fig10(rows: pd.DataFrame) -> Figure:
    """Draw figure 10: (a), (b) confidence against stability per group, (c) activation by layer."""
    bins = pooled(_table(rows, "confidence_bins"), [*WHO, *BIN], "kept", "transitions")
    bins = _in_order_of(rows, bins)
    cells = _table(rows, "confidence_joint").groupby([*WHO, *CELL], sort=False)
    joint = cells.agg({"transitions": "sum"}).reset_index()
    groups = bins.groupby(WHO).ngroups
    with styled():
        figure = page_figure(0.3 + 2.3 * groups + 2.4)
        heights = [0.3 + 2.3 * groups, 2.4]
        top, bottom = figure.subfigures(2, 1, squeeze=False, height_ratios=heights)[:, 0]
        draw_confidence(top, bins, joint)
        activation = _over_data_sets(_table(rows, "activation_ratio"))
        draw_activation(bottom.subplots(), _in_order_of(rows, activation))
    return _with_provenance(figure, rows)


def _with_provenance(figure: Figure, rows: pd.DataFrame) -> Figure:
    figure.supxlabel(provenance(rows), fontsize=6)
    return figure


def _in_order_of(rows: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with its groups in the order of the tidy table."""
    order = {group: i for i, group in enumerate(dict.fromkeys(rows["group"]))}
    return table.sort_values("trace", key=lambda groups: groups.map(order), kind="stable")


def _table(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return one of the tables, with groups in place of traces and its own columns alone."""
    chosen = rows[rows["table"] == name].dropna(axis="columns", how="all")
    return chosen.assign(trace=chosen["group"])


def _over_data_sets(activation: pd.DataFrame) -> pd.DataFrame:
    """Return means over the traces of a group; its band goes from the lowest to the highest."""
    keys = [*WHO, "kind", "layer"]
    means = pooled(activation, keys, "activated", "events")
    means["activation_ratio"] = pooled(activation, keys, "activation_ratio", "events")[
        "activation_ratio"
    ]
    ends = activation.groupby(keys).agg({"activated_p05": "min", "activated_p95": "max"})
    return means.merge(ends.reset_index(), on=keys)
