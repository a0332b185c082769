"""Figure 7: how alike passes are, by the number of passes between them."""

from __future__ import annotations

from oled_sim.experiment import Experiment, Point, Size
from oled_sim.plotting.paper_locality import draw_fig07

from ._analysis import AnalysisPoint, traces

QUANTITIES = ("cosine", "overlap_within", "overlap_within_4", "overlap_within_8", "overlap_across")


def points(size: Size) -> list[Point]:
    """Return a point per trace; the one with every signal has the cosines of hidden states."""
    return [
        AnalysisPoint(trace, tables=("locality",), quantities=QUANTITIES)
        for trace in traces(size, more=("mini-gsm8k-signals",))
    ]


EXPERIMENT = Experiment(
    name="fig07",
    title="Hidden-state similarity and expert overlap by the gap between passes",
    section="3.3, figure 7",
    points=points,
    plot=draw_fig07,
)
