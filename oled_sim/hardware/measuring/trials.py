"""Made-up runs that show what the host adds: routes, residents and policies.

Their tokens spread evenly over a set of experts, as many as decode passes activate, that stays the
same or moves on from pass to pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.hardware.measuring.rig import SEED
from oled_sim.policy import Event, Lane, Policy, Prefetch, Setting
from oled_sim.trace.builder import RequestBuilder
from oled_sim.trace.schema import Kind, RequestTrace, TokenState

TOKENS = 16
CONTEXT = 512
STAGING = 16
RENEWED = 24
"""Experts that a layer of the trial of copies waits for."""
JOB = 12
"""Experts of a job of the CPU lane."""
QUEUED = 8
"""Prefetches that a gate of the trial of prefetches asks for: more than can come until the next."""
WARM_UP = 4
"""Passes that are run first and not counted."""


class SendMisses(Policy):
    """Computes residents where they are and sends all misses down one lane.

    Args:
        lane: where misses go.
        residents: bool [L, E], what is there at first; what the CPU computes never comes.
    """

    def __init__(self, lane: Lane, residents: NDArray[np.bool_]) -> None:
        self._lane, self._residents = lane, residents

    def place(self, setting: Setting) -> NDArray[np.bool_]:
        """Return the initial residents."""
        return self._residents

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lane of each activated expert."""
        return np.where(event.resident[event.experts], int(Lane.GPU), int(self._lane))


class PrefetchAlways(SendMisses):
    """Keeps the copy engine busy with experts of other layers, and lets none of them in."""

    replaces_queue = True

    def prefetch(self, event: Event) -> list[Prefetch]:
        """Return experts of the next layer that are not there, in a turn that moves on."""
        layer = (event.layer + 1) % len(self._residents)
        absent = np.flatnonzero(~self._residents[layer])
        first = QUEUED * event.pass_index
        return [
            Prefetch(layer, int(absent[(first + i) % len(absent)]), -float(i))
            for i in range(min(QUEUED, len(absent)))
        ]

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return values by which residents stay."""
        return self._residents[layer].astype(np.float64)


@dataclass(frozen=True)
class Trial:
    """One made-up run.

    Attributes:
        lane: where misses go.
        missing: activated experts of each layer that are not there at first.
        renewed: experts of each layer that change from pass to pass.
        events: how many to run at least, after the warm-up.
        prefetches: whether the copy engine is kept busy with prefetches.
    """

    lane: Lane
    missing: int
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
    """Return an order of the experts for each layer; the first ones are activated."""
    rng = np.random.default_rng(SEED)
    return [rng.permutation(geometry.experts) for _ in geometry.layers]


def _residents(geometry: RoutingGeometry, trial: Trial) -> NDArray[np.bool_]:
    """Return what is there at first, bool [L, E]: the activated but those that are missing."""
    found = np.zeros((len(geometry.layers), geometry.experts), np.bool_)
    there = max(0, _activated(geometry) - trial.missing)
    for row, order in zip(found, _orders(geometry), strict=True):
        row[order[:there]] = True
    return found


def request_of(geometry: RoutingGeometry, trial: Trial) -> RequestTrace:
    """Return denoising passes whose tokens spread evenly over a set of experts that moves on."""
    rng = np.random.default_rng(SEED)
    builder = RequestBuilder(geometry, 0)
    active = _activated(geometry)
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
        sets = [np.roll(ids, -renewed) for ids in sets]
    return builder.build()


def _spread(rng: np.random.Generator, ids: NDArray[np.int64], top_k: int) -> NDArray[np.int64]:
    """Return routes [T, k] that use each expert of a set about as often, none twice a token."""
    order = np.tile(rng.permutation(ids), -(-TOKENS * top_k // len(ids)))
    return order[: TOKENS * top_k].reshape(TOKENS, top_k)


def policy_of(geometry: RoutingGeometry, trial: Trial) -> SendMisses:
    """Return the policy of a trial."""
    kind = PrefetchAlways if trial.prefetches else SendMisses
    return kind(trial.lane, _residents(geometry, trial))
