"""How unevenly routing uses the experts of a layer."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.analysis.tally import RequestView, ratio, tabulate
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace

WEIGHTS = ("events", "tokens", "gates")
"""What an expert's mass is: events that activate it, tokens routed to it, their gate scores."""

TOP_PERCENT = (1, 2, 5, 10, 20, 50)


def popularity(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry
) -> dict[str, pd.DataFrame]:
    """Return the popularity skew of each layer over denoise and commit passes.

    Args:
        requests: read once, one at a time.
        geometry: what they route over.

    Returns:
        Two tables:

        - ``popularity``: ``layer``, ``weight`` (one of :data:`WEIGHTS`; ``gates`` only where the
          trace has them), ``top_percent``, ``experts`` (that share of the E experts, rounded up),
          ``share`` (of the layer's mass on its ``experts`` most popular ones);
        - ``entropy``: ``layer``, ``used_experts`` (activated at least once), ``entropy_bits``
          (Shannon entropy of the expert that a token is routed to), ``effective_experts`` (2 to
          that power; E when all are equally likely), ``set_entropy_bits`` (of the set that an
          event activates if experts were independent: the sum over experts of the entropy of
          "activated or not"; an upper bound on what a cache policy has to predict).
    """
    return tabulate(requests, geometry, PopularityTally(geometry))


class PopularityTally:
    """Counts :func:`popularity`."""

    def __init__(self, geometry: RoutingGeometry) -> None:
        self._geometry = geometry
        self._mass = np.zeros((len(WEIGHTS), len(geometry.layers), geometry.experts))
        self._events = np.zeros(len(geometry.layers))

    def add(self, view: RequestView) -> None:
        """Count one request."""
        decode = view.kind != Kind.PREFILL
        self._events += view.per_layer(decode)
        first = view.trace.event_layer.astype(np.int64) * self._geometry.experts
        event, expert = np.nonzero(view.active[decode])
        self._mass[0] += self._per_expert(first[decode][event] + expert)
        rows = decode[view.row_event]
        place = (first[view.row_event[rows], None] + view.trace.experts[rows]).ravel()
        self._mass[1] += self._per_expert(place)
        if view.trace.gates is not None:
            gates = view.trace.gates[rows].astype(np.float64).ravel()
            self._mass[2] += self._per_expert(place, gates)

    def _per_expert(
        self, place: NDArray[np.int64], weights: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        shape = self._mass.shape[1:]
        return np.bincount(place, weights, shape[0] * shape[1]).reshape(shape).astype(np.float64)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables."""
        return {"popularity": self._popularity(), "entropy": self._entropy()}

    def _popularity(self) -> pd.DataFrame:
        top = np.array(TOP_PERCENT)
        experts = -(-top * self._geometry.experts // 100)
        descending = -np.sort(-self._mass, axis=2)
        share = ratio(descending.cumsum(axis=2)[:, :, experts - 1], self._mass.sum(2)[..., None])
        weight, layer, percent = np.nonzero(~np.isnan(share))
        table = pd.DataFrame(
            {
                "layer": np.array(self._geometry.layers)[layer],
                "weight": np.array(WEIGHTS)[weight],
                "top_percent": top[percent],
                "experts": experts[percent],
                "share": share[weight, layer, percent],
            }
        )
        return table.sort_values(["layer", "weight", "top_percent"], ignore_index=True)

    def _entropy(self) -> pd.DataFrame:
        used = self._events > 0
        activated, tokens = self._mass[0][used], self._mass[1][used]
        entropy = _surprise(tokens / tokens.sum(axis=1, keepdims=True)).sum(axis=1)
        chance = activated / self._events[used, None]
        return pd.DataFrame(
            {
                "layer": np.array(self._geometry.layers)[used],
                "used_experts": (activated > 0).sum(axis=1),
                "entropy_bits": entropy,
                "effective_experts": 2**entropy,
                "set_entropy_bits": (_surprise(chance) + _surprise(1 - chance)).sum(axis=1),
            }
        )


def _surprise(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -p log2 p, 0 at 0."""
    return -p * np.log2(np.where(p > 0, p, 1))
