"""Marks in the course of the GPU's work, and when they were passed, on the host's clock.

On CUDA a mark is an event with timing; on a CPU device work has ended when a call returns, and a
mark is the time of that moment. All times are float64 µs of :func:`now_us`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


def now_us() -> float:
    """Return the host's monotonic clock, µs."""
    return time.perf_counter_ns() / 1e3


LASTING = 1 << 15
"""Marks of copies that are kept apart: many times the experts of a pass."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point in a stream: an event on CUDA, or else the time when it was passed."""

    event: torch.cuda.Event | None
    at_us: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether all work before the mark has ended."""
        return self.event is None or self.event.query()


class Clock:
    """Sets marks, and tells their times once they are passed.

    Times of events are known from one another only; :meth:`start` sets an anchor on an idle device
    whose time on the host's clock is known to a launch.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        # Asking for the current stream costs as much as recording an event.
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        self._pool: list[torch.cuda.Event] = []
        self._used = self._turn = 0
        self._lasting = [torch.cuda.Event(enable_timing=True) for _ in range(LASTING * self._cuda)]
        self._anchor = Mark(None)
        self._anchored_us = 0.0

    def start(self) -> None:
        """Begin anew: marks set before may be reused. The device must be idle."""
        self._used = 0
        self._anchored_us = now_us()
        self._anchor = self.mark()

    def copy_mark(self, stream: torch.cuda.Stream) -> Mark:
        """Set a mark that outlives :meth:`start`: copies run on from pass to pass.

        It is reused after as many more, far beyond the copies of a pass.
        """
        event = self._lasting[self._turn]
        self._turn = (self._turn + 1) % len(self._lasting)
        event.record(stream)
        return Mark(event)

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """Set a mark in a stream, by default the one that was current when the clock was made."""
        if not self._cuda:
            return Mark(None, now_us())
        if self._used == len(self._pool):
            self._pool.append(torch.cuda.Event(enable_timing=True))
        event = self._pool[self._used]
        self._used += 1
        event.record(stream or self._stream)
        return Mark(event)

    def time_us(self, mark: Mark) -> float:
        """Return when a mark was passed; it must have been."""
        if mark.event is None:
            return mark.at_us
        assert self._anchor.event is not None
        return self._anchored_us + self._anchor.event.elapsed_time(mark.event) * 1e3
