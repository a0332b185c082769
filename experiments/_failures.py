"""The paper's four failure patterns (figure 6), counted event by event.

A policy's residents, answers and next events are compared layer by layer: what was on the GPU in
one pass and missing in the next, and what the CPU computed in both. Times come from the engine's
record of each event.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.runner import Contender
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import EVENT_TIMES, N_LATE
from oled_sim.errors import UsageError
from oled_sim.experiment import Detail, RunPoint
from oled_sim.policy import Event, Lane, Policy
from oled_sim.trace import Kind, Trace

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


class Gate(NamedTuple):
    """What a layer's event left behind: bool [E] each."""

    on_gpu: NDArray[np.bool_]
    transferred: NDArray[np.bool_]
    on_cpu: NDArray[np.bool_]


COUNTS = (
    "gates", "late_gates", "residents", "idle_residents", "next_misses", "evicted",
    "evicted_reused", "cpu_followed", "cpu_reused", "cpu_repeated", "transfers_followed",
    "transfers_reused",
)  # fmt: skip


@dataclass
class Failures(Detail):
    """Counts failures of every request that a policy runs."""

    counts: dict[int, dict[str, int]] = field(
        default_factory=lambda: defaultdict(lambda: dict.fromkeys(COUNTS, 0))
    )
    late_us: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    last: dict[int, Gate] = field(default_factory=dict)
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
        activated = mask_of(event.experts, len(event.resident))
        now = Gate(
            on_gpu=event.resident | mask_of(event.experts[lanes != Lane.CPU], len(activated)),
            transferred=mask_of(event.experts[lanes == Lane.TRANSFER], len(activated)),
            on_cpu=mask_of(event.experts[lanes == Lane.CPU], len(activated)),
        )
        if event.kind != Kind.PREFILL:
            counts = self.counts[event.request]
            counts["gates"] += 1
            counts["residents"] += int(event.resident.sum())
            counts["idle_residents"] += int((event.resident & ~activated).sum())
            if event.layer in self.last:
                _compare(counts, self.last[event.layer], now, event.resident, activated)
            self.last[event.layer] = now

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Take the times of a request's decode passes."""
        course, request = record.course, record.group.requests[0]
        decode = course.decode[course.event_pass]
        late = decode & (course.counts[:, N_LATE] > 0)
        self.counts[request]["late_gates"] += int(late.sum())
        self.late_us[request] += float(course.times[late, H2D_CRITICAL].sum())

    def columns(self, request: int) -> Mapping[str, Any]:
        """Return the counts of a request."""
        return self.counts[request] | {"late_h2d_critical_us": self.late_us[request]}


def mask_of(experts: NDArray[np.int64], n: int) -> NDArray[np.bool_]:
    """Return a set of experts as bool [n]."""
    found = np.zeros(n, bool)
    found[experts] = True
    return found


def _compare(
    counts: dict[str, int],
    before: Gate,
    now: Gate,
    resident: NDArray[np.bool_],
    activated: NDArray[np.bool_],
) -> None:
    evicted = before.on_gpu & ~resident
    for name, experts in (
        ("next_misses", activated & ~resident),
        ("evicted", evicted),
        ("evicted_reused", evicted & activated),
        ("cpu_followed", before.on_cpu),
        ("cpu_reused", before.on_cpu & activated),
        ("cpu_repeated", before.on_cpu & now.on_cpu),
        ("transfers_followed", before.transferred),
        ("transfers_reused", before.transferred & activated),
    ):
        counts[name] += int(experts.sum())
