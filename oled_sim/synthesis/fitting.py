"""Fitting parameters to statistics: confidence first, then routing, gates, couplings, sizes.

Every candidate is judged on requests made from the same random numbers, so the search sees what a
parameter does and little noise: the same trace, the same file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.synthesis.course import Course, make_course
from oled_sim.synthesis.parameters import DataSet, Gates, Moments, Relation, Scale, Target
from oled_sim.synthesis.request import Recipe, make_request, prompt_tokens
from oled_sim.synthesis.search import Note, Search
from oled_sim.synthesis.statistics import (
    confidence_statistics,
    gate_statistics,
    moments,
    routing_statistics,
)
from oled_sim.synthesis.targets import misses
from oled_sim.trace.schema import RequestTrace

ROUTING_BOUNDS: dict[str, tuple[float, float]] = {
    "popularity": (0.05, 4), "state_contrast": (0.02, 3), "request_taste": (0.02, 3),
    "block_taste": (0.02, 4), "masked_sharpness": (0.3, 4), "layer_spread": (0.005, 0.6),
    "neighbour_masked": (0.02, 0.97), "neighbour_word": (0.01, 0.8), "carry": (0.01, 0.95),
    "boundary_carry": (0.002, 0.9),
    "drift": (0.0005, 0.5), "drift_word": (0.0001, 0.2), "block_persistence": (0.01, 0.99),
    "jitter_masked": (0.02, 4), "jitter_word": (0.02, 4), "persistence_masked": (0.05, 0.99),
    "persistence_word": (0.05, 0.99), "jitter_shared": (0.01, 0.98), "jitter_spread": (0.02, 1.0),
}  # fmt: skip
"""Parameters that the routing fit moves, and within what."""

CONFIDENCE_BOUNDS: dict[str, tuple[float, float]] = {
    "masked_mean": (-4, 4), "depth": (0.1, 8), "reach": (0.5, 20), "shrink": (0.02, 0.9),
    "neighbour_gain": (0.05, 5), "block_spread": (0.02, 3), "token_spread": (0.02, 5),
    "pass_spread": (0.02, 3), "stretch": (0.3, 5), "word_mean": (1, 12), "word_spread": (0.2, 6),
}  # fmt: skip
"""Parameters that the fit of confidence moves, and within what."""

SEED = 1
"""Of the requests that a fit looks at: not those that ``synth`` writes unasked."""

TASTES = ("popularity", "state_contrast", "request_taste", "block_taste")
"""How sharp preferences are, in all their parts."""

UNREST = ("jitter_masked", "jitter_word", "drift", "drift_word")
"""How much moves from pass to pass."""

POSITIVE_CORRELATION = 0.6
"""Correlation within each state under ``positive``: the paper's word is "strongly", no number."""


def own_recipe(data: DataSet, coupling: str = "none", **settings: Any) -> Recipe:
    """Return the recipe that imitates the trace a data set was fitted on."""
    geometry = RoutingGeometry(tuple(range(1, data.layers + 1)), data.experts, data.top_k)
    return Recipe(data, data.fitted_on, geometry, coupling, data.output_tokens, SEED, **settings)


def courses(data: DataSet, requests: int) -> list[Course]:
    """Return courses of requests like those of the trace."""
    recipe = own_recipe(data)
    return [
        make_course(
            recipe.key(r), prompt_tokens(recipe, r), data.output_tokens, data.block_length,
            data.confidence, data.moments,
        )
        for r in range(requests)
    ]  # fmt: skip


def fit_confidence(data: DataSet, steps: int = 40, note: Note = lambda _: None) -> DataSet:
    """Fit confidence dynamics, then take the moments that couplings are relative to."""

    def with_values(values: Mapping[str, float]) -> DataSet:
        confidence = msgspec.structs.replace(data.confidence, **values)
        return msgspec.structs.replace(data, confidence=confidence)

    def judge(values: dict[str, float]) -> NDArray[np.float64]:
        return misses(confidence_statistics(courses(with_values(values), 60)), data.targets)

    start = msgspec.structs.asdict(data.confidence)
    data = with_values(Search(CONFIDENCE_BOUNDS, judge).run(start, steps, note))
    return msgspec.structs.replace(data, moments=Moments(**moments(courses(data, 60))))


def generate(recipe: Recipe, requests: int) -> list[RequestTrace]:
    """Return the first requests of a recipe."""
    return [make_request(recipe, r) for r in range(requests)]


def fit_routing(data: DataSet, steps: int = 20, note: Note = lambda _: None) -> DataSet:
    """Fit routing preferences to the trace, without any confidence-stability relation."""

    def with_values(values: Mapping[str, float]) -> DataSet:
        routing = msgspec.structs.replace(data.routing, **values)
        return msgspec.structs.replace(data, routing=routing, couplings={})

    targets = {n: t for n, t in data.targets.items() if not n.startswith("correlation")}

    def judge(values: dict[str, float]) -> NDArray[np.float64]:
        recipe = own_recipe(with_values(values))
        made = generate(recipe, min(8, data.requests))
        return misses(routing_statistics(made, recipe.geometry), targets)

    start = msgspec.structs.asdict(data.routing)
    return with_values(Search(ROUTING_BOUNDS, judge).run(start, steps, note))


def fit_gates(data: DataSet, steps: int = 6, note: Note = lambda _: None) -> DataSet:
    """Fit the gate scores; no route depends on them."""

    def with_values(values: Mapping[str, float]) -> DataSet:
        return msgspec.structs.replace(data, gates=Gates(**values))

    def judge(values: dict[str, float]) -> NDArray[np.float64]:
        recipe = own_recipe(with_values(values), signals=("full_gate",))
        return misses(gate_statistics(generate(recipe, 2)), data.targets)

    bounds = {"slope": (0.05, 4.0), "offset": (-8.0, 3.0), "floor": (-12.0, 0.0)}
    start = msgspec.structs.asdict(data.gates)
    return with_values(Search(bounds, judge).run(start, steps, note))


def fit_couplings(
    data: DataSet, recipe: Recipe, requests: int, note: Note = lambda _: None
) -> dict[str, Relation]:
    """Return the three settings of the confidence-stability relation for a recipe's model.

    ``measured`` aims at the trace's correlation within each state, ``positive`` at
    :data:`POSITIVE_CORRELATION`; both keep the mean kept shares of ``none``.
    """
    base = _stability(data, recipe, Relation(), requests)
    found = {"none": Relation()}
    for coupling in ("measured", "positive"):
        goals = {
            state: data.targets[f"correlation_{state}"].value
            if coupling == "measured"
            else POSITIVE_CORRELATION
            for state in ("masked", "accepted", "decoded")
        }
        found[coupling] = _relate(data, recipe, requests, base, goals)
        note(f"  {coupling}: {found[coupling]}")
    return found


def _stability(
    data: DataSet, recipe: Recipe, relation: Relation, requests: int
) -> dict[str, float]:
    """Return kept shares and correlations of a recipe under a relation."""
    scale = data.models.get(recipe.model, Scale())
    scale = msgspec.structs.replace(scale, couplings={"trial": relation})
    changed = msgspec.structs.replace(data, models=data.models | {recipe.model: scale})
    trial = replace(recipe, data=changed, coupling="trial")
    found = routing_statistics(generate(trial, requests), recipe.geometry)
    return {k: v for k, v in found.items() if k.startswith(("kept", "correlation"))}


def _relate(
    data: DataSet,
    recipe: Recipe,
    requests: int,
    base: Mapping[str, float],
    goals: Mapping[str, float],
    rounds: int = 10,
) -> Relation:
    """Move effects and scales step by step until correlations and kept shares fit."""
    values = msgspec.structs.asdict(Relation())
    for _ in range(rounds):
        now = _stability(data, recipe, Relation(**values), requests)
        for state in ("masked", "accepted", "decoded"):
            miss = goals[state] - now[f"correlation_{state}"]
            gain = 0.3 if state == "accepted" else 1.2  # what carries over answers more strongly
            values[state] = float(np.clip(values[state] + gain * miss, -2.5, 2.5))
        for state in ("masked", "decoded"):
            lost = (1 - base[f"kept_{state}"]) / max(1e-3, 1 - now[f"kept_{state}"])
            values[f"{state}_scale"] = float(np.clip(values[f"{state}_scale"] * lost, 0.02, 20))
        values["accepted_shift"] += 4 * (base["kept_accepted"] - now["kept_accepted"])
    return Relation(**values)


def fit_size(
    data: DataSet,
    recipe: Recipe,
    targets: Mapping[str, Target],
    requests: int = 2,
    rounds: int = 18,
    note: Note = lambda _: None,
) -> dict[str, float]:
    """Return routing overrides that bring a model's size to what the paper prints.

    Three things move, each by how far off one statistic is: a factor on all tastes and on the
    odds of neighbouring masks to share (activated experts), a factor on all unrest (adjacent
    overlap: jitter, drift, and the odds against outliving acceptance), and what masks take over
    from the block before (overlap across the boundary). All else stays as the trace has it.
    """
    own = data.routing
    sharp, unrest, boundary = 0.0, 0.0, _log_odds(own.boundary_carry)
    now, routing = {}, {}
    for _ in range(rounds):
        routing = {
            **{name: getattr(own, name) * math.exp(sharp) for name in TASTES},
            "neighbour_masked": _share(_log_odds(own.neighbour_masked) + sharp),
            **{name: getattr(own, name) * math.exp(unrest) for name in UNREST},
            "carry": _share(_log_odds(own.carry) - unrest),
            "boundary_carry": _share(boundary),
        }
        changed = msgspec.structs.replace(data, models={recipe.model: Scale(routing=routing)})
        trial = replace(recipe, data=changed)
        now = routing_statistics(generate(trial, requests), recipe.geometry)
        sharp += 1.4 * math.log(now["activated"] / targets["activated"].value)
        unrest += 6 * (now["adjacent_overlap"] - targets["adjacent_overlap"].value)
        boundary += 4 * (targets["boundary_overlap"].value - now["boundary_overlap"])
        sharp, unrest, boundary = (
            min(max(x, -b), b) for x, b in ((sharp, 3), (unrest, 3), (boundary, 6))
        )
    reached = {name: round(now[name], 3) for name in targets}
    note(f"  {recipe.model}: {routing}, reached {reached}")
    return routing


def _share(log_odds: float) -> float:
    return 1 / (1 + math.exp(-log_odds))


def _log_odds(share: float) -> float:
    return math.log(share / (1 - share))
