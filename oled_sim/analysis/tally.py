"""Reading a trace once: running sums over requests, and what they all need of a request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace
from oled_sim.trace.stats import activation

KINDS = tuple(kind.name.lower() for kind in Kind)
"""Names of the kinds of pass, by their number."""


@dataclass(frozen=True)
class RequestView:
    """One request with what is derived from it, each computed once and only when asked for.

    V events, N routing rows, L layers, E experts as in :class:`RequestTrace`.
    """

    trace: RequestTrace
    geometry: RoutingGeometry

    @cached_property
    def active(self) -> NDArray[np.bool_]:
        """Which experts each event activates: bool [V, E]."""
        return activation(self.trace, self.geometry.experts)

    @cached_property
    def sets(self) -> NDArray[np.uint64]:
        """The same as bits: uint64 [V, ceil(E / 64)], for fast intersections."""
        padding = -self.geometry.experts % 64
        return np.packbits(np.pad(self.active, ((0, 0), (0, padding))), axis=1).view(np.uint64)

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Experts activated by each event, |A|: int64 [V]."""
        return self.active.sum(axis=1)

    @cached_property
    def tokens(self) -> NDArray[np.int64]:
        """Tokens that each event routes: int64 [V]."""
        return np.diff(self.trace.event_offset)

    @cached_property
    def kind(self) -> NDArray[np.uint8]:
        """Kind of the pass of each event: uint8 [V]."""
        return self.trace.kind[self.trace.event_pass]

    @cached_property
    def row_event(self) -> NDArray[np.intp]:
        """Event of each routing row: [N]."""
        return np.repeat(np.arange(self.trace.events), self.tokens)

    def per_layer(
        self, chosen: NDArray[Any], weights: NDArray[Any] | None = None
    ) -> NDArray[np.float64]:
        """Return the number of ``chosen`` events by layer, or the sum of their ``weights``.

        Args:
            chosen: mask [V] or indices of events.
            weights: one for each chosen event.

        Returns:
            float64 [L].
        """
        layer, layers = self.trace.event_layer[chosen], len(self.geometry.layers)
        return np.bincount(layer, weights, layers).astype(np.float64)


class Tally(Protocol):
    """Sums over requests that end in tables; none of them grows with the number of requests."""

    def add(self, view: RequestView) -> None:
        """Count one request."""
        ...

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return what was counted, by name of the table."""
        ...


def tabulate(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry, *tallies: Tally
) -> dict[str, pd.DataFrame]:
    """Feed ``requests`` to ``tallies``, one at a time and each read once; return their tables."""
    for trace in requests:
        view = RequestView(trace, geometry)
        for tally in tallies:
            tally.add(view)
    return {name: table for tally in tallies for name, table in tally.tables().items()}


def ratio(total: Any, count: Any) -> Any:
    """Divide arrays, NaN where ``count`` is zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.asarray(count) > 0, np.divide(total, count), np.nan)


def pooled(table: pd.DataFrame, keys: list[str], value: str, weight: str) -> pd.DataFrame:
    """Average ``value`` over the rows that share ``keys``, each with its ``weight``.

    Rows without a value do not count. The mean over layers of a figure counted per event is the
    mean over all events when the weight is their number.
    """
    known = table[table[value].notna() & (table[weight] > 0)]
    total = (known[value] * known[weight]).groupby([known[k] for k in keys]).sum()
    count = known.groupby(keys)[weight].sum()
    return pd.DataFrame({value: total / count, weight: count}).reset_index()
