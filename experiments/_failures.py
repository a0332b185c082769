"""The paper's four failure patterns (figure 6), counted event by event.

A policy's residents, answers and next events are compared layer by layer: what was on the GPU in
one pass and missing in the next, and what the CPU computed in both. Times come from the engine's
record of each event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean
from oled_sim.engine.runner import Contender
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import EVENT_TIMES, N_LATE
from oled_sim.errors import UsageError
from oled_sim.experiment import Detail, RunPoint
from oled_sim.policy import Event, Lane, Policy
from oled_sim.trace import Kind, Trace

# ruff: noqa: ANN001, ANN202

H2D_CRITICAL = EVENT_TIMES.index("h2d_critical_us")


@dataclass(frozen=True)
class SystemPoint(RunPoint):
    """A run whose rows say how it failed, for one request at a time.

    Columns besides a run's, over decode passes. A layer's *next event* is the one in the next pass
    of the same request.

        gates: events. late_gates: those that waited for a prefetch in flight.
        late_h2d_critical_us: the part of ``h2d_critical_us`` at such gates.
        residents, idle_residents: Σ |R| and Σ |R minus A| at the gate.
        next_misses: activated experts that were not resident, at gates that are next events.
        evicted: experts on the GPU (resident, or copied there) in one event and not resident at
            the next one's gate. evicted_reused: those that the next event activates.
        cpu_followed: experts computed on the CPU that have a next event of their layer.
        cpu_reused: those that it activates. cpu_repeated: those that it computes on the CPU again.
        transfers_followed, transfers_reused: experts copied for an event, and those of them that
            the layer's next event activates, wherever they are by then.
    """

    def __post_init__(self) -> None:
        if self.batch != 1:
            raise UsageError(f"failures are counted for one request at a time, not {self.batch}")

    def detail(self, trace: Trace) -> Detail:
        """Return what counts the failures."""
        return Failures()


COUNTS = (
    "gates", "late_gates", "residents", "idle_residents", "next_misses", "evicted",
    "evicted_reused", "cpu_followed", "cpu_reused", "cpu_repeated", "transfers_followed",
    "transfers_reused",
)  # fmt: skip


LATE_GATES = COUNTS.index("late_gates")
ON_GPU, TRANSFERRED, ON_CPU, ACTIVATED = range(4)
"""Rows of what a layer's event left behind, bool [4, E]."""

TRANSFER, CPU = int(Lane.TRANSFER), int(Lane.CPU)


@dataclass
class Failures(Detail):
    """Counts failures of every request that a policy runs, in the order of ``COUNTS``."""

    counts: dict[int, NDArray[np.int64]] = field(
        default_factory=lambda: defaultdict(lambda: np.zeros(len(COUNTS), np.int64))
    )
    late_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    last: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    running: int = -1

    def watched(self, policy: Policy) -> Policy:
        """Return the policy with a look at every answer that it gives at a gate."""
        kind, note = type(policy), self.note

        def dispatch(self: Policy, event: Event) -> NDArray[np.integer[Any]]:
            lanes = kind.dispatch(self, event)
            note(event, np.asarray(lanes))
            return lanes

        # Decisions stay those of the class; `compiled` is not inherited, so every gate is asked.
        policy.__class__ = type(f"Watched{kind.__name__}", (kind,), {"dispatch": dispatch})
        return policy

    def note(self, event: Event, lanes: NDArray[np.integer[Any]]) -> None:
        """Count an event against the layer's last one in the same request."""
        if event.request != self.running:
            self.running, self.last = event.request, {}
        now = np.zeros((4, len(event.resident)), np.bool_)
        _note(now, event.resident, event.experts, np.asarray(lanes, np.int64))
        if event.kind != Kind.PREFILL:
            last = self.last.get(event.layer)
            known = last is not None
            _count(self.counts[event.request], known, last if known else now, now, event.resident)
            self.last[event.layer] = now

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Take the times of a request's decode passes."""
        course, request = record.course, record.group.requests[0]
        decode = course.decode[course.event_pass]
        late = decode & (course.counts[:, N_LATE] > 0)
        self.counts[request][LATE_GATES] += int(late.sum())
        self.late_us[request] += float(course.times[late, H2D_CRITICAL].sum())

    def columns(self, request: int) -> Mapping[str, Any]:
        """Return the counts of a request."""
        counts = dict(zip(COUNTS, self.counts[request].tolist(), strict=True))
        return counts | {"late_h2d_critical_us": self.late_us[request]}


@lean
def _note(now, resident, experts, lanes):
    """Write what an event leaves behind into ``now``, which is empty."""
    for expert in range(len(resident)):
        now[ON_GPU, expert] = resident[expert]
    for i in range(len(experts)):
        now[ACTIVATED, experts[i]] = True
        if lanes[i] == CPU:
            now[ON_CPU, experts[i]] = True
        else:
            now[ON_GPU, experts[i]] = True
            now[TRANSFERRED, experts[i]] = lanes[i] == TRANSFER


@lean
def _count(counts, known, before, now, resident):
    """Add a gate to ``counts``, against the layer's event before if that is known."""
    counts[0] += 1  # gates
    for expert in range(len(resident)):
        held, needed = int(resident[expert]), int(now[ACTIVATED, expert])
        counts[2] += held
        counts[3] += held * (1 - needed)
        if known:
            evicted = int(before[ON_GPU, expert]) * (1 - held)
            on_cpu = int(before[ON_CPU, expert])
            transferred = int(before[TRANSFERRED, expert])
            counts[4] += needed * (1 - held)
            counts[5] += evicted
            counts[6] += evicted * needed
            counts[7] += on_cpu
            counts[8] += on_cpu * needed
            counts[9] += on_cpu * int(now[ON_CPU, expert])
            counts[10] += transferred
            counts[11] += transferred * needed
