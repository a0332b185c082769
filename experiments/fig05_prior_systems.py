"""Figure 5: prior systems and Naive-LRU against the ideal cache bound, with the same budget."""

from __future__ import annotations

from oled_sim.experiment import Experiment, RunPoint, Size
from oled_sim.plotting.overall import draw_against

from ._grids import PRIOR
from ._systems import systems

COMPARED = (*PRIOR, "lru", "ideal")


def points(size: Size) -> list[RunPoint]:
    """Return prior systems, Naive-LRU and the bound, with every cache on every trace."""
    return systems(size, COMPARED)


EXPERIMENT = Experiment(
    "fig05",
    "Prior systems against the ideal cache bound",
    "3.2, figure 5",
    points,
    draw_against,
)
