"""Made-up runs that show what the host adds: routes and residents.

Their tokens spread evenly over a set of experts, as many as decode passes activate. Some of them
are computed on the CPU in every pass; the others stay the same or move on from pass to pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.hardware.measuring.rig import SEED
from oled_sim.hardware.measuring.trial_policies import PrefetchAlways, SendMisses
from oled_sim.trace.builder import RequestBuilder
from oled_sim.trace.schema import Kind, RequestTrace, TokenState

TOKENS = 16
CONTEXT = 512
STAGING = 16
RENEWED = 24
"""Experts that a layer of the trial of copies waits for."""
JOB = 12
"""Experts of a job of the CPU lane."""
BESIDE = 4
"""Experts that a layer copies beside such a job: they are there long before its sums."""
WARM_UP = 4
"""Passes that are run first and not counted."""


@dataclass(frozen=True)
class Trial:
    """One made-up run.

    Attributes:
        on_cpu: activated experts of each layer that the CPU computes in every pass.
        renewed: experts of each layer that change from pass to pass, and are copied.
        events: how many to run at least, after the warm-up.
        prefetches: whether the copy engine is kept busy with prefetches.
    """

    on_cpu: int
    renewed: int
    events: int
    prefetches: bool = False


def _usual(experts: int) -> int:
    """Return how many experts of a layer the passes activate: as many as decode passes do."""
    return max(8, experts * 7 // 32)


def slots_of(experts: int) -> int:
    """Return slots per layer that hold what a pass activates and a little more."""
    return min(experts, 5 * _usual(experts) // 4)


def _activated(geometry: RoutingGeometry) -> int:
    return max(geometry.top_k, _usual(geometry.experts))


def _orders(geometry: RoutingGeometry) -> list[NDArray[np.int64]]:
    """Return an order of the experts for each layer; the first ones are activated at first."""
    rng = np.random.default_rng(SEED)
    return [rng.permutation(geometry.experts) for _ in geometry.layers]


def _first(geometry: RoutingGeometry, start: int, stop: int) -> NDArray[np.bool_]:
    """Return bool [L, E]: the experts from one place in each layer's order to another."""
    found = np.zeros((len(geometry.layers), geometry.experts), np.bool_)
    for row, order in zip(found, _orders(geometry), strict=True):
        row[order[start:stop]] = True
    return found


def request_of(geometry: RoutingGeometry, trial: Trial) -> RequestTrace:
    """Return denoising passes whose tokens spread evenly over a set of experts that moves on."""
    rng = np.random.default_rng(SEED)
    builder = RequestBuilder(geometry, 0)
    active = _activated(geometry)
    on_cpu = min(trial.on_cpu, active)
    sets = _orders(geometry)
    nothing = np.zeros(TOKENS, np.bool_)
    for _ in range(-(-trial.events // len(sets)) + WARM_UP):
        routes = [_spread(rng, ids[:active], geometry.top_k) for ids in sets]
        builder.add_pass(
            kind=Kind.DENOISE,
            block=CONTEXT // TOKENS,
            context=CONTEXT,
            token_id=np.zeros(TOKENS, np.int32),
            position=np.arange(CONTEXT, CONTEXT + TOKENS),
            state=np.full(TOKENS, TokenState.MASKED),
            confidence=np.full(TOKENS, 0.5),
            accepted=nothing,
            edited=nothing,
            experts=np.stack(routes),
            gates=np.full((len(sets), TOKENS, geometry.top_k), 1.0 / geometry.top_k),
        )
        renewed = min(trial.renewed, geometry.experts - active)
        sets = [np.append(ids[:on_cpu], np.roll(ids[on_cpu:], -renewed)) for ids in sets]
    return builder.build()


def _spread(rng: np.random.Generator, ids: NDArray[np.int64], top_k: int) -> NDArray[np.int64]:
    """Return routes [T, k] that use each expert of a set about as often, none twice a token."""
    order = np.tile(rng.permutation(ids), -(-TOKENS * top_k // len(ids)))
    return order[: TOKENS * top_k].reshape(TOKENS, top_k)


def policy_of(geometry: RoutingGeometry, trial: Trial) -> SendMisses:
    """Return the policy of a trial."""
    kind = PrefetchAlways if trial.prefetches else SendMisses
    active = _activated(geometry)
    on_cpu = min(trial.on_cpu, active)
    return kind(_first(geometry, on_cpu, active), _first(geometry, 0, on_cpu))
