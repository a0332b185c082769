"""How fast the host is right now: a job and a launch that the profile has timed, too.

On a shared machine the same work takes longer at one time than at another. A replay measures these
two before every repetition, so that a report can tell a machine that has changed since the profile
from a prediction that is wrong. Nothing is calibrated by them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

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
    """

    def __init__(self, machine: Machine, cost: CostGeometry, tokens: int) -> None:
        self._experts = min(EXPERTS, cost.experts, max(1, cost.top_k * tokens // PER_EXPERT))
        self._lane, self._clock = machine.cpu, Clock(machine.place.device)
        device, dtype = machine.place.device, machine.place.dtype
        self._one = torch.zeros(1, device=device)
        x = torch.full((tokens, cost.hidden_size), 0.5, device=device, dtype=dtype)
        rotation = Rotation(len(machine.experts.packed), cost.experts)
        parts = _Parts(cost, rotation, machine.cpu, x)
        self._job = LaneJob(parts, self._experts, PER_EXPERT)

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
