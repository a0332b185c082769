"""Repeated timing: on a GPU by events on its own clock, on the host by a synchronised clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from oled_sim.costs.profile import Quantiles

Call = Callable[[], object]
Mark = torch.cuda.Event | float
"""A point in the device's work: an event, or on a CPU device the host's time, µs."""


def spread(samples: list[float]) -> Quantiles:
    """Summarise at least one sample, rounded to a nanosecond so that files stay readable."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Quantiles(
        median=round(statistics.median(ordered), 3),
        p10=round(ordered[math.floor(0.1 * last)], 3),
        p90=round(ordered[math.ceil(0.9 * last)], 3),
        repeats=len(samples),
        mean=round(statistics.fmean(ordered), 3),
    )


def spread_over(rounds: Sequence[Sequence[float]]) -> Quantiles:
    """Summarise samples of several rounds; the mean is the median of the rounds' means.

    A round in which neighbours of a shared machine disturb it is one of many then.
    """
    found = spread([sample for samples in rounds for sample in samples])
    usual = statistics.median(statistics.fmean(samples) for samples in rounds)
    return msgspec.structs.replace(found, mean=round(usual, 3))


@dataclass(frozen=True)
class Clock:
    """How to time work on one device, and how often.

    A point is measured in up to ``rounds`` visits, so that a disturbance of the machine meets
    one visit and not the median. ``most`` bounds the repeats of a visit; within that, a visit may
    take ``budget_us``. What takes longer is measured once a visit, in no more than two visits, and
    in one if it takes four times as long.
    """

    device: torch.device
    rounds: int = 2
    most: int = 12
    warm_up: int = 3
    budget_us: float = 30_000.0

    @property
    def cuda(self) -> bool:
        """Whether the device has a clock and streams of its own."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def mark(self, stream: torch.cuda.Stream | None = None) -> Mark:
        """Return a mark behind all that a stream, by default the current one, was given."""
        if not self.cuda:
            return time.perf_counter_ns() / 1e3
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def device_times(self, call: Call) -> list[float]:
        """Time a call on the device, each repeat from an idle device, as after a gate; µs."""
        return self.repeat(lambda: self._from_idle(call))

    def device_time(self, call: Call, stream: torch.cuda.Stream | None = None) -> float:
        """Time one call on a stream of the device, by default the current one, µs."""
        first = self.mark(stream)
        call()
        last = self.mark(stream)
        self.synchronize()
        return between_us(first, last)

    def host_times(self, call: Call) -> list[float]:
        """Time a call on the host's clock, from an idle device until it is idle again; µs."""
        return self.repeat(lambda: self._host_once(call))

    def repeat(self, sample: Callable[[], float]) -> list[float]:
        """Take samples, in µs, as often as the budget of a visit allows, after a warm-up.

        What takes longer than that is its own warm-up.
        """
        taken = sample()
        if taken > self.budget_us:
            return [taken]
        for _ in range(self.warm_up - 1):
            if taken > self.budget_us / 4:
                break
            taken = sample()
        repeats = max(1, min(self.most, int(self.budget_us / max(taken, 1.0))))
        return [sample() for _ in range(repeats)]

    def wants(self, samples: list[float]) -> bool:
        """Whether a point with these samples is to be visited again."""
        if not samples:
            return False
        if samples[0] > self.budget_us:
            return samples[0] <= 4 * self.budget_us and len(samples) < 2
        return True

    def _host_once(self, call: Call) -> float:
        self.synchronize()
        start = time.perf_counter_ns()
        call()
        self.synchronize()
        return (time.perf_counter_ns() - start) / 1e3

    def _from_idle(self, call: Call) -> float:
        self.synchronize()
        return self.device_time(call)


def between_us(first: Mark, last: Mark) -> float:
    """Return the time between two marks that have been passed, µs."""
    if isinstance(first, torch.cuda.Event):
        assert isinstance(last, torch.cuda.Event)
        return first.elapsed_time(last) * 1e3
    assert not isinstance(last, torch.cuda.Event)
    return last - first
