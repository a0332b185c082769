"""Figure 13: how far OLED is from the ideal cache bound, over cache capacities.

``oled:exact`` (the split of least J) and ``oled:priority`` (all misses transferred) tell whether
the gap comes from dispatch or from who is resident.
"""

from __future__ import annotations

from oled_sim.experiment import Experiment, RunPoint, Size
from oled_sim.plotting.capacities import draw_gap

from ._grids import traces_of

POLICIES = ("oled", "oled:exact", "oled:priority", "ideal")
CAPACITIES = (16, 40, 60, 80, 100, 160)
QUICK_CAPACITIES = (16, 40, 100)


def points(size: Size) -> list[RunPoint]:
    """Return OLED, its variants and the bound with every capacity on every trace."""
    capacities = QUICK_CAPACITIES if size == "quick" else CAPACITIES
    return [
        on.run(policy, cache)
        for on in traces_of(size)
        for cache in capacities
        for policy in POLICIES
    ]


EXPERIMENT = Experiment(
    "fig13",
    "Gap between OLED and the ideal cache bound over capacities",
    "5.2, figure 13",
    points,
    draw_gap,
)
