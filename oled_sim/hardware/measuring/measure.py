"""Everything that a profile holds, measured one table after another."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace

import msgspec
import torch

from oled_sim.costs.profile import FORMAT, GeometryFields, Interference, Origin, Profile, Quantiles
from oled_sim.geometry import CostGeometry
from oled_sim.hardware import identity
from oled_sim.hardware.measuring.axes import Axes, cpu_axes, full_axes, quick_axes
from oled_sim.hardware.measuring.batches import L2_MULTIPLE_BYTES, measure_batches
from oled_sim.hardware.measuring.experts import (
    measure_cpu_experts,
    measure_cpu_link,
    measure_gpu_experts,
)
from oled_sim.hardware.measuring.host import HostTrials
from oled_sim.hardware.measuring.interference import SlowDowns
from oled_sim.hardware.measuring.layers import measure_layers
from oled_sim.hardware.measuring.links import measure_h2d, measure_links
from oled_sim.hardware.measuring.rig import Rig, built
from oled_sim.hardware.measuring.sweep import Progress, Sweep
from oled_sim.hardware.measuring.timing import Clock, spread
from oled_sim.hardware.place import Place

CACHE_BYTES, SMALL_CACHE_BYTES = 8 << 30, 64 << 20
"""Keys and values that a batch's attention goes through, on a GPU and elsewhere."""
TRIES, QUICK_TRIES = 10, 1
"""Samples of a lane beside others in a round."""
LAUNCHES = 100


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        cost: sizes; ``weight_bytes`` must be those of the place's dtype.
        place: device and dtype. workers: of the CPU lane.
        block: tokens of a pass that runs as graphs, and those below.
        quick: a few points, to see that everything works.
        name: of the profile. note: a remark to keep in it.
    """

    cost: CostGeometry
    place: Place
    workers: int
    block: int = 32
    quick: bool = False
    name: str = "this-machine"
    note: str = ""

    @property
    def axes(self) -> Axes:
        """Where to measure."""
        if self.quick:
            return quick_axes(self.cost, self.block)
        return (full_axes if self.place.cuda else cpu_axes)(self.cost, self.block)

    @property
    def clock(self) -> Clock:
        """How to time."""
        clock = Clock(self.place.device)
        return replace(clock, rounds=1, most=3, budget_us=3_000.0) if self.quick else clock


@dataclass(frozen=True)
class Measured:
    """A profile, and how many seconds each step took, ``total`` last."""

    profile: Profile
    seconds: dict[str, float]


@torch.inference_mode()
def measure(plan: Plan, on_progress: Progress = lambda *_: None) -> Measured:
    """Measure every lane of this machine.

    Raises:
        CapacityError: not enough memory on the host or the GPU.
        ProfileError: the lanes were too disturbed to see how they slow each other.
        UsageError: torch cannot serve so many workers.
    """
    start = time.perf_counter()
    sweep = Sweep(plan.clock, on_progress)
    identity.share_cores(plan.place.device, plan.workers)
    with (
        built(plan.cost, plan.axes, plan.place, plan.workers, quick=plan.quick) as rig,
        closing(HostTrials(rig, quick=plan.quick)) as trials,
    ):
        sweep.seconds["weights"] = round(time.perf_counter() - start, 2)

        slow_downs = SlowDowns(sweep, rig, QUICK_TRIES if plan.quick else TRIES)

        def what_varies() -> None:
            measure_cpu_experts(sweep, rig)
            with sweep.step("host"):
                trials.run()

        between = (lambda: None) if plan.quick else what_varies
        _measure_all(sweep, rig, plan, slow_downs.run, between)
        what_varies()
        profile = _profile(plan, sweep, slow_downs.found(), *_overheads(sweep))
        host = trials.compare(profile)
    sweep.seconds["total"] = round(time.perf_counter() - start, 2)
    return Measured(msgspec.structs.replace(profile, host=host), sweep.seconds)


def _profile(
    plan: Plan, sweep: Sweep, interference: Interference, launch: Quantiles, synchronize: Quantiles
) -> Profile:
    return Profile(
        format=FORMAT,
        name=plan.name,
        status="measured",
        provisional=False,
        origin=Origin(datetime.date.today(), "oled-sim profile", identity.revision(), plan.note),
        hardware=identity.hardware(plan.place.device, plan.workers),
        software=identity.software(),
        geometry=GeometryFields(**asdict(plan.cost)),
        launch=launch,
        synchronize=synchronize,
        interference=interference,
        **sweep.tables,  # type: ignore[arg-type]
    )


def _measure_all(
    sweep: Sweep, rig: Rig, plan: Plan, slow_downs: Callable[[], None], between: Callable[[], None]
) -> None:
    """Fill all other tables, with what varies most between them."""
    small = plan.quick or not plan.place.cuda
    slow_downs()
    measure_links(sweep, rig)
    between()
    slow_downs()
    measure_layers(sweep, rig, plan.block)
    cache_bytes = SMALL_CACHE_BYTES if small else CACHE_BYTES
    measure_batches(sweep, rig, cache_bytes, 0 if small else L2_MULTIPLE_BYTES)
    between()
    slow_downs()
    measure_gpu_experts(sweep, rig)
    between()
    slow_downs()
    # After the slow-downs, which once could not be measured with these ways captured before: it
    # seems that on a stream of their own they waited for what another one had queued.
    measure_cpu_link(sweep, rig, block=plan.block)
    between()
    measure_h2d(sweep, rig)  # again


def _overheads(sweep: Sweep) -> tuple[Quantiles, Quantiles]:
    """Host time of one kernel launch, and of launching and waiting for an empty kernel."""
    x = torch.zeros(1, device=sweep.clock.device)

    def launches() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    clock = sweep.clock
    launch = spread([us / LAUNCHES for us in clock.host_times(launches)])
    return launch, spread(clock.host_times(lambda: x.add_(1)))
