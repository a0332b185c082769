"""Requests made ready for a run: passes in common, activated sets, policy-independent costs.

A pass of a batch advances some of its requests (``members.py`` says which) by a pass of their own,
whatever its kind; an event of the batch is the union of their events of one layer. Everything
here is the same for every policy, so one batch serves many runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.fixed_costs import fill_fixed_costs
from oled_sim.engine.members import Member, barrier, lockstep
from oled_sim.engine.merge import (
    Merged,
    embedding_means,
    event_load,
    frozen,
    full_gate_means,
    own,
    pass_load,
    passes_of,
)
from oled_sim.engine.routes import activated_sets, gate_masses
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES, Course
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import PassEnd
from oled_sim.trace.schema import Kind, RequestTrace

CONFIDENCE_MODES = ("previous", "end", "current")


@dataclass(frozen=True)
class Batch:
    """Requests that run together. B requests, P passes, V events, N routing rows.

    What few policies look at is worked out when it is asked for first.

    Attributes:
        members: the requests, and in which passes they take part.
        start: passes that ran before, if a batch goes on from the one before it.
        geometry: what they route over.
        mode: which confidence is known at a gate, one of ``CONFIDENCE_MODES``.
        kind: uint8 [P], prefill only if every request present prefills; else denoise if any
            request denoises, else commit.
        block: int32 [P], of the first request present.
        event_pass, event_layer: int64 [V].
        rows: int64 [V + 1], routing rows of each event.
        routes: uint8/uint16 [N, k].
        experts: uint16 [ΣA], tokens: int32 [ΣA], those of event v from ``course.offset[v]`` on.
        context_tokens: int64 [P], tokens whose keys and values are kept during the pass.
        course: what kernels read; ``counts`` and ``times`` in it are filled by a run.
    """

    members: tuple[Member, ...]
    start: int
    geometry: RoutingGeometry
    mode: str
    merged: Merged
    kind: NDArray[np.uint8]
    block: NDArray[np.int32]
    routes: NDArray[Any]
    experts: NDArray[np.uint16]
    tokens: NDArray[np.int32]
    context_tokens: NDArray[np.int64]
    course: Course

    @cached_property
    def traces(self) -> tuple[RequestTrace, ...]:
        """The requests, or those of their passes that take part."""
        return tuple(m.trace for m in self.members)

    @cached_property
    def present(self) -> list[list[tuple[Member, int]]]:
        """Of every pass the requests that take part, and the number of the pass in ``trace``."""
        found: list[list[tuple[Member, int]]] = [[] for _ in range(self.passes)]
        for member in self.members:
            for i, p in enumerate(member.at.tolist()):
                found[p].append((member, i))
        return found

    @cached_property
    def own_pass(self) -> NDArray[np.int64]:
        """int64 [V], number of the pass in the request of the event's first row."""
        first = self.merged.first
        begin = np.array([m.first for m in self.members], np.int64)
        return self.merged.own_pass[first] + begin[self.merged.owner[first]]

    @property
    def passes(self) -> int:
        """Number of passes P."""
        return len(self.kind)

    @property
    def event_pass(self) -> NDArray[np.int64]:
        """int64 [V]."""
        return self.course.event_pass

    @property
    def event_layer(self) -> NDArray[np.int64]:
        """int64 [V], index into the geometry's layers."""
        return self.course.event_layer

    @property
    def rows(self) -> NDArray[np.int64]:
        """int64 [V + 1], routing rows of each event."""
        return self.merged.rows

    @cached_property
    def gates(self) -> NDArray[np.float32] | None:
        """float32 [N, k], or None."""
        columns = [t.gates.astype(np.float32) for t in self.traces if t.gates is not None]
        return self.merged.take(columns) if len(columns) == len(self.traces) else None

    @cached_property
    def gate_mass(self) -> NDArray[np.float64]:
        """float64 [ΣA], NaN without gates."""
        if self.gates is None:
            return frozen(np.full(len(self.experts), np.nan))
        offset, experts = self.course.offset, self.geometry.experts
        return frozen(
            gate_masses(self.rows, self.routes, self.gates, offset, self.experts, experts)
        )

    @cached_property
    def confidence(self) -> NDArray[np.float64]:
        """float64 [N], as known at the gate in the run's mode, 1 where unknown."""
        if self.mode == "current":
            return self.confidence_after
        return self._per_row([m.carried for m in self.members])

    @cached_property
    def confidence_after(self) -> NDArray[np.float64]:
        """float64 [N], of the pass itself, 1 where unknown."""
        return self._per_row(
            [np.nan_to_num(t.confidence.astype(np.float64), nan=1.0) for t in self.traces]
        )

    @cached_property
    def position(self) -> NDArray[np.int32]:
        """int32 [N]."""
        return self._per_row([t.position for t in self.traces])

    @cached_property
    def state(self) -> NDArray[np.uint8]:
        """uint8 [N], a ``TokenState`` each."""
        return self._per_row([t.state for t in self.traces])

    @cached_property
    def owner(self) -> NDArray[np.int32]:
        """int32 [N], request of each row."""
        return self.merged.take([np.full(len(t.experts), t.request, np.int32) for t in self.traces])

    @cached_property
    def full_gate(self) -> NDArray[np.float32] | None:
        """float32 [V, E] or None; means weighted by tokens over the requests of the batch."""
        return full_gate_means(self.merged, self.traces)

    @cached_property
    def embedding(self) -> NDArray[np.float32] | None:
        """float32 [P, d] or None; means likewise."""
        return embedding_means(self.members, self.passes)

    def leader(self, p: int) -> tuple[int, int]:
        """Return number and own pass of the first request that takes part in pass ``p``."""
        member, i = self.present[p][0]
        return member.whole.request, member.first + i

    def ends(self, p: int) -> Iterator[PassEnd]:
        """Yield what became known at the end of pass ``p``, per request present."""
        for member, i in self.present[p]:
            trace = member.trace
            tokens = slice(trace.token_offset[i], trace.token_offset[i + 1])
            yield PassEnd(
                request=trace.request,
                pass_index=member.first + i,
                kind=int(trace.kind[i]),
                position=own(trace.position[tokens]),
                state=own(trace.state[tokens]),
                confidence=own(trace.confidence[tokens]),
                accepted=own(trace.accepted[tokens]),
                edited=own(trace.edited[tokens]),
            )

    def _per_row(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return one value per routing row, from one per token of each request."""
        return self.merged.take([c[t.row_token] for c, t in zip(columns, self.traces, strict=True)])

    def fresh_course(self) -> Course:
        """Return the course with empty rows for measurements."""
        return self.course._replace(
            counts=np.zeros_like(self.course.counts),
            times=np.zeros_like(self.course.times),
            pass_counts=np.zeros_like(self.course.pass_counts),
            pass_times=np.zeros_like(self.course.pass_times),
        )


def make_batch(
    traces: Sequence[RequestTrace],
    geometry: RoutingGeometry,
    costs: LaneCosts,
    confidence: str = "previous",
    *,
    mode: str = "lockstep",
) -> Batch:
    """Merge requests that start together into one batch.

    Args:
        traces: at least one request.
        mode: ``lockstep`` or ``barrier``. Other arguments and errors: :func:`batch_of`.
    """
    return batch_of(
        {"lockstep": lockstep, "barrier": barrier}[mode](traces), geometry, costs, confidence
    )


def batch_of(
    members: Sequence[Member],
    geometry: RoutingGeometry,
    costs: LaneCosts,
    confidence: str = "previous",
    *,
    start: int = 0,
) -> Batch:
    """Make requests, or stretches of them, ready to run together.

    Args:
        members: at least one; every pass from the first to the last has one that takes part.
        geometry: what they route over.
        costs: lane costs, for everything that no policy changes.
        start: passes of the batch that ran before.
        confidence: what the confidence at a gate is: ``previous`` and ``end`` take the last one
            known for a position before the pass, ``current`` that of the pass itself.

    Raises:
        ProfileError: a count lies outside the profiled range.
    """
    merged, traces = Merged(members), [m.trace for m in members]
    kind, block, context = passes_of(members)
    event_pass, event_layer = merged.event_pass[merged.first], merged.layer[merged.first]
    routes = merged.take([t.experts for t in traces])
    offset, experts, tokens = activated_sets(merged.rows, routes, geometry.experts)
    course = _course(kind, event_pass, event_layer, merged, offset, experts, tokens)
    fill_fixed_costs(course, pass_load(members, len(kind)), event_load(merged, traces), costs)
    return Batch(
        members=tuple(members),
        start=start,
        geometry=geometry,
        mode=confidence,
        merged=merged,
        kind=kind,
        block=block,
        routes=routes,
        experts=frozen(experts),
        tokens=frozen(tokens),
        context_tokens=context,
        course=course,
    )


def _course(
    kind: NDArray[np.uint8],
    event_pass: NDArray[np.int64],
    event_layer: NDArray[np.int64],
    merged: Merged,
    offset: NDArray[np.int64],
    experts: NDArray[np.uint16],
    tokens: NDArray[np.int32],
) -> Course:
    events, passes = len(event_layer), len(kind)
    return Course(
        event_layer=event_layer,
        event_pass=event_pass,
        pass_event=np.searchsorted(event_pass, np.arange(passes + 1)).astype(np.int64),
        rows=np.diff(merged.rows),
        offset=offset,
        experts=experts,
        tokens=tokens,
        dense_us=np.zeros(events),
        shared_us=np.zeros(events),
        merge_us=np.zeros(events),
        start_us=np.zeros(passes),
        head_us=np.zeros(passes),
        counts=np.zeros((events, len(EVENT_COUNTS)), np.int64),
        times=np.zeros((events, len(EVENT_TIMES))),
        pass_counts=np.zeros((passes, len(PASS_COUNTS)), np.int64),
        pass_times=np.zeros((passes, len(PASS_TIMES))),
        decode=kind != Kind.PREFILL,
    )
