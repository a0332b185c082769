"""How fast the host is right now: a job and a launch that the profile has timed, too.

On a shared machine the same work takes longer at one time than at another. A replay measures these
two before every repetition, so that a report can tell a machine that has changed since the profile
from a prediction that is wrong. With patience it also waits a while for the machine to be as it was
profiled. Nothing is calibrated by them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from oled_sim.costs.lanes import LaneCosts
from oled_sim.geometry import CostGeometry
from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.machine import Machine
from oled_sim.hardware.measuring.events import Rotation
from oled_sim.hardware.measuring.experts import LaneJob
from oled_sim.hardware.measuring.timing import Clock
from oled_sim.validation.measured import Speed

EXPERTS, PER_EXPERT = 12, 2
"""Sizes of the job, those of a decode event."""
REPEATS = 12
SLOWER = 0.1
"""How much longer than in the profile the job may take for the machine to count as undisturbed."""
LONGEST_WAIT_S = 3.0
"""For one repetition."""


@dataclass(frozen=True)
class _Parts:
    cost: CostGeometry
    rotation: Rotation
    lane: CpuLane
    x: Tensor


class SpeedCheck:
    """Times a job of the CPU lane, over experts that come in turn, and an empty kernel.

    Args:
        machine: whose lanes; none of them may be at work.
        cost: its sizes.
        tokens: of the largest event that the job may be.
        patience_s: for how long repetitions may wait, all of them together.
    """

    def __init__(
        self, machine: Machine, cost: CostGeometry, tokens: int, patience_s: float = 0.0
    ) -> None:
        self._patience_s = patience_s
        self._experts = min(EXPERTS, cost.experts, max(1, cost.top_k * tokens // PER_EXPERT))
        self._lane, self._clock = machine.cpu, Clock(machine.place.device)
        device, dtype = machine.place.device, machine.place.dtype
        self._one = torch.zeros(1, device=device)
        x = torch.full((tokens, cost.hidden_size), 0.5, device=device, dtype=dtype)
        rotation = Rotation(len(machine.experts.packed), cost.experts)
        parts = _Parts(cost, rotation, machine.cpu, x)
        self._job = LaneJob(parts, self._experts, PER_EXPERT)

    def settled(self, costs: LaneCosts) -> Speed:
        """Return how long both take, once the job takes about as long as in the profile.

        Neighbours on a shared machine disturb it for seconds. When patience is used up, what was
        found last counts.

        Args:
            costs: of the profile.
        """
        usual_us = costs.cpu_experts_us(self._experts, self._experts * PER_EXPERT)
        speed = settled(self.measure, usual_us, min(self._patience_s, LONGEST_WAIT_S))
        self._patience_s = max(0.0, self._patience_s - speed.waited_s)
        return speed

    def measure(self) -> Speed:
        """Return how long both take now, medians."""
        self._job()  # the first of a shape is compiled
        return Speed(
            cpu_experts=self._experts,
            cpu_tokens_per_expert=PER_EXPERT,
            cpu_us=statistics.median(self._job_us() for _ in range(REPEATS)),
            synchronize_us=statistics.median(self._clock.host_times(self._launch)),
        )

    def _job_us(self) -> float:
        self._clock.synchronize()
        self._job()
        return self._lane.times.compute_us

    def _launch(self) -> None:
        self._one.add_(1)


def settled(measure: Callable[[], Speed], usual_us: float, patience_s: float) -> Speed:
    """Measure until the job takes no more than a tenth above ``usual_us``, or patience ends.

    Returns:
        What was found last, with the time since the first answer.
    """
    speed, waited_s = measure(), 0.0
    start = time.perf_counter()
    while speed.cpu_us > (1.0 + SLOWER) * usual_us and waited_s < patience_s:
        speed = measure()
        waited_s = time.perf_counter() - start
    return msgspec.structs.replace(speed, waited_s=round(waited_s, 3))
