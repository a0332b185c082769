"""Where the engine takes requests from: an open trace, or requests in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import RequestTrace, TokenState

if TYPE_CHECKING:
    from oled_sim.trace.reader import Trace


class Source(Protocol):
    """What the engine needs of a trace."""

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        ...

    @property
    def requests(self) -> Sequence[int]:
        """Numbers of the requests, in trace order."""
        ...

    @property
    def signals(self) -> Collection[str]:
        """Signals that the trace holds."""
        ...

    def read(self, request: int) -> RequestTrace:
        """Read one request."""
        ...

    def output_tokens(self, request: int) -> int:
        """Return the generated tokens up to the first end of sequence, prompt tail excluded."""
        ...

    def require(self, signals: Iterable[str], who: str) -> None:
        """Refuse, with a sentence, when a signal is missing."""
        ...


@dataclass(frozen=True)
class TraceSource:
    """An open trace as a source.

    ``wanted``: optional signals to decode (None: all); fewer save time and memory.
    """

    trace: Trace
    wanted: Collection[str] | None = None

    @property
    def geometry(self) -> RoutingGeometry:
        """What the trace routes over."""
        return self.trace.geometry

    @property
    def requests(self) -> Sequence[int]:
        """Numbers of the requests, ascending."""
        return self.trace.requests

    @property
    def signals(self) -> Collection[str]:
        """Signals that the trace holds."""
        return self.trace.signals

    def read(self, request: int) -> RequestTrace:
        """Read and check one request."""
        return self.trace.read(request, signals=self.wanted)

    def output_tokens(self, request: int) -> int:
        """Return what the manifest says."""
        return self.trace.manifest.entry(request).output_tokens

    def require(self, signals: Iterable[str], who: str) -> None:
        """Refuse, with a sentence, when a signal is missing."""
        self.trace.require(signals, who)


@dataclass
class MemoryTrace:
    """Requests in memory as a source, for tests and for traces made on the fly.

    ``outputs``: output tokens per request; where absent, the positions that were ever masked.
    """

    geometry: RoutingGeometry
    traces: Sequence[RequestTrace]
    signals: Collection[str] = ("ids", "gates", "confidence", "token_state")
    outputs: dict[int, int] = field(default_factory=dict)

    @property
    def requests(self) -> Sequence[int]:
        """Numbers of the requests, in the order given."""
        return [t.request for t in self.traces]

    def read(self, request: int) -> RequestTrace:
        """Return one request."""
        return next(t for t in self.traces if t.request == request)

    def output_tokens(self, request: int) -> int:
        """Return the number of output tokens."""
        if request in self.outputs:
            return self.outputs[request]
        trace = self.read(request)
        return len(np.unique(trace.position[trace.state == TokenState.MASKED]))

    def require(self, signals: Iterable[str], who: str) -> None:
        """Refuse when a signal is missing."""
        from oled_sim.errors import TraceError

        missing = sorted(set(signals) - {"future"} - set(self.signals))
        if missing:
            raise TraceError(
                f"{who} needs the signal {missing[0]!r}, which the trace does not hold"
            )
