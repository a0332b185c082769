"""The four failure patterns of offloading under block diffusion (figure 6)."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from oled_sim.experiment.relative import SETTING
from oled_sim.plotting.bars import draw_bars, percent_axis
from oled_sim.plotting.pages import Page
from oled_sim.plotting.style import styled

RESIDENT = "full"
"""The policy that never waits for an expert: what passes take without any failure."""


class Pattern(NamedTuple):
    """A panel. ``part``, ``whole``: columns that are summed over requests and divided."""

    title: str
    unit: str
    part: str
    whole: str


PATTERNS = (
    Pattern("(a) transfers", "exposed of decode time (%)", "exposed_transfer_us", "decode_us"),
    Pattern("(b) CPU experts", "exposed of decode time (%)", "cpu_critical_us", "decode_us"),
    Pattern("(c) evicted just before", "of misses (%)", "evicted_reused", "next_misses"),
    Pattern("(d) needed next pass", "of CPU experts (%)", "cpu_reused", "cpu_followed"),
)


def draw_failures(table: pd.DataFrame) -> Figure:
    """Draw the four patterns per cache, a row of panels per setting, requests pooled.

    (a): time beyond full residency that passes spend waiting for copies, prefetched or not, and
    computing arrivals by and by; (b): time in which they wait for the CPU; shares of decode time.
    (c): of the experts missing at a gate, those that had been on the GPU in the pass before. (d):
    of the experts computed on the CPU, those that the next pass activates. No bar: the policy does
    nothing that the share is of.

    Args:
        table: of ``fig06``: a row per profile, trace, cache, policy and request, with full
            residency among the policies.
    """
    exposed = with_exposed(table)
    with styled():
        page = Page(exposed, len(PATTERNS))
        for _, rows, panels in page.rows():
            for axes, pattern in zip(panels, PATTERNS, strict=True):
                draw_bars(axes, _shares(rows, pattern))
                axes.set(ylabel=pattern.unit, title=pattern.title)
                percent_axis(axes)
            page.legend(panels[0])
    return page.figure


def with_exposed(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table without full residency, with ``exposed_transfer_us`` (µs) per request.

    That is what the GPU and the copies have of the critical path beyond full residency, at least 0:
    below it GPU work hides behind the CPU's, which the CPU's part of the path then covers. The
    parts of the three lanes sum to the decode time.
    """
    keys = ["profile", "trace", "request"]
    without = table[table["policy"] == RESIDENT].set_index(keys)["decode_us"]
    rest = table[table["policy"] != RESIDENT]
    resident = without.loc[pd.MultiIndex.from_frame(rest[keys])].to_numpy(float)
    lanes = rest["gpu_critical_us"] + rest["h2d_critical_us"]
    return rest.assign(exposed_transfer_us=(lanes - resident).clip(lower=0))


def failure_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the four patterns as numbers: shares from 0 to 1, requests pooled.

    Args:
        table: as :func:`draw_failures`.
    """
    keys = [*SETTING, "cache", "policy"]
    columns = list(dict.fromkeys(c for p in PATTERNS for c in (p.part, p.whole)))
    sums = with_exposed(table).groupby(keys, sort=False)[columns].sum()
    shares = {f"{p.title} {p.unit}": _share(sums, p) for p in PATTERNS}
    return pd.DataFrame(shares).reset_index()


def _shares(rows: pd.DataFrame, pattern: Pattern) -> pd.DataFrame:
    order = list(dict.fromkeys(rows["policy"]))
    sums = rows.groupby(["cache", "policy"], sort=False)[[pattern.part, pattern.whole]].sum()
    wide = _share(sums, pattern).unstack("policy")[order]
    return wide.set_axis([f"C = {cache}" for cache in wide.index])


def _share(sums: pd.DataFrame, pattern: Pattern) -> pd.Series:
    return sums[pattern.part] / sums[pattern.whole].where(sums[pattern.whole] > 0)
