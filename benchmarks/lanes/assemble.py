"""From raw figures to a profile."""

from __future__ import annotations

import datetime
import math
from pathlib import Path
from typing import Any

import msgspec

from oled_sim.costs.profile import AXES, FORMAT, Profile
from oled_sim.costs.store import save_profile

_TABLE_FIELDS = ("axis", "points", "axes", "rows", "columns", "median_us", "p10_us", "p90_us",
    "repeats", "strategy")  # fmt: skip


def to_profile(raw: dict[str, Any], *, provisional: bool = True) -> Profile:
    """Return the profile of raw figures; null cells become NaN with 0 repeats."""
    origin = raw["origin"] | {"date": datetime.date.fromisoformat(raw["origin"]["date"])}
    lanes = raw["interference"].items()
    document = {
        "format": FORMAT,
        "name": raw["name"],
        "status": "measured",
        "provisional": provisional,
        "origin": origin,
        **{key: raw[key] for key in ("hardware", "software", "geometry")},
        **{key: raw[key] for key in ("launch", "synchronize")},
        "interference": {k: {o: v for o, v in b.items() if o != "alone_us"} for k, b in lanes},
        **{name: _table(raw["tables"][name]) for name in AXES},
    }
    return msgspec.convert(document, Profile)


def write_profile(raw: dict[str, Any], path: Path) -> None:
    """Write the profile of raw figures to a new file."""
    save_profile(to_profile(raw), path)


def _table(raw: dict[str, Any]) -> dict[str, Any]:
    return {key: _with_nan(raw[key]) for key in _TABLE_FIELDS if key in raw}


def _with_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_nan(v) for v in value]
    return math.nan if value is None else value
