"""The grid that figures 5 and 12 have in common: whole systems with the paper's two capacities."""

from __future__ import annotations

from collections.abc import Sequence

from oled_sim.experiment import RunPoint, Size

from ._failures import SystemPoint
from ._grids import CACHES, traces_of

BOUND = "ideal"
"""The ideal cache bound is no system: how it fails is not counted, and figure 13 has its runs."""


def systems(size: Size, policies: Sequence[str]) -> list[RunPoint]:
    """Return every policy with every cache on every trace, under every profile."""
    return [
        on.run(policy, cache, RunPoint if policy == BOUND else SystemPoint)
        for on in traces_of(size)
        for cache in CACHES
        for policy in policies
    ]
