"""Whether the machine was as fast in a replay as when its profile was measured."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.averages import ratio
from oled_sim.validation.measured import About

SAME = 0.05
"""Up to this relative difference a machine counts as being as it was profiled."""


@dataclass(frozen=True)
class HostSpeed:
    """Times of the host's checks beside the profile's, (now - then) / then; median repetition.

    ``cpu_job``: a job of the CPU lane. ``launch``: launching and waiting for an empty kernel.
    ``worst_cpu_job``: of the repetition that is farthest from the profile.
    """

    cpu_job: float
    launch: float
    worst_cpu_job: float

    @property
    def state(self) -> str:
        """Whether the CPU was as in the profile, faster, slower, or changing between both."""
        if abs(self.worst_cpu_job) <= SAME:
            return "CPU as profiled"
        if abs(self.cpu_job) <= SAME:
            return "CPU changing"
        return "CPU slower" if self.cpu_job > 0 else "CPU faster"


def host_speed(about: About, costs: LaneCosts) -> HostSpeed | None:
    """Return how fast the host was, or None where that was not measured."""
    if not about.speeds:
        return None
    launch_us = costs.profile.synchronize.median
    jobs = []
    for speed in about.speeds:
        tokens = speed.cpu_experts * speed.cpu_tokens_per_expert
        then_us = costs.cpu_experts_us(speed.cpu_experts, tokens)
        jobs.append(ratio(speed.cpu_us - then_us, then_us))
    launches = [ratio(s.synchronize_us - launch_us, launch_us) for s in about.speeds]
    return HostSpeed(statistics.median(jobs), statistics.median(launches), max(jobs, key=abs))
