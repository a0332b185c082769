"""How much one lane slows down while others are busy.

The load of another lane is started before a measurement and must still be running after it; a
measurement that outlives its load does not count. Alone and beside a load, a lane is measured in
the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lanes.cpu import Task, Workers
from lanes.kernels import Call
from lanes.links import Copies
from lanes.timing import Clock, Spread, spread

SETTLE_S = 0.0005
LONGEST_US = 1e6


class Load(Protocol):
    """Work that keeps one lane busy for a while without the calling thread."""

    def start(self, duration_us: float) -> None:
        """Start work for at least this long."""
        ...

    def busy(self) -> bool:
        """Return whether the lane has been busy until now."""
        ...

    def stop(self) -> None:
        """Wait for the rest."""
        ...


@dataclass
class QueuedLoad:
    """Calls queued ahead on a CUDA stream; on a CPU device they have run when `start` returns."""

    call: Call
    once_us: float
    stream: torch.cuda.Stream | None
    end: torch.cuda.Event | None = None

    def start(self, duration_us: float) -> None:
        """Queue enough calls."""
        for _ in range(max(2, int(duration_us / self.once_us))):
            self.call()
        if self.stream is not None:
            self.end = torch.cuda.Event()
            self.end.record(self.stream)

    def busy(self) -> bool:
        """Return whether the last call has not finished."""
        return self.end is None or not self.end.query()

    def stop(self) -> None:
        """Wait for the last call."""
        if self.end is not None:
            self.end.synchronize()


@dataclass
class WorkerLoad:
    """Experts on the CPU workers."""

    workers: Workers
    task: Task
    once_us: float
    thread: threading.Thread | None = None

    def start(self, duration_us: float) -> None:
        """Start enough rounds of the task."""
        rounds = max(2, int(duration_us / self.once_us))
        self.thread = self.workers.in_background(self.task, rounds)

    def busy(self) -> bool:
        """Return whether the last round has not finished."""
        return self.thread is not None and self.thread.is_alive()

    def stop(self) -> None:
        """Wait for the last round."""
        if self.thread is not None:
            self.thread.join()


@dataclass(frozen=True)
class Lane:
    """A lane's typical work: ``sample`` runs and times it once in µs; ``load`` keeps it busy."""

    sample: Callable[[], float]
    load: Load


def slowdowns(clock: Clock, lanes: dict[str, Lane], tries: int) -> dict[str, dict[str, Spread]]:
    """Return per lane its time alone, and its slow-down beside each other lane and beside both."""
    result: dict[str, dict[str, Spread]] = {}
    for name, lane in lanes.items():
        alone = spread(_beside(clock, lane, [], 0.0, tries))
        result[name] = {"alone_us": alone}
        others = {o: [lanes[o].load] for o in lanes if o != name}
        others["both"] = [load for loads in others.values() for load in loads]
        for other, loads in others.items():
            samples = _beside(clock, lane, loads, alone.median, tries)
            result[name][other] = spread([max(1.0, t / alone.median) for t in samples])
    return result


def _beside(
    clock: Clock, lane: Lane, loads: list[Load], alone_us: float, tries: int
) -> list[float]:
    """Time a lane under load in µs; a sample counts only if every load outlived it."""
    samples: list[float] = []
    duration = 3 * alone_us + 3_000
    while len(samples) < tries and duration < LONGEST_US:
        for load in loads:
            load.start(duration)
        time.sleep(SETTLE_S)
        taken = lane.sample()
        if all(load.busy() for load in loads):
            samples.append(taken)
        else:
            duration *= 1.3
        for load in loads:
            load.stop()
        clock.synchronize()
    return samples


def event_sample(
    call: Call, stream: torch.cuda.Stream, lead: Call | None = None
) -> Callable[[], float]:
    """Return a sampler of a call's time in µs on a CUDA stream, after an untimed ``lead``."""

    def sample() -> float:
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            if lead is not None:
                lead()
            first.record(stream)
            call()
            last.record(stream)
        last.synchronize()
        return first.elapsed_time(last) * 1e3

    return sample


def host_sample(call: Call) -> Callable[[], float]:
    """Return a sampler of a call's time in µs on the host's clock, for calls that wait."""

    def sample() -> float:
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    return sample


def copy_queue(copies: Copies, size_bytes: int, count: int) -> Call:
    """Return ``count`` queued copies as one call."""

    def run() -> None:
        for _ in range(count):
            copies.one(size_bytes)

    return run
