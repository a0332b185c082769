"""What each component of OLED adds, and each beside an alternative (figure 15)."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from oled_sim.experiment.relative import SETTING, relative
from oled_sim.plotting.bars import draw_bars, percent_axis
from oled_sim.plotting.captions import policy_name
from oled_sim.plotting.pages import Page
from oled_sim.plotting.style import styled

ABLATION = ("lru", "oled:priority", "oled:priority+adapt", "oled")
"""Naive-LRU, then one component more each."""

STEPS = {
    "lru": "Naive-LRU", "oled:priority": "+Priority", "oled:priority+adapt": "+LayerAdapt",
    "oled": "+Coop",
}  # fmt: skip


class Component(NamedTuple):
    """A component beside its alternatives. ``part``, ``whole``: summed and divided, or a mean."""

    title: str
    label: str
    policies: tuple[str, ...]
    part: str
    whole: str | None = None


COMPONENTS = (
    Component("Priority", "utilization (%)", ("oled:priority", "lru", "lfu"), "utilization"),
    Component(
        "LayerAdapt", "utilization (%)",
        ("oled:priority+adapt", "oled:priority", "oled", "oled:allocate=uniform"), "utilization",
    ),
    Component(
        "Coop", "effective transfers (%)", ("oled", "oled:dispatch=load"), "reused", "followed"
    ),
)  # fmt: skip
"""The paper's three; LayerAdapt against uniform allocation with Priority alone, and in OLED."""

STEP_CACHES = (40, 100)
"""The paper's capacities of the ablation."""


def draw_ablation(table: pd.DataFrame) -> Figure:
    """Draw TPOT step by step (left) and the components over capacities; a row per setting.

    TPOT is relative to Naive-LRU's, with 95 % bootstrap intervals over requests, which are pooled
    over data sets.

    Args:
        table: of ``fig15``: a row per profile, trace, cache, policy and request.
    """
    with styled():
        page = Page(table, 1 + len(COMPONENTS), height=2.3)
        for _, rows, (first, *others) in page.rows():
            _draw_steps(first, rows)
            page.legend(first)
            for axes, component in zip(others, COMPONENTS, strict=True):
                _draw_component(axes, rows, component)
    return page.figure


def _draw_steps(axes: Axes, rows: pd.DataFrame) -> None:
    steps = rows[rows["policy"].isin(ABLATION) & rows["cache"].isin(STEP_CACHES)]
    ratios = relative(steps, ABLATION[0], [*SETTING, "cache"])
    labelled = ratios.assign(group=[f"C = {c}" for c in ratios["cache"]])
    ratio, low, high = (
        labelled.pivot(index="group", columns="policy", values=v)
        .loc[list(dict.fromkeys(labelled["group"])), list(ABLATION)]
        .rename(columns=STEPS)
        for v in ("ratio", "low", "high")
    )
    draw_bars(axes, ratio, (low, high))
    axes.set(ylabel="TPOT / Naive-LRU's (×)", title="components added")


def _draw_component(axes: Axes, rows: pd.DataFrame, component: Component) -> None:
    for policy in component.policies:
        points = rows[rows["policy"] == policy].groupby("cache")
        if component.whole is None:
            values = points[component.part].mean()
        else:
            values = points[component.part].sum() / points[component.whole].sum()
        axes.plot(values.index, values.to_numpy(), label=policy_name(policy))
    axes.set(title=component.title, xlabel="cache (experts per layer)", ylabel=component.label)
    axes.legend(fontsize=5, handlelength=2)
    percent_axis(axes, limit=False)
