"""Figure 6: the four failure patterns of prior systems, measured.

(a) exposed transfers, prefetched or not, (b) exposed CPU time, (c) experts evicted and needed in
the next pass, (d) experts computed on the CPU and needed in the next pass. OLED stands beside
them; full residency says what passes take without any failure.
"""

from __future__ import annotations

from oled_sim.experiment import Experiment, RunPoint, Size
from oled_sim.plotting.failures import draw_failures

from ._failures import SystemPoint
from ._grids import CACHES, EXPERTS, PRIOR, traces_of

COMPARED = (*PRIOR, "lru", "oled")


def points(size: Size) -> list[RunPoint]:
    """Return prior systems, Naive-LRU and OLED with every cache on every trace; all resident."""
    found: list[RunPoint] = []
    for on in traces_of(size):
        systems = [on.run(policy, c, SystemPoint) for c in CACHES for policy in COMPARED]
        found += [*systems, on.run("full", EXPERTS)]
    return found


EXPERIMENT = Experiment(
    "fig06",
    "Four failure patterns of prior systems, measured",
    "3.2, figure 6",
    points,
    draw_failures,
)
