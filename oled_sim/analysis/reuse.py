"""How long ago an activated expert was used before, and what LRU makes of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.analysis.reuse_kernel import FIRST_TOUCH, Recency, walk
from oled_sim.analysis.tally import RequestView, ratio, tabulate
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace

PHASES = ("prefill", "decode")
"""Prefill passes; denoise and commit passes."""

MEASURES = ("events", "experts")


def reuse(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry, *, cold: bool = False
) -> dict[str, pd.DataFrame]:
    """Return the reuse distances of all activations, and the hit curve of LRU.

    An activation is one expert of an event's set A. Its *event distance* is the number of events
    of the layer from the one that used the expert last to this one: 1 is the next pass. Its *stack
    distance* is the number of distinct experts of the layer that were used more recently. Events
    are atomic: all of A is looked up before any of it moves, and then A is the most recent, in the
    order of the routing rows, an expert counting at its last row (spec §2), so there are no ties.

    LRU with C slots per layer holds exactly the experts of stack distance below C, whatever |A|
    and C are, so one pass over the trace gives the hits of every C (Mattson et al. 1970).

    Args:
        requests: read once, one at a time, in trace order.
        geometry: what they route over.
        cold: forget everything at the start of each request; else recency lasts, as in a run.

    Returns:
        Two tables, ``phase`` being that of the pass that activates:

        - ``reuse_distance``: ``phase``, ``layer``, ``measure`` (``events`` or ``experts``),
          ``distance`` (NA for the first touch of an expert), ``activations``;
        - ``lru_hits``: ``phase``, ``layer``, ``capacity`` (0 to E), ``activations``,
          ``first_touches``, ``hits``, ``hit_rate`` (hits / activations).
    """
    return tabulate(requests, geometry, ReuseTally(geometry, cold=cold))


def reuse_distances(
    view: RequestView, recency: Recency
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return event, event distance and stack distance of each activation: int64 [Σ|A|] each.

    ``recency`` is what was used before the request, and is brought up to date. First touches have
    the distance ``FIRST_TOUCH``.
    """
    trace, number = view.trace, int(view.sizes.sum())
    owner, events, distinct = (np.empty(number, np.int64) for _ in range(3))
    slot_offset = trace.event_offset * trace.experts.shape[1]
    walk(recency, trace.event_layer, slot_offset, trace.experts.ravel(), owner, events, distinct)
    return owner, events, distinct


class ReuseTally:
    """Counts :func:`reuse`; grows with the longest event distance alone."""

    def __init__(self, geometry: RoutingGeometry, *, cold: bool = False) -> None:
        self._geometry = geometry
        self._cold = cold
        self._recency = self._forget()
        shape = len(PHASES), len(geometry.layers)
        # Activations by distance; the first column counts first touches, column d + 1 distance d.
        self._events = np.zeros((*shape, 2), np.int64)
        self._experts = np.zeros((*shape, geometry.experts + 1), np.int64)

    def _forget(self) -> Recency:
        return Recency.empty(len(self._geometry.layers), self._geometry.experts)

    def add(self, view: RequestView) -> None:
        """Count one request."""
        if self._cold:
            self._recency = self._forget()
        owner, events, distinct = reuse_distances(view, self._recency)
        phase = (view.kind[owner] != Kind.PREFILL).astype(np.int64)
        layer = view.trace.event_layer[owner].astype(np.int64)
        self._experts += _histogram(phase, layer, distinct, self._experts.shape)
        longest = max(self._events.shape[2], int(events.max()) + 2)
        self._events = np.pad(
            self._events, ((0, 0), (0, 0), (0, longest - self._events.shape[2]))
        ) + _histogram(phase, layer, events, (*self._events.shape[:2], longest))

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables."""
        parts = [self._distances("events", self._events), self._distances("experts", self._experts)]
        distances = pd.concat(parts, ignore_index=True)
        order = ["phase", "layer", "measure", "distance"]
        distances = distances.sort_values(order, ignore_index=True, na_position="first")
        return {"reuse_distance": distances, "lru_hits": self._hits()}

    def _distances(self, measure: str, counts: NDArray[np.int64]) -> pd.DataFrame:
        phase, layer, column = np.nonzero(counts)
        distance = pd.array(column - 1, dtype="Int64")
        distance[column - 1 == FIRST_TOUCH] = pd.NA
        return pd.DataFrame(
            {
                "phase": np.array(PHASES)[phase],
                "layer": np.array(self._geometry.layers)[layer],
                "measure": measure,
                "distance": distance,
                "activations": counts[phase, layer, column],
            }
        )

    def _hits(self) -> pd.DataFrame:
        activations = self._experts.sum(axis=2)
        hits = self._experts.cumsum(axis=2) - self._experts[..., :1]  # column C: distance < C
        phase, layer = np.nonzero(activations)
        capacities = self._geometry.experts + 1
        hits, number = hits[phase, layer].ravel(), activations[phase, layer].repeat(capacities)
        return pd.DataFrame(
            {
                "phase": np.array(PHASES)[phase].repeat(capacities),
                "layer": np.array(self._geometry.layers)[layer].repeat(capacities),
                "capacity": np.tile(np.arange(capacities), len(phase)),
                "activations": number,
                "first_touches": self._experts[phase, layer, 0].repeat(capacities),
                "hits": hits,
                "hit_rate": ratio(hits, number),
            }
        )


def _histogram(
    phase: NDArray[np.int64],
    layer: NDArray[np.int64],
    distance: NDArray[np.int64],
    shape: tuple[int, ...],
) -> NDArray[np.int64]:
    place = (phase * shape[1] + layer) * shape[2] + distance + 1
    return np.bincount(place, minlength=int(np.prod(shape))).reshape(shape)
