"""Systems side by side: TPOT and expert cache utilization (figures 5 and 12)."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from oled_sim.experiment.relative import SETTING, relative
from oled_sim.plotting.bars import draw_bars, percent_axis, spread
from oled_sim.plotting.pages import Page
from oled_sim.plotting.style import styled

REFERENCE = "ideal"


def draw_overall(table: pd.DataFrame) -> Figure:
    """Draw TPOT (left) and utilization (right) per data set and cache, a row per setting.

    Bars are means over requests, whiskers span the requests.

    Args:
        table: of ``fig12``: a row per profile, trace, cache, policy and request.
    """
    with styled():
        page = Page(table, 2)
        for _, rows, (left, right) in page.rows():
            times = rows.assign(tpot_ms=rows["tpot_us"] / 1000)
            groups = ("data_set", "cache")
            for axes, quantity in ((left, "tpot_ms"), (right, "utilization")):
                mean, low, high = spread(times, quantity, groups, lambda d, c: f"{d}\nC = {c}")
                draw_bars(axes, mean, (low, high))
            left.set_ylabel("TPOT (ms)")
            right.set_ylabel("expert cache utilization (%)")
            percent_axis(right)
            page.legend(left)
    return page.figure


def draw_against(table: pd.DataFrame) -> Figure:
    """Draw TPOT relative to the ideal bound, and utilization, per cache; a row per setting.

    Requests of all data sets of a setting are pooled. Whiskers: 95 % bootstrap interval of the
    ratio, the requests' range of utilization.

    Args:
        table: of ``fig05``: a row per profile, trace, cache, policy and request.
    """
    ratios = relative(table, REFERENCE, [*SETTING, "cache"])
    with styled():
        page = Page(table, 2)
        for setting, rows, (left, right) in page.rows():
            inside = ratios[(ratios[list(SETTING)] == list(setting)).all(axis=1)]
            wide = inside.assign(group=[f"C = {c}" for c in inside["cache"]])
            shape = {"index": "group", "columns": "policy"}
            ratio, low, high = (wide.pivot(values=v, **shape) for v in ("ratio", "low", "high"))
            mean, least, most = spread(rows, "utilization", ("cache",), lambda c: f"C = {c}")
            at = (mean.index, mean.columns)
            draw_bars(left, ratio.loc[at], (low.loc[at], high.loc[at]))
            draw_bars(right, mean, (least, most))
            left.axhline(1.0, color="black", linewidth=0.8)
            left.set_ylabel("TPOT / TPOT of ideal (×)")
            right.set_ylabel("expert cache utilization (%)")
            percent_axis(right)
            page.legend(left)
    return page.figure
