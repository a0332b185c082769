"""The copy engines: host to GPU and back by size, and the round trip of the CPU lane."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from lanes.timing import Clock
from oled_sim.geometry import CostGeometry

QUEUE = 8


class Ring:
    """Slices of one flat byte buffer, the next one at every call."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer, self.offset = buffer, 0

    def take(self, size_bytes: int) -> Tensor:
        """Return the next ``size_bytes`` bytes, wrapping at the end."""
        if self.offset + size_bytes > self.buffer.numel():
            self.offset = 0
        piece = self.buffer[self.offset : self.offset + size_bytes]
        self.offset += -(-size_bytes // 512) * 512
        return piece


class Copies:
    """Copies of one direction on a stream of their own, as the copy engine runs them."""

    def __init__(self, clock: Clock, source: Tensor, target: Tensor) -> None:
        self.clock, self.source, self.target = clock, Ring(source), Ring(target)
        cuda = clock.device.type == "cuda"
        self.stream = torch.cuda.Stream(clock.device) if cuda else None

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
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(QUEUE + 1)]
        for mark in marks[:-1]:
            mark.record(self.stream)
            self.one(size_bytes)
        marks[-1].record(self.stream)
        self.clock.synchronize()
        ends = pairwise(marks[1:])  # the first copy waits for its launch
        return [a.elapsed_time(b) * 1e3 for a, b in ends]


def pageable(clock: Clock, size_bytes: int, target: Tensor) -> Callable[[], object]:
    """Return one copy from pageable host memory, which the driver stages itself."""
    source = Ring(torch.ones(max(size_bytes, 128 << 20), dtype=torch.uint8))
    ring = Ring(target)
    return lambda: ring.take(size_bytes).copy_(source.take(size_bytes))


def round_trip(clock: Clock, cost: CostGeometry, tokens: int) -> Callable[[], object]:
    """Return the CPU lane's copies: activations to the host, wait, sums back to the GPU."""
    cuda = clock.device.type == "cuda"
    shape = (tokens, cost.hidden_size)
    on_gpu = torch.zeros(shape, device=clock.device, dtype=torch.bfloat16)
    back = torch.zeros_like(on_gpu)
    host = torch.zeros(shape, dtype=torch.bfloat16, pin_memory=cuda)
    if not cuda:
        return lambda: (host.copy_(on_gpu), back.copy_(host))
    stream = torch.cuda.Stream(clock.device)

    def run() -> None:
        with torch.cuda.stream(stream):
            host.copy_(on_gpu, non_blocking=True)
            stream.synchronize()
            back.copy_(host, non_blocking=True)
            stream.synchronize()

    return run
