"""The paper's numbers on locality, beside those of a trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

Tables = dict[str, pd.DataFrame]


@dataclass(frozen=True)
class Claim:
    """A number of the OLED-MoE paper that a trace can be held against.

    Attributes:
        key: name in tables.
        source: figure and section of the paper.
        quantity: what it is.
        paper: what the paper prints, as text.
        low, high: the same as bounds; NaN where it prints no number.
        style: how to print the value: ``times``, ``count``, ``percent`` or ``number``.
        measure: the value of a trace, from its tables; NaN where the trace cannot tell.
    """

    key: str
    source: str
    quantity: str
    paper: str
    low: float
    high: float
    style: str
    measure: Callable[[Tables], float]


def beside_paper(tables: Tables) -> pd.DataFrame:
    """Return the paper's numbers and those of a trace (the tables of ``analyze``).

    Returns:
        One row per claim: ``key``, ``source``, ``quantity``, ``paper``, ``paper_low``,
        ``paper_high``, ``style``, ``value``.
    """
    return pd.DataFrame(
        {
            "key": [c.key for c in CLAIMS],
            "source": [c.source for c in CLAIMS],
            "quantity": [c.quantity for c in CLAIMS],
            "paper": [c.paper for c in CLAIMS],
            "paper_low": [c.low for c in CLAIMS],
            "paper_high": [c.high for c in CLAIMS],
            "style": [c.style for c in CLAIMS],
            "value": [c.measure(tables) for c in CLAIMS],
        }
    )


def _mean(table: pd.DataFrame, value: str, weight: str) -> float:
    known = table[table[value].notna()]
    count = known[weight].sum()
    return float((known[value] * known[weight]).sum() / count) if count else float("nan")


def _denoise(table: str, value: str) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        rows = tables[table]
        return _mean(rows[rows["kind"] == "denoise"], value, "events")

    return measure


def _adjacent(span: str, value: str, weight: str) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        rows = tables["locality"]
        return _mean(rows[(rows["span"] == span) & (rows["gap"] == 1)], value, weight)

    return measure


def _correlation(state: str) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        if "confidence_correlation" not in tables:
            return float("nan")
        rows = tables["confidence_correlation"]
        return float(rows.loc[rows["state"] == state, "correlation"].iloc[0])

    return measure


_NAN = float("nan")
_STRONG = "strong, no number"

CLAIMS = (
    Claim(
        "footprint_ratio", "fig. 4a, §3.1", "activated experts against one token",
        "≈8× (mini, block 16)", 8, 8, "times", _denoise("footprint", "footprint_ratio"),
    ),
    Claim(
        "flops_ratio", "fig. 4b, §3.1", "expert FLOPs against one token",
        "≈16× (mini, block 16)", 16, 16, "times", _denoise("footprint", "flops_ratio"),
    ),
    Claim(
        "cosine", "fig. 7, §3.3", "hidden-state cosine, next pass of the block",
        "up to 98 %", 0.98, 0.98, "percent", _adjacent("within", "cosine", "cosine_pairs"),
    ),
    Claim(
        "overlap_within", "fig. 7, §3.3", "expert set kept by the next pass of the block",
        "85–90 %", 0.85, 0.90, "percent", _adjacent("within", "overlap", "pairs"),
    ),
    Claim(
        "overlap_across", "fig. 7, §3.3", "expert set kept across a block boundary",
        "> 65 %", 0.65, 1, "percent", _adjacent("across", "overlap", "pairs"),
    ),
    Claim(
        "activated", "fig. 10c, §5.2", "activated experts per layer",
        "≈60 (mini), ≈90 (flash)", 60, 90, "count", _denoise("activation_ratio", "activated"),
    ),
    Claim(
        "activation_ratio", "fig. 10c, §5.2", "the same, of all experts of the layer",
        "≈23 % (mini), ≈35 % (flash)", 60 / 256, 90 / 256, "percent",
        _denoise("activation_ratio", "activation_ratio"),
    ),
    Claim(
        "correlation_all", "fig. 10a, §4.3", "confidence and route stability: correlation",
        _STRONG, _NAN, _NAN, "number", _correlation("all"),
    ),
    Claim(
        "correlation_masked", "fig. 10a, §4.3", "the same within still-masked tokens",
        _STRONG, _NAN, _NAN, "number", _correlation("masked"),
    ),
    Claim(
        "correlation_accepted", "fig. 10a, §4.3", "the same within just-accepted tokens",
        _STRONG, _NAN, _NAN, "number", _correlation("accepted"),
    ),
    Claim(
        "correlation_decoded", "fig. 10a, §4.3", "the same within decoded tokens",
        _STRONG, _NAN, _NAN, "number", _correlation("decoded"),
    ),
)  # fmt: skip
"""In the order of the paper. 60 and 90 of 256 experts are 23 % and 35 %."""
