"""When the host starts prefetches, and what that keeps it from: read off marks.

A copy engine that has nothing to do waits for the host. After a gate that first launches what was
decided there; later, while it waits for a lane, it notices each arrival, asks whether it may stay,
and starts the next. When a layer's lanes have ended, it launches the merge and the way to the next
gate before it looks again; and while it starts a prefetch then, it does not see that the gate's
routing has come.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from oled_sim.hardware.clock import Clock
from oled_sim.hardware.copy_lane import Copy
from oled_sim.hardware.layer_run import LayerMarks
from oled_sim.hardware.measured import PassMarks

Span = tuple[float, float]
"""Begin and end of a copy, µs."""

NOTICED_US = 25.0
"""A host that has nothing else to do sees a gate's routing sooner than this."""


class Layer(NamedTuple):
    """Times of a layer on the host's clock, µs.

    ``decided``: the decision at its gate had been made. ``ended``: its lanes had. ``launched``: so
    had the host launched what leads to the next gate, which is ``routed`` when the routing is
    there, and ``seen`` by the host; infinite for the last one of a pass.
    """

    decided: float
    ended: float
    launched: float = math.inf
    routed: float = math.inf
    seen: float = math.inf


class Starts(NamedTuple):
    """Samples in µs.

    ``first``: from a gate's decision until the first prefetch begins. ``between``: from the end of
    a prefetch to the begin of the next one in the layer. ``onwards``: from the end of a layer's
    lanes until the host had launched what leads to the next gate; only then it looks after copies
    again. ``unseen``: from the begin of a prefetch until the host saw the next gate, where the
    routing had to wait for that and the copy still ran.
    """

    first: list[float]
    between: list[float]
    onwards: list[float]
    unseen: list[float]

    def extend(self, others: Starts) -> None:
        """Add other samples."""
        self.first.extend(others.first)
        self.between.extend(others.between)
        self.onwards.extend(others.onwards)
        self.unseen.extend(others.unseen)

    def after_layer(self, between_us: float) -> list[float]:
        """Return how long after the lanes' end a prefetch can begin whose turn has come.

        When the first one began says less: most have to wait for the end of the copy before as
        well, and those that were seen to wait for the host alone are those for which it took long.

        Args:
            between_us: usual between two prefetches: what the host does once it looks again.
        """
        return [after + between_us for after in self.onwards]


def nothing() -> Starts:
    """Return no samples."""
    return Starts([], [], [], [])


def starts_of(
    layers: Sequence[Layer], prefetches: Sequence[Span], demand: Sequence[Span]
) -> Starts:
    """Return what the copies of a pass show.

    Args:
        layers: of the pass, in their order.
        prefetches, demand: copies of the pass, either in the order in which they began.

    Returns:
        ``between`` of prefetches that both began before the layer's lanes had ended. ``first`` of
        layers in which the first one had nothing else to wait for: no demand transfer, and the
        copy before had ended at the gate.
    """
    found = nothing()
    found.onwards.extend(x.launched - x.ended for x in layers if x.launched < math.inf)
    everything = sorted([*((*copy, True) for copy in prefetches), *((*c, False) for c in demand)])
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        until = math.inf if following is None else following.decided
        mine = [i for i, c in enumerate(everything) if layer.decided <= c[0] < until]
        _note_layer(found, layer, everything, mine)
    return found


def _note_layer(
    found: Starts, layer: Layer, copies: Sequence[tuple[float, float, bool]], mine: Sequence[int]
) -> None:
    """Add the samples of one layer, in which copies ``mine`` began."""
    for i in mine:
        begin, end, ahead = copies[i]
        if not ahead:
            continue
        before = copies[i - 1][1] if i else -math.inf
        if i == mine[0] and before <= layer.decided:
            found.first.append(begin - layer.decided)
        elif i > mine[0] and copies[i - 1][2] and begin < layer.ended:
            found.between.append(begin - before)
        # One that had arrived by then did not keep the host: what it decided on the arrival may.
        kept = layer.ended <= begin < layer.seen < end
        if kept and layer.seen - layer.routed > NOTICED_US:
            found.unseen.append(layer.seen - begin)


@dataclass
class StartTimes:
    """Collects the samples of a run pass by pass.

    Args:
        clock: that set the marks. skip: passes that do not count.
    """

    clock: Clock
    skip: int
    found: Starts = field(default_factory=nothing)

    def note(self, p: int, marks: PassMarks) -> None:
        """Take in a pass that has just ended."""
        if p < self.skip:
            return
        following: list[LayerMarks | None] = [*marks.layers[1:], None]
        layers = [self._layer(*pair) for pair in zip(marks.layers, following, strict=True)]
        prefetches = self._spans(marks.prefetches)
        demand = self._spans([copy for layer in marks.layers for copy in layer.copies])
        self.found.extend(starts_of(layers, prefetches, demand))

    def _layer(self, marks: LayerMarks, following: LayerMarks | None) -> Layer:
        """Return a layer's times. Those of events leave out what decisions took: added again."""
        assert marks.lanes is not None
        decided = marks.gate_us + marks.paused_us - marks.paused_before_us
        ended = self.clock.time_us(marks.lanes)
        if following is None:
            return Layer(decided, ended)
        # After the lanes' end alone, where decisions on arrivals that were held do not count.
        launched = following.launched_us - (following.paused_before_us - marks.paused_us)
        seen = following.gate_us + following.paused_gate_us - following.paused_before_us
        return Layer(decided, ended, launched, self.clock.time_us(following.routed), seen)

    def _spans(self, copies: Iterable[Copy]) -> list[Span]:
        """Return when copies began and ended, in this order."""
        spans = []
        for copy in copies:
            assert copy.began is not None and copy.ended is not None
            spans.append((self.clock.time_us(copy.began), self.clock.time_us(copy.ended)))
        return sorted(spans)
