"""Figure 15: what each component of OLED adds, and each against an alternative.

(a) Naive-LRU, +Priority, +LayerAdapt, +Coop with the paper's two capacities. (b) Over capacities:
Priority against LRU and LFU, LayerAdapt against uniform allocation, reuse-aware against load-only
dispatch.
"""

from __future__ import annotations

from oled_sim.experiment import Experiment, RunPoint, Size
from oled_sim.plotting.ablation import ABLATION, COMPONENTS, draw_ablation

from ._grids import CACHES, traces_of

CAPACITIES = (16, 40, 60, 80, 100, 160)
QUICK_CAPACITIES = (16, 40, 100)


def points(size: Size) -> list[RunPoint]:
    """Return the ablation at the paper's caches, the components at all of them."""
    capacities = QUICK_CAPACITIES if size == "quick" else CAPACITIES
    components = [policy for pair in COMPONENTS for policy in pair.policies]
    return [
        on.run(policy, cache)
        for on in traces_of(size)
        for cache in capacities
        for policy in dict.fromkeys([*(ABLATION if cache in CACHES else ()), *components])
    ]


EXPERIMENT = Experiment(
    "fig15",
    "Ablation of OLED and comparison of its components",
    "5.3, figure 15",
    points,
    draw_ablation,
)
