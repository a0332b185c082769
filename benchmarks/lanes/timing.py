"""Repeated timing: on a GPU by events on its own clock, on the host by a synchronised clock."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Call = Callable[[], object]
WARM_UP = 3
LONG_US = 200_000.0


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of repeated times, µs (or of factors, no unit)."""

    median: float
    p10: float
    p90: float
    repeats: int

    def scaled(self, factor: float) -> Spread:
        """Return the same spread in another unit."""
        return spread([self.median * factor, self.p10 * factor, self.p90 * factor], self.repeats)


UNMEASURED = Spread(math.nan, math.nan, math.nan, 0)


def spread(samples: list[float], repeats: int | None = None) -> Spread:
    """Summarise samples, rounded to a nanosecond so that files stay readable."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Spread(
        median=round(statistics.median(ordered), 3),
        p10=round(ordered[round(0.1 * last)], 3),
        p90=round(ordered[round(0.9 * last)], 3),
        repeats=repeats or len(samples),
    )


@dataclass(frozen=True)
class Clock:
    """How to time work on one device, and how many times to repeat it.

    ``most`` and ``least`` bound the repeats; in between, a measurement may take ``budget_us``.
    """

    device: torch.device
    most: int = 30
    least: int = 5
    budget_us: float = 60_000.0

    def synchronize(self) -> None:
        """Wait until the device has finished everything."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def repeats(self, once_us: float) -> int:
        """Return how often to repeat a call; a call of over 0.2 s is measured once more only."""
        if once_us > LONG_US:
            return 1
        return max(self.least, min(self.most, int(self.budget_us / max(once_us, 1.0))))

    def device_times(self, call: Call) -> Spread:
        """Time a call on the device, each repeat from an idle device, as after a gate."""
        times = self.repeats(self._warm_up(call))
        if self.device.type == "cuda":
            return spread([self._between_events(call) for _ in range(times)])
        return spread([self._host_once(call) for _ in range(times)])

    def host_times(self, call: Call) -> Spread:
        """Time a call on the host's clock, from an idle device until the device is idle."""
        times = self.repeats(self._warm_up(call))
        return spread([self._host_once(call) for _ in range(times)])

    def _warm_up(self, call: Call) -> float:
        """Call a few times; return the last duration in µs on the host's clock."""
        taken = self._host_once(call)
        for _ in range(WARM_UP - 1):
            if taken > LONG_US:
                break
            taken = self._host_once(call)
        return taken

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
