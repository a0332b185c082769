"""What a figure must say about its numbers: real or synthetic traces, measured costs or not."""

from __future__ import annotations

import pandas as pd

NAMES = {
    "moe-infinity": "MoE-Infinity", "finemoe": "FineMoE", "ktransformers": "KTransformers",
    "lru": "Naive-LRU", "lfu": "LFU", "oled": "OLED", "ideal": "ideal (clairvoyant)",
    "full": "full residency",
}  # fmt: skip
"""How figures call policies; others by their specification."""


def policy_name(spec: str) -> str:
    """Return how figures call a policy."""
    return NAMES.get(spec, spec)


def provenance(table: pd.DataFrame) -> str:
    """Return a line that says where the numbers of a table come from.

    Args:
        table: with ``trace``, ``origin`` and, where costs matter, ``profile`` and
            ``profile_status``.
    """
    origins = table.groupby("origin", sort=False)["trace"].nunique()
    traces = " and ".join(f"{n} {origin}" for origin, n in origins.items())
    said = f"{traces} trace{'s' if origins.sum() > 1 else ''}"
    if "profile" not in table:
        return said
    profiles = table[["profile", "profile_status"]].drop_duplicates().itertuples(index=False)
    costs = ", ".join(f"{profile} ({status})" for profile, status in profiles)
    return f"{said}; simulated with costs of {costs}"
