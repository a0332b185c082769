"""Figure 10: what a policy can go by: confidence, and how much each layer activates."""

from __future__ import annotations

from oled_sim.experiment import Experiment, Point, Size, SyntheticTrace
from oled_sim.plotting.paper_locality import draw_fig10

from ._analysis import AnalysisPoint, traces
from ._grids import DATA_SETS

TABLES = ("confidence_bins", "confidence_joint", "confidence_correlation", "activation_ratio")
QUANTITIES = (
    "correlation_all",
    "correlation_masked",
    "correlation_accepted",
    "correlation_decoded",
    "kept_unsure",
    "kept_sure",
    "activated",
    "activation_ratio",
    "activation_least",
    "activation_most",
)


def points(size: Size) -> list[Point]:
    """Return a point per trace, with the two relations between confidence and stability."""
    positive = [SyntheticTrace("llada2.0-mini", name, coupling="positive") for name in DATA_SETS]
    more = tuple(positive) if size == "full" else ()
    return [
        AnalysisPoint(trace, tables=TABLES, quantities=QUANTITIES)
        for trace in traces(size, more=more)
    ]


EXPERIMENT = Experiment(
    name="fig10",
    title="Confidence against route stability, and activation by layer",
    section="4.3, figure 10",
    points=points,
    plot=draw_fig10,
)
