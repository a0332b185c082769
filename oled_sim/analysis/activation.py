"""Which share of its experts each layer activates (figure 10c)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.analysis.tally import KINDS, RequestView, ratio, tabulate
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import RequestTrace

QUANTILES = (0.05, 0.5, 0.95)


def activation_ratio(requests: Iterable[RequestTrace], geometry: RoutingGeometry) -> pd.DataFrame:
    """Return the activated experts of each layer, and their share of all E (figure 10c).

    Args:
        requests: read once, one at a time.
        geometry: what they route over.

    Returns:
        One row per kind of pass and layer that occurs: ``kind``, ``layer``, ``events``,
        ``activated`` (mean |A|), ``activated_p05``, ``activated_p50``, ``activated_p95`` (the
        smallest |A| that at least that share of the events do not exceed), ``activation_ratio``
        (mean |A| / E).
    """
    return tabulate(requests, geometry, ActivationTally(geometry))["activation_ratio"]


class ActivationTally:
    """Counts :func:`activation_ratio`: a histogram of |A| per kind and layer."""

    def __init__(self, geometry: RoutingGeometry) -> None:
        self._geometry = geometry
        shape = len(KINDS), len(geometry.layers), geometry.experts + 1
        self._events = np.zeros(shape, np.int64)

    def add(self, view: RequestView) -> None:
        """Count one request."""
        place = (view.kind, view.trace.event_layer, view.sizes)
        flat = np.ravel_multi_index(place, self._events.shape)
        self._events += np.bincount(flat, minlength=self._events.size).reshape(self._events.shape)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the table."""
        events = self._events.sum(axis=2)
        kind, layer = np.nonzero(events)
        histograms, number = self._events[kind, layer], events[kind, layer]
        activated = ratio(histograms @ np.arange(self._geometry.experts + 1), number)
        quantiles = {
            f"activated_p{round(100 * q):02d}": _quantile(histograms, q) for q in QUANTILES
        }
        table = pd.DataFrame(
            {
                "kind": np.array(KINDS)[kind],
                "layer": np.array(self._geometry.layers)[layer],
                "events": number,
                "activated": activated,
                **quantiles,
                "activation_ratio": activated / self._geometry.experts,
            }
        )
        return {"activation_ratio": table}


def _quantile(histograms: NDArray[np.int64], q: float) -> NDArray[np.intp]:
    """Return the smallest value that at least the share ``q`` of each histogram do not exceed."""
    cumulative = histograms.cumsum(axis=1)
    return (cumulative >= q * cumulative[:, -1:]).argmax(axis=1)
