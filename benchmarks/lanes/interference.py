"""How much one lane slows down while others are busy.

The load of another lane is queued before a measurement and must still be running after it; a
measurement that outlives its load does not count.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from lanes.cpu import Task, Workers
from lanes.kernels import Call
from lanes.links import Copies
from lanes.timing import Clock, Spread, spread

TRIES = 40


class Load(Protocol):
    """Work that keeps one lane busy for a while without the calling thread."""

    def start(self, duration_us: float) -> None:
        """Queue work for at least this long."""
        ...

    def busy(self) -> bool:
        """Return whether the lane has been busy until now."""
        ...

    def stop(self) -> None:
        """Wait for the rest."""
        ...


@dataclass
class QueuedLoad:
    """Calls queued ahead on a CUDA stream; on a CPU device they run at once and never count."""

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

    def start(self, duration_us: float) -> None:
        """Queue enough calls."""
        for _ in range(max(2, int(duration_us / self.once_us))):
            self.workers.start(self.task)

    def busy(self) -> bool:
        """Return whether there are shares left for every worker."""
        return self.workers.running()

    def stop(self) -> None:
        """Wait for the last share."""
        self.workers.wait()


@dataclass(frozen=True)
class Lane:
    """A lane's typical work: ``sample`` runs and times it once in µs; ``load`` keeps it busy."""

    sample: Callable[[], float]
    load: Load


def slowdowns(clock: Clock, lanes: dict[str, Lane], tries: int = TRIES) -> dict[str, dict]:
    """Return per lane the spread of its slow-down beside each other lane and beside both."""
    result: dict[str, dict[str, Spread]] = {}
    for name, lane in lanes.items():
        others = {o: [lanes[o].load] for o in lanes if o != name}
        others["both"] = [load for loads in others.values() for load in loads]
        alone = spread([lane.sample() for _ in range(tries)])
        result[name] = {"alone_us": alone}
        for other, loads in others.items():
            samples = _beside(clock, lane, loads, alone.median, tries)
            beside = spread(samples).scaled(1 / alone.median)
            result[name][other] = _at_least_one(beside)
    return result


def _beside(
    clock: Clock, lane: Lane, loads: list[Load], alone_us: float, tries: int
) -> list[float]:
    """Time a lane under load; each sample counts only if every load outlived it."""
    samples: list[float] = []
    duration = 3 * alone_us + 3_000
    for _ in range(3 * tries):
        if len(samples) == tries:
            break
        for load in loads:
            load.start(duration)
        time.sleep(0.0005)  # let the load get going
        taken = lane.sample()
        if all(load.busy() for load in loads):
            samples.append(taken)
        else:
            duration *= 1.5
        for load in loads:
            load.stop()
        clock.synchronize()
    if not samples:
        raise RuntimeError("no load outlived the measurement beside it")
    return samples


def _at_least_one(factor: Spread) -> Spread:
    return Spread(
        max(1.0, factor.median), max(1.0, factor.p10), max(1.0, factor.p90), factor.repeats
    )


def event_sample(call: Call, stream: torch.cuda.Stream) -> Callable[[], float]:
    """Return a sampler of a call's time on a CUDA stream, waiting for that stream alone."""

    def sample() -> float:
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        first.record(stream)
        with torch.cuda.stream(stream):
            call()
        last.record(stream)
        last.synchronize()
        return first.elapsed_time(last) * 1e3

    return sample


def host_sample(call: Call) -> Callable[[], float]:
    """Return a sampler of a call's time on the host's clock, for calls that wait themselves."""

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
