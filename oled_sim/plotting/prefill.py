"""What the time to first token is made of (figure 14)."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from oled_sim.plotting.captions import policy_name, provenance
from oled_sim.plotting.lines import draw_line, log_ticks, settings
from oled_sim.plotting.style import page_figure, styled

PARTS = {
    "ttft_h2d_us": ("copies (H2D)", ""),
    "ttft_gpu_experts_us": ("experts on the GPU", "////"),
    "ttft_cpu_us": ("experts on the CPU", "...."),
    "ttft_dense_us": ("dense", "xxxx"),
    "ttft_rest_us": ("rest", "\\\\\\\\"),
}
"""Columns that add up to the time to first token: their names, and hatches for print."""

LETTERS = {"oled": "O", "finemoe": "F", "full": "R"}
"""What stands over the bars of a policy."""


def draw_prefill(rows: pd.DataFrame) -> Figure:
    """Draw figure 14, a row of panels per setting.

    Args:
        rows: per policy, ``prompt_tokens`` and request: the parts of the time to first token, µs,
            ``ttft_utilization`` and ``ttft_activation_ratio``.

    Left: a bar per policy, with its letter. Right: share of slots that prefill uses, and of a
    layer's experts that it activates (dotted, the same for all).
    """
    found = list(settings(rows))
    with styled():
        figure = page_figure(0.5 + 2.1 * len(found))
        panels = figure.subplots(len(found), 2, squeeze=False, width_ratios=[2, 1])
        for (left, right), (title, inside) in zip(panels, found, strict=True):
            _draw_parts(left, inside)
            _draw_use(right, inside)
            left.set_title(title)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        figure.supxlabel(provenance(rows), fontsize=6)
    return figure


def _draw_parts(axes: Axes, rows: pd.DataFrame) -> None:
    colours = rcParams["axes.prop_cycle"].by_key()["color"]
    policies = [str(policy) for policy in dict.fromkeys(rows["policy"])]
    means = rows.groupby(["policy", "prompt_tokens"])[list(PARTS)].mean() * 1e-3
    prompts = sorted(rows["prompt_tokens"].unique())
    width = 0.8 / len(policies)
    for i, policy in enumerate(policies):
        at = np.arange(len(prompts)) + (i - (len(policies) - 1) / 2) * width
        bottom = np.zeros(len(prompts))
        for colour, (part, (name, hatch)) in zip(colours, PARTS.items(), strict=False):
            height = means.loc[policy].loc[prompts, part].to_numpy()
            axes.bar(
                at, height, 0.92 * width, bottom, label=name if i == 0 else None, color=colour,
                hatch=hatch, edgecolor="white", linewidth=0.3,
            )  # fmt: skip
            bottom += height
        for x, top in zip(at, bottom, strict=True):
            axes.annotate(
                LETTERS.get(policy, policy), (x, top), (0, 1), textcoords="offset points",
                ha="center", fontsize=6,
            )  # fmt: skip
    axes.set_xticks(range(len(prompts)), [f"{p:,}" for p in prompts])
    axes.set(xlabel="prompt (tokens)", ylabel="time to first token (ms)")
    axes.grid(axis="x", visible=False)


def _draw_use(axes: Axes, rows: pd.DataFrame) -> None:
    for policy, inside in rows.groupby("policy", sort=False):
        name = policy_name(str(policy))
        draw_line(
            axes,
            inside,
            "prompt_tokens",
            "ttft_utilization",
            f"{LETTERS.get(str(policy), '?')}: {name}",
        )
    means = rows.groupby("prompt_tokens")["ttft_activation_ratio"].mean()
    axes.plot(means.index, means, ":", color="0.3", marker="", label="activated |A| / E")
    log_ticks(axes, rows, "prompt_tokens")
    axes.set(xlabel="prompt (tokens)", ylabel="slots used at the gate (%)", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
    axes.legend(loc="lower right")
