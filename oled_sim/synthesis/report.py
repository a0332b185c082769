"""The fit report: what each statistic should be, what it is, and how far off it may be."""

from __future__ import annotations

from typing import NamedTuple

from oled_sim.synthesis.parameters import DataSet, Target
from oled_sim.synthesis.request import Recipe, make_request
from oled_sim.synthesis.statistics import (
    confidence_statistics,
    gate_statistics,
    held_out_statistics,
    routing_statistics,
)


class Line(NamedTuple):
    """One statistic. ``kind``: ``fitted``, ``held out`` or ``shown``. ``within``: tolerance."""

    statistic: str
    kind: str
    source: str
    target: float
    achieved: float
    tolerance: float

    @property
    def within(self) -> bool:
        """Whether it is within its tolerance."""
        return abs(self.achieved - self.target) <= self.tolerance


def fit_report(recipe: Recipe, requests: int) -> list[Line]:
    """Return target, achieved and tolerance per statistic of the first ``requests`` requests.

    At the size of the trace: everything that was measured there, fitted or held out. At a model's
    size: what the paper prints, and confidence, which is the trace's at any size.
    """
    made = [make_request(recipe, r) for r in range(requests)]
    achieved = (
        routing_statistics(made, recipe.geometry)
        | confidence_statistics(made)
        | gate_statistics(made)
        | held_out_statistics(made, recipe.geometry)
    )
    targets = targets_of(recipe)
    return [
        Line(name, _kind(name, target, recipe), target.source, target.value, achieved[name],
             target.tolerance)
        for name, target in targets.items() if name in achieved
    ]  # fmt: skip


def targets_of(recipe: Recipe) -> dict[str, Target]:
    """Return what a recipe's requests are held against."""
    data: DataSet = recipe.data
    if recipe.model == data.fitted_on:
        return data.targets
    scale = data.models[recipe.model]
    shape = ("accepted", "confidence", "correlation", "kept")
    kept = {n: t for n, t in data.targets.items() if n.startswith(shape)}
    return scale.targets | kept


def _kind(name: str, target: Target, recipe: Recipe) -> str:
    if name.startswith("correlation") and recipe.coupling != "measured":
        return "set otherwise"
    if recipe.model != recipe.data.fitted_on and name.startswith("kept"):
        return "not fitted"
    return "fitted" if target.fitted else "held out"
