"""The paper's numbers on locality, beside those of a trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

Tables = dict[str, pd.DataFrame]


class Printed(NamedTuple):
    """What the paper prints of one model: ``text``, and bounds; NaN where it is no number."""

    text: str
    low: float = float("nan")
    high: float = float("nan")


@dataclass(frozen=True)
class Claim:
    """A number of the OLED-MoE paper that a trace can be held against.

    Attributes:
        key: name in tables.
        source: figure and section of the paper.
        quantity: what it is.
        mini, flash: what the paper prints of LLaDA2.0-mini and flash; None is nothing.
        style: how to print the value: ``times``, ``count``, ``percent`` or ``number``.
        measure: the value of a trace, from its tables; NaN where the trace cannot tell.
        needs: signals without which it cannot.
    """

    key: str
    source: str
    quantity: str
    mini: Printed
    flash: Printed | None
    style: str
    measure: Callable[[Tables], float]
    needs: tuple[str, ...] = ()


def beside_paper(tables: Tables) -> pd.DataFrame:
    """Return the paper's numbers and those of a trace (the tables of ``analyze``).

    Returns:
        One row per claim: ``key``, ``source``, ``quantity``, ``paper_mini``, ``paper_mini_low``,
        ``paper_mini_high``, ``paper_flash``, ``paper_flash_low``, ``paper_flash_high`` (null where
        the paper prints none), ``style``, ``value``.
    """
    return pd.DataFrame(
        {
            "key": [c.key for c in CLAIMS],
            "source": [c.source for c in CLAIMS],
            "quantity": [c.quantity for c in CLAIMS],
            **_printed("paper_mini", [c.mini for c in CLAIMS]),
            **_printed("paper_flash", [c.flash for c in CLAIMS]),
            "style": [c.style for c in CLAIMS],
            "value": [c.measure(tables) for c in CLAIMS],
        }
    )


def _printed(name: str, found: Sequence[Printed | None]) -> dict[str, list[object]]:
    return {
        name: [None if p is None else p.text for p in found],
        f"{name}_low": [_NAN if p is None else p.low for p in found],
        f"{name}_high": [_NAN if p is None else p.high for p in found],
    }


def why_missing(key: str, origin: str, signals: Collection[str]) -> str:
    """Return why a trace has no value: ``not generated``, ``not recorded``, or ``-`` for 0/0.

    Args:
        key: of the claim. origin: of the trace. signals: what it holds.
    """
    if set(_NEEDS[key]) <= set(signals):
        return "-"
    return "not generated" if origin == "synthetic" else "not recorded"


def _mean(table: pd.DataFrame, value: str, weight: str) -> float:
    known = table[table[value].notna()]
    count = known[weight].sum()
    return float((known[value] * known[weight]).sum() / count) if count else float("nan")


def _denoise(table: str, value: str) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        rows = tables[table]
        return _mean(rows[rows["kind"] == "denoise"], value, "events")

    return measure


def _pairs(span: str, gap: int, value: str, weight: str) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        rows = tables["locality"]
        return _mean(rows[(rows["span"] == span) & (rows["gap"] == gap)], value, weight)

    return measure


def _correlation(state: str) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        if "confidence_correlation" not in tables:
            return float("nan")
        rows = tables["confidence_correlation"]
        return float(rows.loc[rows["state"] == state, "correlation"].iloc[0])

    return measure


def _later(gap: int) -> Callable[[Tables], float]:
    return _pairs("within", gap, "overlap", "pairs")


def _layer(extreme: Callable[[pd.Series], float]) -> Callable[[Tables], float]:
    def measure(tables: Tables) -> float:
        rows = tables["activation_ratio"]
        ratios = rows.loc[rows["kind"] == "denoise", "activation_ratio"]
        return float(extreme(ratios)) if len(ratios) else _NAN

    return measure


def _kept(low: float, high: float) -> Callable[[Tables], float]:
    """Measure the kept share over all tokens with a confidence between two edges of bins."""

    def measure(tables: Tables) -> float:
        if "confidence_bins" not in tables:
            return _NAN
        rows = tables["confidence_bins"]
        middle = (rows["confidence_low"] + rows["confidence_high"]) / 2
        chosen = (rows["state"] == "all") & (low < middle) & (middle < high)
        return _mean(rows[chosen], "kept", "transitions")

    return measure


_NAN = float("nan")
_STRONG, _FALLS, _DIFFERS = Printed("strong"), Printed("falls"), Printed("differs")
_SURE = ("confidence", "token_state")

CLAIMS = (
    Claim(
        "footprint_ratio", "fig. 4a, §3.1", "experts, × one token's",
        Printed("≈8×", 8, 8), None, "times", _denoise("footprint", "footprint_ratio"),
    ),
    Claim(
        "flops_ratio", "fig. 4b, §3.1", "FLOPs, × one token's",
        Printed("≈16×", 16, 16), None, "times", _denoise("footprint", "flops_ratio"),
    ),
    Claim(
        "cosine", "fig. 7, §3.3", "hidden cosine, next pass",
        Printed("≤ 98 %", 0.98, 0.98), Printed("≤ 98 %", 0.98, 0.98), "percent",
        _pairs("within", 1, "cosine", "cosine_pairs"), ("cosines",),
    ),
    Claim(
        "overlap_within", "fig. 7, §3.3", "experts kept, next pass",
        Printed("85–90 %", 0.85, 0.90), Printed("85–90 %", 0.85, 0.90), "percent", _later(1),
    ),
    Claim(
        "overlap_within_4", "fig. 7, §3.3", "experts kept, 4 passes on",
        _FALLS, _FALLS, "percent", _later(4),
    ),
    Claim(
        "overlap_within_8", "fig. 7, §3.3", "experts kept, 8 passes on",
        _FALLS, _FALLS, "percent", _later(8),
    ),
    Claim(
        "overlap_across", "fig. 7, §3.3", "experts kept, next block",
        Printed("> 65 %", 0.65, 1), Printed("> 65 %", 0.65, 1), "percent",
        _pairs("across", 1, "overlap", "pairs"),
    ),
    Claim(
        "correlation_all", "fig. 10a, §4.3", "correlation, all tokens",
        _STRONG, _STRONG, "number", _correlation("all"), _SURE,
    ),
    Claim(
        "correlation_masked", "fig. 10a, §4.3", "correlation, still masked",
        _STRONG, _STRONG, "number", _correlation("masked"), _SURE,
    ),
    Claim(
        "correlation_accepted", "fig. 10a, §4.3", "correlation, just accepted",
        _STRONG, _STRONG, "number", _correlation("accepted"), _SURE,
    ),
    Claim(
        "correlation_decoded", "fig. 10a, §4.3", "correlation, decoded",
        _STRONG, _STRONG, "number", _correlation("decoded"), _SURE,
    ),
    Claim(
        "kept_unsure", "fig. 10b, §4.3", "kept, confidence < 0.5",
        Printed("less"), Printed("less"), "percent", _kept(0, 0.5), _SURE,
    ),
    Claim(
        "kept_sure", "fig. 10b, §4.3", "kept, confidence ≥ 0.9",
        Printed("more"), Printed("more"), "percent", _kept(0.9, 1), _SURE,
    ),
    Claim(
        "activated", "fig. 10c, §5.2", "activated experts",
        Printed("≈60", 60, 60), Printed("≈90", 90, 90), "count",
        _denoise("activation_ratio", "activated"),
    ),
    Claim(
        "activation_ratio", "fig. 10c, §5.2", "of a layer's experts",
        Printed("≈23 %", 60 / 256, 60 / 256), Printed("≈35 %", 90 / 256, 90 / 256), "percent",
        _denoise("activation_ratio", "activation_ratio"),
    ),
    Claim(
        "activation_least", "fig. 10c, §4.3", "in the least active layer",
        _DIFFERS, _DIFFERS, "percent", _layer(min),
    ),
    Claim(
        "activation_most", "fig. 10c, §4.3", "in the most active layer",
        _DIFFERS, _DIFFERS, "percent", _layer(max),
    ),
)  # fmt: skip
"""In the order of the paper. 60 and 90 of 256 experts are 23 % and 35 %; for figures 10a
and 10b and for wider gaps it prints no numbers, nor which model 10a and 10b are of."""

_NEEDS = {claim.key: claim.needs for claim in CLAIMS}
