"""What the host adds when a run puts the parts together: measured by running, off any trace.

A few passes with made-up routes run on the lanes measured, through as many layers as the
model has (fewer would stay in the caches of host and GPU), and the simulator predicts the same
passes from the tables. What a pass, an event, an event with arrivals, one with a job of the CPU
lane and one with both take longer than their parts is the host's: Python between the launches, and
noticing that something has ended.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import Host, Profile, Quantiles
from oled_sim.costs.synthetic import affine_profile
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.state import CPU, H2D, T_BUSY, T_END, T_START
from oled_sim.geometry import CostGeometry, RoutingGeometry
from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.clock import Clock
from oled_sim.hardware.copy_lane import CopyLane
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.live import LivePace
from oled_sim.hardware.machine import Machine
from oled_sim.hardware.measuring.prefetch_starts import Starts, StartTimes
from oled_sim.hardware.measuring.rig import SEED, Rig
from oled_sim.hardware.measuring.timing import spread_over
from oled_sim.hardware.measuring.trials import (
    BESIDE,
    CONTEXT,
    JOB,
    RENEWED,
    STAGING,
    TOKENS,
    WARM_UP,
    Trial,
    policy_of,
    request_of,
    slots_of,
)
from oled_sim.hardware.replay import load_residents, no_garbage_collection
from oled_sim.hardware.shapes import expert_elements
from oled_sim.hardware.slab import Slab
from oled_sim.hardware.slot_map import SlotMap

COMPARED = ("hits", "copies", "jobs", "both")
"""Trials that are compared with the simulator. The others show by marks when prefetches start."""
TOLD_TOGETHER = (
    ("first_prefetch", "per_prefetch"),
    ("prefetch_after_layer", "gate_after_prefetch"),
)
"""Times of which a profile has both or neither, and the later ones only with those before."""
SHARE = 0.25
"""Of the GPU's free memory, what the experts of the trials' layers may take: the tables are
measured beside them."""


class Folded:
    """A CPU lane for more layers than there are in host memory: they come over and over.

    Attributes:
        computed_us: how long the workers computed, by job.
    """

    def __init__(self, lane: Any, layers: int) -> None:
        self._lane, self._layers = lane, layers
        self.computed_us: list[float] = []

    def submit(self, layer: int, *rest: Any) -> None:
        """Start a job with the experts of a layer that is in memory."""
        self._lane.submit(layer % self._layers, *rest)

    def result(self) -> torch.Tensor:
        """Return the sums of the last job."""
        sums = self._lane.result()
        self.computed_us.append(self._lane.times.compute_us)
        return sums

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)


class Repeated:
    """Host experts of a few layers as those of more."""

    def __init__(self, rig: Rig, layers: int) -> None:
        have = rig.experts.packed
        self.packed = [have[layer % len(have)] for layer in range(layers)]


@dataclass(frozen=True)
class Live:
    """A trial that the machine ran.

    ``computed_us``: how long the workers computed, by job. ``starts``: of its prefetches.
    """

    record: GroupRecord
    computed_us: NDArray[np.float64]
    starts: Starts


class HostTrials:
    """Runs trials on the machine now and then, and at last compares them with the simulator.

    A machine that others share is not as fast at one time as at another, and what the host adds
    follows the moment: it is measured in rounds between the tables.

    Args:
        rig: what is measured.
        quick: whether a few events do.
    """

    def __init__(self, rig: Rig, *, quick: bool) -> None:
        self._rig = rig
        self._machine = _machine(rig, depth(rig, quick=quick))
        few, many = (12, 16) if quick else (60, 120)
        self._trials = {
            "hits": Trial(0, 0, many),
            "copies": Trial(0, RENEWED, few),
            "jobs": Trial(JOB, 0, few),
            "both": Trial(JOB, BESIDE, few),
            "prefetches": Trial(0, 0, many, prefetches=True),
            "waits": Trial(JOB, 0, few, prefetches=True),
            "goes on": Trial(0, BESIDE, few, prefetches=True),
        }
        self._found: dict[str, list[Live]] = {name: [] for name in self._trials}
        # Nothing of a trial is decided by costs, and there are none yet.
        self._any_costs = LaneCosts(affine_profile(rig.cost), extrapolate=True)

    def run(self) -> None:
        """Run every trial once."""
        for name, trial in self._trials.items():
            self._found[name].append(_live(self._machine, self._any_costs, self._rig.cost, trial))

    def close(self) -> None:
        """Let the copy engine go."""
        self._machine.copies.close()

    def compare(self, profile: Profile) -> Host:
        """Return what the host adds to the parts that ``profile`` holds.

        When it starts prefetches is left out where the trials have not shown both times of it.
        """
        costs = LaneCosts(msgspec.structs.replace(profile, host=None), extrapolate=True)
        predicted = {name: self._simulated(self._trials[name], costs) for name in COMPARED}
        rounds = [
            self._added(dict(zip(self._found, live, strict=True)), predicted, costs)
            for live in zip(*self._found.values(), strict=True)
        ]
        found = {name: [r[name] for r in rounds if len(r[name])] for name in rounds[0]}
        told = True
        for pair in TOLD_TOGETHER:
            # Where kernels end as their launch returns, the host hardly ever waits for anything.
            told = told and all(found[name] for name in pair)
            if not told:
                found |= {name: [] for name in pair}
        return Host(**{name: over_rounds(samples) for name, samples in found.items() if samples})

    def _added(
        self, live: dict[str, Live], predicted: dict[str, GroupRecord], costs: LaneCosts
    ) -> dict[str, NDArray[np.float64]]:
        """Return what the host added in one round, samples in µs by the names of ``Host``.

        Differences are taken within a round: the machine is another one in the next.
        """
        hits, copies, jobs, both = (
            self._gaps(name, predicted[name], live[name], costs) for name in COMPARED
        )
        per_event, per_job = hits.events.mean(), jobs.events.mean()
        between, goes_on = np.array(live["waits"].starts.between), live["goes on"].starts
        usual = float(np.median(between)) if len(between) else np.inf
        return {
            "per_pass": hits.passes,
            "per_event": hits.events,
            "per_arrival": copies.events - per_event,
            "per_cpu_job": jobs.events - per_event,
            "per_prefetch": between,
            "first_prefetch": np.array(live["prefetches"].starts.first),
            "prefetch_after_layer": np.array(goes_on.after_layer(usual)),
            "gate_after_prefetch": np.array(goes_on.unseen),
            "per_cpu_job_beside_copies": both.events - max(per_event, per_job),
        }

    @property
    def _layers(self) -> int:
        return len(self._machine.experts.packed)

    def _simulated(self, trial: Trial, costs: LaneCosts) -> GroupRecord:
        # With a log hooks decide: compiling a whole loop would take longer than these passes do.
        found = _simulation(self._rig.cost, self._layers, costs, trial, keep_log=True)
        return _run(found, costs, trial)

    def _gaps(self, name: str, predicted: GroupRecord, live: Live, costs: LaneCosts) -> Gaps:
        """Return how a run on the machine differs from the simulated one."""
        trial, layers, runs = self._trials[name], self._layers, (predicted, live.record)
        lengths = [r.course.times[:, T_END] - r.course.times[:, T_START] for r in runs]
        whole = [r.course.pass_times[:, 1] - r.course.pass_times[:, 0] for r in runs]
        outside = [
            w - e.reshape(-1, layers).sum(axis=1) for w, e in zip(whole, lengths, strict=True)
        ]
        gaps = lengths[1] - lengths[0]
        if trial.on_cpu:  # what the workers themselves took longer than the table is not ours
            table = predicted.course.times[:, T_BUSY + CPU] - costs.cpu_link_us(TOKENS)
            gaps -= live.computed_us - table
        elif trial.renewed:  # nor what the copies themselves did
            copying = [r.course.times[:, T_BUSY + H2D] for r in runs]
            gaps -= np.nan_to_num(copying[1] - copying[0])
        return Gaps((outside[1] - outside[0])[WARM_UP:], gaps[WARM_UP * layers :])


def depth(rig: Rig, *, quick: bool) -> int:
    """Return through how many layers trials run: all that the model has, if the GPU holds them."""
    if quick or not rig.place.cuda:
        return min(2, rig.cost.moe_layers)
    free, _ = torch.cuda.mem_get_info(rig.place.device)
    layer_bytes = slots_of(rig.cost.experts) * expert_elements(rig.cost) * rig.place.item_bytes
    return max(1, min(rig.cost.moe_layers, int(SHARE * free / layer_bytes)))


@dataclass(frozen=True)
class Gaps:
    """Measured less predicted, µs: of what passes do besides events, and of events."""

    passes: NDArray[np.float64]
    events: NDArray[np.float64]


def _simulation(
    cost: CostGeometry, layers: int, costs: LaneCosts, trial: Trial, *, keep_log: bool = False
) -> Simulation:
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), cost.experts, cost.top_k)
    budget, rules = Budget(cache=slots_of(cost.experts)), Rules(staging=STAGING)
    policy = policy_of(geometry, trial)
    return Simulation(policy, geometry, costs, budget, rules, keep_log=keep_log)


def _run(simulation: Simulation, costs: LaneCosts, trial: Trial) -> GroupRecord:
    geometry = simulation.geometry
    batch = make_batch([request_of(geometry, trial)], geometry, costs)
    return simulation.run_group(Group("counted", (0,)), batch)


def _live(machine: Machine, costs: LaneCosts, cost: CostGeometry, trial: Trial) -> Live:
    """Run a trial on the machine."""
    layers = len(machine.experts.packed)
    lane: Any = machine.cpu
    simulation = _simulation(cost, layers, costs, trial)
    slots = SlotMap(layers, cost.experts, layers * slots_of(cost.experts) + STAGING)
    load_residents(machine, slots, simulation.state.pools.resident)
    lane.computed_us.clear()
    starts = StartTimes(machine.clock, WARM_UP)
    simulation.pace = pace = LivePace(machine, slots, on_pass=starts.note)
    with no_garbage_collection():
        record = _run(simulation, costs, trial)
    pace.leave()
    return Live(record, np.array(lane.computed_us), starts.found)


def _machine(rig: Rig, layers: int) -> Machine:
    """Return the rig's parts as a machine, ready to run passes of ``TOKENS`` tokens."""
    place, clock = rig.place, Clock(rig.place.device)
    backbone = Backbone(place, rig.cost, layers, TOKENS, CONTEXT + 2 * TOKENS, SEED)
    experts: Any = Repeated(rig, layers)
    slab = Slab(place, rig.cost, layers * slots_of(rig.cost.experts) + STAGING)
    machine = Machine(
        place=place,
        clock=clock,
        backbone=backbone,
        experts=experts,
        slab=slab,
        grouped=GroupedExperts(place, rig.cost, slab, TOKENS),
        copies=CopyLane(place, clock, experts, slab),
        cpu=Folded(rig.lane, len(rig.experts.packed)),  # type: ignore[arg-type]
        scale=backbone.config.routed_scaling_factor,
    )
    machine.get_ready([CONTEXT])
    return machine


def over_rounds(rounds: Sequence[NDArray[np.float64]]) -> Quantiles:
    """Summarise gaps of several rounds, in µs.

    Parts that overlap may take less than their sum, which counts as nothing.
    """
    found = spread_over([np.maximum(samples, 0.0).tolist() for samples in rounds])
    usual = statistics.median(float(samples.mean()) for samples in rounds)
    return msgspec.structs.replace(found, mean=round(max(0.0, usual), 3))
