"""Some requests of a source, each up to a number of decode passes: what a short run replays."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class CutSource:
    """A source of some requests of another, in an order of its own, each cut short.

    Attributes:
        source: where requests come from.
        cuts: by request, in the order in which they run, the number of decode passes to keep (at
            least 1); None keeps all. A request with fewer is kept whole.
    """

    source: Source
    cuts: Mapping[int, int | None]

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        return self.source.geometry

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
        return first_decode_passes(self.source.read(request), self.cuts[request])

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
