"""What the host adds when a run puts the parts together: measured by running, off any trace.

A few passes with made-up routes run on the lanes just measured, through as many layers as the
model has (fewer would stay in the caches of host and GPU), and the simulator predicts the same
passes from the tables. What a pass, an event, an event with arrivals and one with a job of the CPU
lane take longer than their parts is the host's: Python between the launches, and noticing that
something has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import Host, Profile, Quantiles
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.state import CPU, PASS_COUNTS, T_BUSY, T_END, T_START
from oled_sim.geometry import CostGeometry, RoutingGeometry
from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.clock import Clock
from oled_sim.hardware.copy_lane import CopyLane
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.live import LivePace
from oled_sim.hardware.machine import Machine
from oled_sim.hardware.measuring.rig import SEED, Rig
from oled_sim.hardware.measuring.timing import spread
from oled_sim.hardware.replay import load_residents, no_garbage_collection
from oled_sim.hardware.shapes import expert_elements
from oled_sim.hardware.slab import Slab
from oled_sim.hardware.slot_map import SlotMap
from oled_sim.policy import Event, Lane, Policy, Prefetch, Setting
from oled_sim.trace.builder import RequestBuilder
from oled_sim.trace.schema import Kind, RequestTrace, TokenState

SHARE = 0.5
"""Of the GPU's free memory, what the experts of the trial's layers may take."""
TOKENS = 16
CONTEXT = 512
STAGING = 16
RENEWED = 24
"""Experts that a layer of the trial of copies waits for."""
JOB = 12
"""Experts of a job of the CPU lane."""
QUEUED = 8
"""Prefetches that a gate of the trial of prefetches asks for: more than can come until the next."""
WARM_UP = 4
"""Passes that are run first and not counted."""


class SendMisses(Policy):
    """Computes residents where they are and sends all misses down one lane.

    Args:
        lane: where misses go.
        residents: bool [L, E], what is there at first; what the CPU computes never comes.
    """

    def __init__(self, lane: Lane, residents: NDArray[np.bool_]) -> None:
        self._lane, self._residents = lane, residents

    def place(self, setting: Setting) -> NDArray[np.bool_]:
        """Return the initial residents."""
        return self._residents

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lane of each activated expert."""
        return np.where(event.resident[event.experts], int(Lane.GPU), int(self._lane))


class PrefetchAlways(SendMisses):
    """Keeps the copy engine busy with experts of other layers, and lets none of them in."""

    replaces_queue = True

    def prefetch(self, event: Event) -> list[Prefetch]:
        """Return experts of the next layer that are not there, in a turn that moves on."""
        layer = (event.layer + 1) % len(self._residents)
        absent = np.flatnonzero(~self._residents[layer])
        first = QUEUED * event.pass_index
        return [
            Prefetch(layer, int(absent[(first + i) % len(absent)]), -float(i))
            for i in range(min(QUEUED, len(absent)))
        ]

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return values by which residents stay."""
        return self._residents[layer].astype(np.float64)


@dataclass(frozen=True)
class Trial:
    """One made-up run.

    Attributes:
        lane: where misses go.
        missing: activated experts of each layer that are not there at first.
        renewed: experts of each layer that change from pass to pass.
        events: how many to run at least, after the warm-up.
        prefetches: whether the copy engine is kept busy with prefetches.
    """

    lane: Lane
    missing: int
    renewed: int
    events: int
    prefetches: bool = False


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


def measure_host(rig: Rig, profile: Profile, *, quick: bool) -> Host:
    """Return what the host adds to the parts that ``profile`` holds."""
    costs = LaneCosts(msgspec.structs.replace(profile, host=None), extrapolate=True)
    machine = _machine(rig, depth(rig, quick=quick))
    few, many = (12, 16) if quick else (120, 240)
    hits = _gaps(rig, machine, costs, Trial(Lane.TRANSFER, 0, 0, many))
    copies = _gaps(rig, machine, costs, Trial(Lane.TRANSFER, 0, RENEWED, few))
    jobs = _gaps(rig, machine, costs, Trial(Lane.CPU, JOB, 0, few))
    per_prefetch = _prefetch_gaps(machine, costs, rig.cost, many)
    machine.copies.close()
    per_event = hits.events.mean()
    return Host(
        per_pass=_quantiles(hits.passes),
        per_event=_quantiles(hits.events),
        per_arrival=_quantiles(copies.events - per_event),
        per_cpu_job=_quantiles(jobs.events - per_event),
        per_prefetch=_quantiles(per_prefetch),
    )


def depth(rig: Rig, *, quick: bool) -> int:
    """Return through how many layers trials run: all that the model has, if the GPU holds them."""
    if quick or not rig.place.cuda:
        return min(2, rig.cost.moe_layers)
    free, _ = torch.cuda.mem_get_info(rig.place.device)
    layer_bytes = _cache(rig.cost.experts) * expert_elements(rig.cost) * rig.place.item_bytes
    return max(1, min(rig.cost.moe_layers, int(SHARE * free / layer_bytes)))


@dataclass(frozen=True)
class Gaps:
    """Measured less predicted, µs: of what passes do besides events, and of events."""

    passes: NDArray[np.float64]
    events: NDArray[np.float64]


def _gaps(rig: Rig, machine: Machine, costs: LaneCosts, trial: Trial) -> Gaps:
    """Run a trial on the machine and in the simulator; return how they differ."""
    layers = len(machine.experts.packed)
    geometry = _routing(rig.cost, layers)
    predicted, measured = (
        _run(machine, costs, geometry, trial, live=live) for live in (False, True)
    )
    lengths = [r.course.times[:, T_END] - r.course.times[:, T_START] for r in (predicted, measured)]
    whole = [r.course.pass_times[:, 1] - r.course.pass_times[:, 0] for r in (predicted, measured)]
    outside = [w - e.reshape(-1, layers).sum(axis=1) for w, e in zip(whole, lengths, strict=True)]
    gaps = lengths[1] - lengths[0]
    if trial.lane == Lane.CPU:  # what the workers themselves took longer than the table is not ours
        table = predicted.course.times[:, T_BUSY + CPU] - costs.cpu_link_us(TOKENS)
        gaps -= np.array(machine.cpu.computed_us) - table  # type: ignore[attr-defined]
    return Gaps((outside[1] - outside[0])[WARM_UP:], gaps[WARM_UP * layers :])


def _prefetch_gaps(
    machine: Machine, costs: LaneCosts, cost: CostGeometry, events: int
) -> NDArray[np.float64]:
    """Return how much longer a prefetch takes than its copy, in a run that is never without, µs.

    By pass: its time over its prefetches, less the same in the simulator, which only copies.
    """
    geometry = _routing(cost, len(machine.experts.packed))
    trial = Trial(Lane.TRANSFER, 0, 0, events, prefetches=True)
    predicted, measured = (
        _per_prefetch_us(_run(machine, costs, geometry, trial, live=live)) for live in (False, True)
    )
    return (measured - predicted)[WARM_UP:]


def _per_prefetch_us(record: GroupRecord) -> NDArray[np.float64]:
    """Return the time of each pass over the prefetches that it started."""
    times, counts = record.course.pass_times, record.course.pass_counts
    started = counts[:, PASS_COUNTS.index("prefetched")]
    return (times[:, 1] - times[:, 0]) / np.maximum(started, 1)


def _routing(cost: CostGeometry, layers: int) -> RoutingGeometry:
    return RoutingGeometry(tuple(range(1, layers + 1)), cost.experts, cost.top_k)


def _run(
    machine: Machine, costs: LaneCosts, geometry: RoutingGeometry, trial: Trial, *, live: bool
) -> GroupRecord:
    rules, cache = Rules(staging=STAGING), _cache(geometry.experts)
    kind = PrefetchAlways if trial.prefetches else SendMisses
    policy = kind(trial.lane, _residents(geometry, trial))
    simulation = Simulation(policy, geometry, costs, Budget(cache=cache), rules)
    machine.cpu.computed_us.clear()  # type: ignore[attr-defined]
    if live:
        layers = len(geometry.layers)
        slots = SlotMap(layers, geometry.experts, layers * cache + STAGING)
        load_residents(machine, slots, simulation.state.pools.resident)
        simulation.pace = pace = LivePace(machine, slots)
    with no_garbage_collection():
        batch = make_batch([_request(geometry, trial)], geometry, costs)
        record = simulation.run_group(Group("counted", (0,)), batch)
    if live:
        pace.leave()
    return record


def _machine(rig: Rig, layers: int) -> Machine:
    """Return the rig's parts as a machine, ready to run passes of ``TOKENS`` tokens."""
    place, clock = rig.place, Clock(rig.place.device)
    backbone = Backbone(place, rig.cost, layers, TOKENS, CONTEXT + 2 * TOKENS, SEED)
    experts: Any = Repeated(rig, layers)
    slab = Slab(place, rig.cost, layers * _cache(rig.cost.experts) + STAGING)
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


def _active(experts: int) -> int:
    """Return how many experts of a layer the passes activate: as many as decode passes do."""
    return max(8, experts * 7 // 32)


def _cache(experts: int) -> int:
    """Return slots per layer that hold what a pass activates and a little more."""
    return min(experts, 5 * _active(experts) // 4)


def _active_of(geometry: RoutingGeometry) -> int:
    return max(geometry.top_k, _active(geometry.experts))


def _orders(geometry: RoutingGeometry) -> list[NDArray[np.int64]]:
    """Return an order of the experts for each layer; the first ones are activated."""
    rng = np.random.default_rng(SEED)
    return [rng.permutation(geometry.experts) for _ in geometry.layers]


def _residents(geometry: RoutingGeometry, trial: Trial) -> NDArray[np.bool_]:
    """Return what is there at first, bool [L, E]: the activated but those that are missing."""
    found = np.zeros((len(geometry.layers), geometry.experts), np.bool_)
    there = max(0, _active_of(geometry) - trial.missing)
    for row, order in zip(found, _orders(geometry), strict=True):
        row[order[:there]] = True
    return found


def _request(geometry: RoutingGeometry, trial: Trial) -> RequestTrace:
    """Return denoising passes whose tokens spread evenly over a set of experts that moves on."""
    rng = np.random.default_rng(SEED)
    builder = RequestBuilder(geometry, 0)
    active = _active_of(geometry)
    sets = _orders(geometry)
    nothing = np.zeros(TOKENS, np.bool_)
    for _ in range(-(-trial.events // len(sets)) + WARM_UP):
        routes = [_spread(rng, ids[:active], geometry.top_k) for ids in sets]
        builder.add_pass(
            kind=Kind.DENOISE,
            block=CONTEXT // TOKENS,
            context=CONTEXT,
            token_id=np.zeros(TOKENS, np.int32),
            position=np.arange(CONTEXT, CONTEXT + TOKENS),
            state=np.full(TOKENS, TokenState.MASKED),
            confidence=np.full(TOKENS, 0.5),
            accepted=nothing,
            edited=nothing,
            experts=np.stack(routes),
            gates=np.full((len(sets), TOKENS, geometry.top_k), 1.0 / geometry.top_k),
        )
        renewed = min(trial.renewed, geometry.experts - active)
        sets = [np.roll(ids, -renewed) for ids in sets]
    return builder.build()


def _spread(rng: np.random.Generator, ids: NDArray[np.int64], top_k: int) -> NDArray[np.int64]:
    """Return routes [T, k] that use each expert of a set about as often, none twice a token."""
    order = np.tile(rng.permutation(ids), -(-TOKENS * top_k // len(ids)))
    return order[: TOKENS * top_k].reshape(TOKENS, top_k)


def _quantiles(samples: NDArray[np.float64]) -> Quantiles:
    """Summarise gaps; parts that overlap may take less than their sum, which counts as nothing."""
    found = spread(np.maximum(samples, 0.0).tolist())
    return msgspec.structs.replace(found, mean=round(max(0.0, float(samples.mean())), 3))
