"""When the host starts prefetches, after a gate and after the one before: read off marks.

A copy engine that has nothing to do waits for the host. After a gate that first launches what was
decided there; later, while it waits for a lane, it notices each arrival, asks whether it may stay,
and starts the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from oled_sim.hardware.clock import Clock
from oled_sim.hardware.measured import PassMarks

Span = tuple[float, float]
"""Begin and end of a copy, µs."""


class Starts(NamedTuple):
    """Samples in µs.

    ``first``: from a gate's decision until the first prefetch begins. ``between``: from the end of
    a prefetch to the begin of the next one.
    """

    first: list[float]
    between: list[float]


def starts_of(gates: Sequence[float], copies: Sequence[Span]) -> Starts:
    """Return what the copies of a pass show.

    Args:
        gates: when the decision at each gate had been made, rising, µs.
        copies: prefetches of the pass in the order in which they began.

    Returns:
        ``between`` of copies that both began in one layer. ``first`` of layers in which the first
        one had nothing else to wait for: the copy before had ended at the gate.
    """
    first: list[float] = []
    between: list[float] = []
    for gate, following in zip(gates, [*gates[1:], float("inf")], strict=True):
        mine = [i for i, (begin, _) in enumerate(copies) if gate <= begin < following]
        between += [copies[i][0] - copies[i - 1][1] for i in mine[1:]]
        if mine and (mine[0] == 0 or copies[mine[0] - 1][1] <= gate):
            first.append(copies[mine[0]][0] - gate)
    return Starts(first, between)


@dataclass
class StartTimes:
    """Collects the samples of a run pass by pass.

    Args:
        clock: that set the marks. skip: passes that do not count.
    """

    clock: Clock
    skip: int
    found: Starts = field(default_factory=lambda: Starts([], []))

    def note(self, p: int, marks: PassMarks) -> None:
        """Take in a pass that has just ended."""
        if p < self.skip:
            return
        copies = []
        for copy in marks.prefetches:
            assert copy.began is not None and copy.ended is not None
            copies.append((self.clock.time_us(copy.began), self.clock.time_us(copy.ended)))
        # Marks are on the host's clock, times of events without what decisions took: added again.
        gates = [m.gate_us + m.paused_us - m.paused_before_us for m in marks.layers]
        pass_starts = starts_of(gates, sorted(copies))
        self.found.first.extend(pass_starts.first)
        self.found.between.extend(pass_starts.between)
