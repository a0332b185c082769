"""Figure 12: TPOT and expert cache utilization of OLED and the systems before it."""

from __future__ import annotations

from oled_sim.experiment import Experiment, RunPoint, Size
from oled_sim.plotting.overall import draw_overall

from ._grids import SYSTEMS
from ._systems import systems


def points(size: Size) -> list[RunPoint]:
    """Return every system with every cache on every trace, under every profile."""
    return systems(size, SYSTEMS)


EXPERIMENT = Experiment(
    "fig12",
    "TPOT and expert cache utilization of OLED and baselines",
    "5.2, figure 12",
    points,
    draw_overall,
)
