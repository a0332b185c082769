"""What figures of experiments share: names of policies, and what their numbers are."""

from __future__ import annotations

from typing import Any

import pandas as pd

NAMES = {
    "moe-infinity": "MoE-Infinity", "finemoe": "FineMoE", "ktransformers": "KTransformers",
    "lru": "Naive-LRU", "lfu": "LFU", "oled": "OLED", "ideal": "ideal (clairvoyant)",
    "full": "full residency", "fiddler": "Fiddler", "hybrimoe": "HybriMoE",
    "oled:priority": "Priority", "oled:priority+adapt": "+LayerAdapt",
    "oled:dispatch=load": "load-only dispatch", "oled:allocate=uniform": "uniform allocation",
    "oled:exact": "OLED, exact split",
}  # fmt: skip
"""How figures call policies; others by their specification."""

WIDTH = 120
"""Characters of a caption's line at the bottom of a page-wide figure."""


def policy_name(spec: str) -> str:
    """Return how figures call a policy."""
    return NAMES.get(spec, spec)


def setting_name(profile: str, origin: str, model: str) -> str:
    """Return a panel's title: model, real or synthetic routing, and whose costs."""
    machine = profile.removesuffix(f"-{model}")
    return f"{model}, {origin} routing, {machine}"


def provenance(table: pd.DataFrame) -> str:
    """Return what the numbers of a table are, in one line or a few.

    Args:
        table: with ``trace``, ``origin`` and, where costs matter, ``profile`` and
            ``profile_status``.
    """
    origins: dict[Any, int] = table.groupby("origin", sort=False)["trace"].nunique().to_dict()
    traces = " and ".join(f"{n} {origin}" for origin, n in origins.items())
    said = f"{traces} trace{'s' if sum(origins.values()) > 1 else ''}"
    if "profile" not in table:
        return said
    profiles = table[["profile", "profile_status"]].drop_duplicates().to_numpy()
    costs = ", ".join(f"{profile} ({status})" for profile, status in profiles)
    return _folded(f"{said}; times simulated with costs of {costs}")


def _folded(text: str) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, WIDTH))
