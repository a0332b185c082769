"""Routed experts: the grouped kernel on the GPU, and the CPU lane."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.measuring.events import Rotation, even_rows
from oled_sim.hardware.measuring.rig import SEED, Rig
from oled_sim.hardware.measuring.sweep import Sweep
from oled_sim.hardware.measuring.timing import Call
from oled_sim.hardware.streams import stream_for


def grouped_call(rig: Rig, experts: int, per_expert: int) -> Call:
    """Return the grouped kernel over ``experts`` slots at random with ``per_expert`` rows each."""
    rows = even_rows(experts, per_expert, rig.cost.top_k)
    draw = np.random.default_rng(SEED)
    x, out = rig.x[: rows.tokens], rig.out[: rows.tokens * rig.cost.top_k]
    which = np.arange(experts, dtype=np.int32)
    choices = [draw.permutation(rig.slab.slots)[:experts].astype(np.int32) for _ in range(16)]
    turn = 0

    def run() -> None:
        nonlocal turn
        turn += 1
        rig.grouped.load(rows)
        rig.grouped.run(x, which, choices[turn % len(choices)], out)

    return run


class HasLane(Protocol):
    """What a job of the CPU lane is made of: sizes, the next experts, the lane, inputs [T, h]."""

    @property
    def cost(self) -> CostGeometry: ...  # noqa: D102
    @property
    def rotation(self) -> Rotation: ...  # noqa: D102
    @property
    def lane(self) -> CpuLane: ...  # noqa: D102
    @property
    def x(self) -> Tensor: ...  # noqa: D102


class LaneJob:
    """A job of the CPU lane with the next experts at every call.

    A call polls until the sums are there and their way back is queued. The lane's kernels get a
    stream of their own: what is queued on the GPU's comes later than the inputs in a layer, too.

    Attributes:
        stream: that stream, or None without a GPU.
    """

    def __init__(
        self, rig: HasLane, experts: int, per_expert: int, tokens: int | None = None
    ) -> None:
        self._rig, self._which = rig, np.arange(experts)
        self._like = even_rows(experts, per_expert, rig.cost.top_k, tokens)
        self._x = rig.x[: self._like.tokens]
        cuda = self._x.is_cuda
        self.stream = stream_for("cpu link", self._x.device) if cuda else None

    def __call__(self) -> None:
        """Run the job."""
        self.submit()
        self.finish()

    def submit(self) -> None:
        """Hand the job to the lane."""
        layer, rows = self._rig.rotation.rows(self._like)
        with self._aside():
            self._rig.lane.submit(layer, self._x, rows, self._which)

    def wait(self) -> None:
        """Poll until the sums are there."""
        while not self._rig.lane.poll():
            pass

    def finish(self) -> None:
        """Poll until it is done, and queue the way back of the sums."""
        with self._aside():
            self._rig.lane.result()

    def _aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()


def measure_gpu_experts(sweep: Sweep, rig: Rig) -> None:
    """Grouped kernel by experts × tokens per expert."""
    a = rig.axes.on_gpu

    def times(n: int, t: int) -> list[float]:
        if not a.reachable(n, t, rig.cost):
            return []
        call = grouped_call(rig, n, t)
        call()  # compiled at its first call, which would count as that of a long point
        return sweep.clock.device_times(call)

    sweep.grid("gpu_experts", a.experts, a.tokens_per_expert, times)


def measure_cpu_experts(sweep: Sweep, rig: Rig) -> None:
    """Makespan of the workers by experts × tokens per expert, while this thread polls.

    One round: neighbours take a shared machine's memory by turns, so this is called again and again
    between other tables.
    """
    a = rig.axes.on_cpu

    def times(n: int, t: int) -> list[float]:
        if not a.reachable(n, t, rig.cost) or a.between(n, t, rig.cost):
            return []
        job = LaneJob(rig, n, t)

        def sample() -> float:
            sweep.clock.synchronize()
            job()
            return rig.lane.times.compute_us

        return sweep.clock.repeat(sample)

    sweep.grid("cpu_experts", a.experts, a.tokens_per_expert, times, rounds=1)
    sweep.fill_between_rows("cpu_experts", lambda n, t: a.between(n, t, rig.cost))


def measure_cpu_link(sweep: Sweep, rig: Rig, block: int) -> None:
    """What a job of the CPU lane takes besides the workers' makespan, by tokens of the event.

    From handing it in until the workers begin, and on the GPU until it has read the sums. Up to
    ``block`` tokens both ways are captured, as a replay does.
    """

    def times(tokens: int) -> list[float]:
        if tokens <= block:
            rig.lane.capture(rig.x[:tokens])
        job = LaneJob(rig, 1, 1, tokens)
        job()  # the first of a shape is compiled, which would count as a long job

        def sample() -> float:
            sweep.clock.synchronize()
            job.submit()
            job.wait()
            found = rig.lane.times
            before = found.end_us - found.begin_us - found.compute_us
            return before + sweep.clock.device_time(job.finish, job.stream)

        return sweep.clock.repeat(sample)

    sweep.curve("cpu_link", rig.axes.tokens, times)
