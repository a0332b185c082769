"""Repeated timing: on a GPU by events on its own clock, on the host by a synchronised clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of repeated times, µs (or of factors, no unit)."""

    median: float
    p10: float
    p90: float
    repeats: int


UNMEASURED = Spread(math.nan, math.nan, math.nan, 0)


def spread(samples: list[float]) -> Spread:
    """Summarise samples, rounded to a nanosecond so that files stay readable."""
    if not samples:
        return UNMEASURED
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Spread(
        median=round(statistics.median(ordered), 3),
        p10=round(ordered[math.floor(0.1 * last)], 3),
        p90=round(ordered[math.ceil(0.9 * last)], 3),
        repeats=len(samples),
    )


@dataclass(frozen=True)
class Clock:
    """How to time work on one device, and how often.

    A point is measured in up to ``rounds`` visits, so that a disturbance of the machine meets
    one visit and not the median. ``most`` bounds the repeats of a visit; within that, a visit may
    take ``budget_us``. What takes longer is measured once, in the first visit alone.
    """

    device: torch.device
    rounds: int = 2
    most: int = 12
    warm_up: int = 3
    budget_us: float = 30_000.0

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def device_times(self, call: Call) -> list[float]:
        """Time a call on the device, each repeat from an idle device, as after a gate; µs."""
        once = self._between_events if self.device.type == "cuda" else self._host_once
        return self._visit(call, once)

    def host_times(self, call: Call) -> list[float]:
        """Time a call on the host's clock, from an idle device until it is idle again; µs."""
        return self._visit(call, self._host_once)

    def is_long(self, samples: list[float]) -> bool:
        """Whether a point is too long to be visited again."""
        return bool(samples) and samples[0] > self.budget_us

    def _visit(self, call: Call, once: Callable[[Call], float]) -> list[float]:
        taken = self._host_once(call)
        for _ in range(self.warm_up - 1):
            if taken > self.budget_us / 4:
                break
            taken = self._host_once(call)
        repeats = max(1, min(self.most, int(self.budget_us / max(taken, 1.0))))
        return [once(call) for _ in range(repeats)]

    def _host_once(self, call: Call) -> float:
        self.synchronize()
        start = time.perf_counter_ns()
        call()
        self.synchronize()
        return (time.perf_counter_ns() - start) / 1e3

    def _between_events(self, call: Call) -> float:
        first = torch.cuda.Event(enable_timing=True)
        last = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        first.record()
        call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) * 1e3
