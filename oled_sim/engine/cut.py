"""Some requests of a source, to a number of decode passes and MoE layers: what a run replays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.members import stretch
from oled_sim.engine.source import Source
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace


def first_decode_passes(trace: RequestTrace, decode_passes: int | None) -> RequestTrace:
    """Return a request up to its n-th decode pass; whole if None or if it has no more than that.

    Prefill passes before it are kept and not counted.
    """
    if decode_passes is None:
        return trace
    decode = np.flatnonzero(trace.kind != Kind.PREFILL)
    if len(decode) <= decode_passes:
        return trace
    return stretch(trace, 0, int(decode[decode_passes]))


def first_layers(trace: RequestTrace, layers: int) -> RequestTrace:
    """Return a request with its first MoE layers alone, as if the model had no more."""
    kept = np.flatnonzero(trace.event_layer < layers)
    counts = np.diff(trace.event_offset)
    rows = np.repeat(trace.event_layer < layers, counts)

    def of_events(values: NDArray[np.generic] | None) -> Any:
        return None if values is None else values[kept]

    return replace(
        trace,
        event_pass=trace.event_pass[kept],
        event_layer=trace.event_layer[kept],
        event_offset=np.concatenate([[0], np.cumsum(counts[kept])]),
        experts=trace.experts[rows],
        gates=None if trace.gates is None else trace.gates[rows],
        row_token=trace.row_token[rows],
        full_gate=of_events(trace.full_gate),
        cosines=of_events(trace.cosines),
    )


@dataclass(frozen=True)
class CutSource:
    """A source of some requests of another, in an order of its own, each cut short.

    Attributes:
        source: where requests come from.
        cuts: by request, in the order in which they run, the number of decode passes to keep (at
            least 1); None keeps all. A request with fewer is kept whole.
        layers: how many MoE layers to keep, from the first on; None keeps all.
    """

    source: Source
    cuts: Mapping[int, int | None]
    layers: int | None = None

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        whole = self.source.geometry
        return replace(whole, layers=whole.layers[: self.layers])

    @property
    def requests(self) -> Sequence[int]:
        """Numbers of the requests, in the order in which they run."""
        return tuple(self.cuts)

    @property
    def signals(self) -> Collection[str]:
        """Signals that the trace holds."""
        return self.source.signals

    def read(self, request: int) -> RequestTrace:
        """Read one request up to its last pass."""
        trace = first_decode_passes(self.source.read(request), self.cuts[request])
        return trace if self.layers is None else first_layers(trace, self.layers)

    def output_tokens(self, request: int) -> int:
        """Return the tokens accepted in the passes that are kept, at most the request's output."""
        whole = self.source.output_tokens(request)
        if self.cuts[request] is None:
            return whole
        trace = self.source.read(request)
        kept = first_decode_passes(trace, self.cuts[request])
        return whole if kept is trace else min(whole, int(kept.accepted_count.sum()))

    def require(self, signals: Iterable[str], who: str) -> None:
        """Refuse, with a sentence, when a signal is missing."""
        self.source.require(signals, who)
