"""Figure 4: how many experts a pass of a block touches and computes, against one token."""

from __future__ import annotations

from oled_sim.experiment import Experiment, Point, Size
from oled_sim.plotting.paper_locality import draw_fig04

from ._analysis import AnalysisPoint, traces


def points(size: Size) -> list[Point]:
    """Return a point per trace."""
    return [
        AnalysisPoint(
            trace,
            tables=("footprint", "block_footprint"),
            quantities=("footprint_ratio", "flops_ratio"),
        )
        for trace in traces(size)
    ]


EXPERIMENT = Experiment(
    name="fig04",
    title="Experts touched and computed by a pass, against autoregressive decoding",
    section="3.1, figure 4",
    points=points,
    plot=draw_fig04,
)
