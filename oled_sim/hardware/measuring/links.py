"""The copy engines: host to GPU and back by size."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from oled_sim.hardware.measuring.rig import Rig
from oled_sim.hardware.measuring.sweep import Sweep
from oled_sim.hardware.measuring.timing import Clock, between_us
from oled_sim.hardware.streams import stream_for

QUEUE = 8
PAGEABLE_BYTES = 128 << 20


class Ring:
    """Slices of flat byte buffers, the next one at every call."""

    def __init__(self, *buffers: Tensor) -> None:
        self.buffers, self.number, self.offset = [_bytes(b) for b in buffers], 0, 0

    def take(self, size_bytes: int) -> Tensor:
        """Return the next ``size_bytes`` bytes, going on to the next buffer at an end."""
        if self.offset + size_bytes > self.buffers[self.number].numel():
            self.number, self.offset = (self.number + 1) % len(self.buffers), 0
        piece = self.buffers[self.number][self.offset : self.offset + size_bytes]
        self.offset += -(-size_bytes // 512) * 512
        return piece


class Copies:
    """Copies of one direction on a stream of their own, as the copy engine runs them."""

    def __init__(self, clock: Clock, source: Ring, target: Ring) -> None:
        self.clock, self.source, self.target = clock, source, target
        self.stream = stream_for("copies", clock.device) if clock.cuda else None

    def one(self, size_bytes: int) -> None:
        """Queue one copy."""
        target, source = self.target.take(size_bytes), self.source.take(size_bytes)
        if self.stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def times(self, size_bytes: int) -> list[float]:
        """Time each copy of a full queue, from the end of the one before to its own end; µs."""
        if self.stream is None:
            return self.clock.host_times(lambda: self.one(size_bytes))
        return self._queue(size_bytes) + self._queue(size_bytes)

    def _queue(self, size_bytes: int) -> list[float]:
        self.clock.synchronize()
        marks = []
        for _ in range(QUEUE):
            marks.append(self.clock.mark(self.stream))
            self.one(size_bytes)
        marks.append(self.clock.mark(self.stream))
        self.clock.synchronize()
        # The first copy waits for its launch.
        return [between_us(a, b) for a, b in pairwise(marks[1:])]


def expert_copies(rig: Rig, clock: Clock) -> Copies:
    """Return copies from the experts in host memory to slots of the GPU."""
    return Copies(clock, Ring(*rig.experts.packed), Ring(rig.slab.weights))


def measure_links(sweep: Sweep, rig: Rig) -> None:
    """H2D by size and pinning, and D2H."""
    clock, sizes = sweep.clock, _fitting(rig)
    landing = torch.zeros(sizes[-1], dtype=torch.uint8, pin_memory=clock.cuda)
    up = Copies(clock, Ring(rig.slab.weights), Ring(landing))
    measure_h2d(sweep, rig)
    sweep.curve("h2d_pageable", sizes, _pageable(clock, rig, sizes[-1]))
    sweep.curve("d2h", sizes, up.times)


def measure_h2d(sweep: Sweep, rig: Rig) -> None:
    """Pinned host to GPU by size."""
    sweep.curve("h2d", _fitting(rig), expert_copies(rig, sweep.clock).times)


def _fitting(rig: Rig) -> list[int]:
    """Return the sizes that the buffers hold."""
    room = min(*(p.nbytes for p in rig.experts.packed), rig.slab.weights.nbytes)
    return [size for size in rig.axes.copies if size <= room]


def _pageable(clock: Clock, rig: Rig, most_bytes: int) -> Callable[[int], list[float]]:
    """Return how copies from pageable host memory, which the driver stages itself, are timed."""
    memory = max(most_bytes, PAGEABLE_BYTES if clock.cuda else 0)
    source, target = Ring(torch.ones(memory, dtype=torch.uint8)), Ring(rig.slab.weights)
    return lambda size: clock.host_times(lambda: target.take(size).copy_(source.take(size)))


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.view(-1).view(torch.uint8)
