"""Figure 12: TPOT and expert cache utilization of OLED and the systems before it."""

from __future__ import annotations

from oled_sim.experiment import Experiment, RunPoint, Size
from oled_sim.plotting.overall import draw_overall

from ._failures import SystemPoint
from ._grids import CACHES, SYSTEMS, traces_of


def points(size: Size) -> list[RunPoint]:
    """Return every system with every cache on every trace, under every profile."""
    return [
        on.run(policy, cache, SystemPoint)
        for on in traces_of(size)
        for cache in CACHES
        for policy in SYSTEMS
    ]


EXPERIMENT = Experiment(
    "fig12",
    "TPOT and expert cache utilization of OLED and baselines",
    "5.2, figure 12",
    points,
    draw_overall,
)
