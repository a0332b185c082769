"""One point of a replay: a policy with a cache size, run on a machine with a trace's routing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine import laws
from oled_sim.engine.arrivals import Moment
from oled_sim.engine.batch import Batch, make_batch
from oled_sim.engine.cut import first_decode_passes
from oled_sim.engine.rules import Group
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.source import Source
from oled_sim.errors import UsageError
from oled_sim.hardware.live import LivePace
from oled_sim.hardware.lossless import LosslessCheck
from oled_sim.hardware.machine import ExpertMachine, Machine
from oled_sim.hardware.measured import PassMarks
from oled_sim.hardware.slot_map import SlotMap
from oled_sim.hardware.speed_check import SpeedCheck
from oled_sim.policy import Policy
from oled_sim.validation.measured import About, Lossless, Point
from oled_sim.validation.order import arrival_rows, has_prefetches
from oled_sim.validation.prepared import prepare
from oled_sim.validation.rows import event_rows, pass_rows

Report = Callable[[], None]
"""Called after every pass on the hardware."""


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not while a run is timed.

    A full collection looks at every object of the process and stops the host for 10 ms and more,
    while lanes wait to be noticed. Reference counts free what a run leaves behind all the same.
    """
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@dataclass
class Decisions:
    """How long the decisions of each pass took, and kept the lanes waiting, µs."""

    report: Report | None = None
    taken_us: list[float] = field(default_factory=list)
    paused_us: list[float] = field(default_factory=list)

    def note(self, p: int, marks: PassMarks) -> None:
        """Take note of a pass."""
        self.taken_us.append(marks.decide_us)
        self.paused_us.append(marks.kept_waiting_us)
        if self.report is not None:
            self.report()


def slots_for(about: About, layers: int, experts: int) -> int:
    """Return how many slots of the slab a point needs: its budget and its staging slots."""
    return layers * min(about.cache, experts) + about.rules.staging


class PointRun:
    """A point that is measured repetition by repetition, each whenever its turn comes.

    History and warm-up are simulated: they decide what is known and what is resident, not how long
    anything takes. Every repetition then starts from the same state, with the residents loaded.

    Args:
        machine: with a slab of at least :func:`slots_for` slots.
        source: the trace; ``about`` says which of its requests run and how far.
        policy: the policy; it is copied.
        costs: what the policy decides by.
        about: what to run; what is measured is filled in by :meth:`repeat`.
        check: compares samples with full residency.
        speed: measures how fast the host is before each repetition.
        report: called after every pass that is measured.
        warm_up_passes: decode passes that are run first and forgotten.

    Raises:
        UsageError: the policy looks into the future, which hardware cannot.
        As :func:`oled_sim.engine.runner.simulate`.
    """

    def __init__(
        self,
        machine: Machine,
        source: Source,
        policy: Policy,
        costs: LaneCosts,
        about: About,
        *,
        check: LosslessCheck | None = None,
        speed: SpeedCheck | None = None,
        report: Report | None = None,
        warm_up_passes: int = 0,
    ) -> None:
        if "future" in policy.needs:
            raise UsageError(
                f"policy {about.policy.label!r} looks into the future: simulate it with `oled-sim"
                " run`, and replay policies that can run"
            )
        self._machine, self._costs, self._about = machine, costs, about
        self._check, self._speed, self._report = check, speed, report
        self._prepared = prepared = prepare(about, source, policy, costs)
        geometry = prepared.cut.geometry
        layers, experts = len(geometry.layers), geometry.experts
        self._layers = geometry.layers
        self._slots = SlotMap(layers, experts, slots_for(about, layers, experts))
        if warm_up_passes:
            first = prepared.counted[0]
            _warm_up(prepared.simulation, machine, self._slots, first, costs, warm_up_passes)

    def repeat(self, repetition: int) -> Point:
        """Measure once. ``repetition``: its number, from 0, in the rows of the point's tables."""
        passes: list[pa.Table] = []
        events: list[pa.Table] = []
        arrivals: list[pa.Table] = []
        machine, slots, simulation = self._machine, self._slots, self._prepared.simulation
        if self._check is not None:
            self._check.reset()
        speeds = () if self._speed is None else (self._speed.settled(self._costs),)
        requests = self._prepared.again()
        load_residents(machine, slots, simulation.state.pools.resident)
        for group, batch in requests:
            run = _measure(simulation, machine, slots, group, batch, self._check, self._report)
            record, taken = run.record, run.decisions
            passes.append(
                pass_rows(
                    record, repetition=repetition, decide_us=np.array(taken.taken_us),
                    paused_us=np.array(taken.paused_us),
                )
            )  # fmt: skip
            events.append(event_rows(record, self._layers, repetition=repetition))
            arrivals.append(arrival_rows(run.moments, record, self._layers, repetition))
        order = pa.concat_tables(arrivals)
        recorded = has_prefetches(order)
        about = msgspec.structs.replace(
            self._about, repetitions=1, lossless=self._found(), speeds=speeds,
            arrivals_recorded=recorded,
        )  # fmt: skip
        return Point(
            about, pa.concat_tables(passes), pa.concat_tables(events), order if recorded else None
        )

    def _found(self) -> Lossless | None:
        """Return what the check has found since it was reset."""
        check = self._check
        if check is None:
            return None
        return Lossless(
            events_checked=check.checked,
            worst_relative_error=check.worst,
            tolerance=check.tolerance,
        )


def _warm_up(
    simulation: Simulation,
    machine: Machine,
    slots: SlotMap,
    first: tuple[Group, Batch],
    costs: LaneCosts,
    passes: int,
) -> None:
    """Run the start of the first request, so that kernels are compiled and memory is warm."""
    group, batch = first
    start = first_decode_passes(batch.members[0].whole, passes)
    load_residents(machine, slots, simulation.state.pools.resident)
    some = make_batch([start], simulation.geometry, costs, simulation.rules.confidence)
    _measure(simulation, machine, slots, group, some, None, None)


def load_residents(machine: ExpertMachine, slots: SlotMap, resident: NDArray[np.bool_]) -> None:
    """Put every resident, bool [L, E], into a slot of the slab, off the clock."""
    for layer, expert, slot in slots.fill(resident):
        machine.slab.weights[slot].copy_(machine.experts.packed[layer][expert], non_blocking=True)
    machine.synchronize()


class Run(NamedTuple):
    """A request on the hardware: what was noted, the decisions of its passes, and the order."""

    record: GroupRecord
    decisions: Decisions
    moments: list[Moment]


def _measure(
    simulation: Simulation,
    machine: Machine,
    slots: SlotMap,
    group: Group,
    batch: Batch,
    check: LosslessCheck | None,
    report: Report | None,
) -> Run:
    """Run a request on the hardware."""
    decisions = Decisions(report)
    simulation.pace = pace = LivePace(machine, slots, check, decisions.note)
    try:
        with no_garbage_collection():
            record = simulation.run_group(group, batch)
    finally:
        simulation.pace = None
    pace.leave()
    laws.check_cheap(record, simulation.state, simulation.rules)
    laws.check_bytes(record, simulation.expert_bytes)
    return Run(record, decisions, pace.moments)
