"""Small recipes for tests."""

from __future__ import annotations

from typing import Any

from oled_sim.geometry import RoutingGeometry
from oled_sim.synthesis.parameters import Confidence, DataSet, Relation, Routing
from oled_sim.synthesis.request import Recipe

STRONG = Relation(masked=1.5, accepted=1.0, decoded=1.5)


def small_data(**settings: Any) -> DataSet:
    values = {"name": "small", "fitted_on": "nothing", "block_length": 8, **settings}
    return DataSet(couplings={"none": Relation(), "positive": STRONG}, **values)


def small_recipe(layers: int = 2, experts: int = 24, top_k: int = 4, **settings: Any) -> Recipe:
    data = settings.pop("data", None) or small_data()
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), experts, top_k)
    return Recipe(data, "small", geometry, **{"output_tokens": 40, **settings})


__all__ = ["Confidence", "Routing", "small_data", "small_recipe"]
