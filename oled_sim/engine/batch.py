"""Requests made ready for a run: lock-step passes, activated sets, policy-independent costs.

A batch of B requests starts together. Its pass p advances each request that has a pass p by that
pass, whatever its kind; an event of the batch is the union of the requests' events of one layer.
Everything here is the same for every policy, so one batch serves many runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.fixed_costs import fill_fixed_costs
from oled_sim.engine.routes import activated_sets, carry_confidence, gate_masses
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES, Course
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace

CONFIDENCE_MODES = ("previous", "end", "current")


@dataclass(frozen=True)
class Batch:
    """Requests that run in lock step. B requests, P passes, V events, N routing rows.

    What few policies look at is worked out when it is asked for first.

    Attributes:
        traces: the requests.
        geometry: what they route over.
        mode: which confidence is known at a gate, one of ``CONFIDENCE_MODES``.
        kind: uint8 [P], prefill only if every request present prefills; else denoise if any
            request denoises, else commit.
        block: int32 [P], of the first request present.
        event_pass, event_layer: int64 [V].
        rows: int64 [V + 1], routing rows of each event.
        routes: uint8/uint16 [N, k].
        experts, tokens: int64 [ΣA], those of event v from ``course.offset[v]`` on.
        context_tokens: int64 [P], tokens whose keys and values are kept during the pass.
        course: what kernels read; ``counts`` and ``times`` in it are filled by a run.
    """

    traces: tuple[RequestTrace, ...]
    geometry: RoutingGeometry
    mode: str
    merged: Merged
    kind: NDArray[np.uint8]
    block: NDArray[np.int32]
    routes: NDArray[Any]
    experts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    course: Course

    @property
    def passes(self) -> int:
        """Number of passes P, that of the longest request."""
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
            return _frozen(np.full(len(self.experts), np.nan))
        offset, experts = self.course.offset, self.geometry.experts
        return _frozen(
            gate_masses(self.rows, self.routes, self.gates, offset, self.experts, experts)
        )

    @cached_property
    def confidence(self) -> NDArray[np.float64]:
        """float64 [N], as known at the gate in the run's mode, 1 where unknown."""
        if self.mode == "current":
            return self.confidence_after
        return self._per_row([_carried(t) for t in self.traces])

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
        return _full_gate(self.merged, self.traces)

    @cached_property
    def embedding(self) -> NDArray[np.float32] | None:
        """float32 [P, d] or None; means likewise."""
        return _embedding(self.traces, self.passes)

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


class Merged:
    """The source events of a batch in execution order: by pass, layer, then request."""

    def __init__(self, traces: Sequence[RequestTrace]) -> None:
        event_pass = np.concatenate([t.event_pass for t in traces]).astype(np.int64)
        layer = np.concatenate([t.event_layer for t in traces]).astype(np.int64)
        owner = np.repeat(np.arange(len(traces)), [t.events for t in traces])
        order = np.lexsort((owner, layer, event_pass))
        self.order = order
        self.event_pass, self.layer, self.owner = event_pass[order], layer[order], owner[order]
        new = np.ones(len(order), np.bool_)
        new[1:] = (np.diff(self.event_pass) != 0) | (np.diff(self.layer) != 0)
        self.first = np.flatnonzero(new)  # first source event of each event of the batch
        first_row = np.concatenate([[0], np.cumsum([len(t.experts) for t in traces])])
        start = np.concatenate(
            [t.event_offset[:-1] + b for t, b in zip(traces, first_row, strict=False)]
        )[order]
        self.length = np.concatenate([np.diff(t.event_offset) for t in traces])[order]
        ends = np.cumsum(self.length)
        # Row i of the batch is row `source[i]` of the concatenated requests.
        self.source = np.arange(ends[-1] if len(ends) else 0) + np.repeat(
            start - (ends - self.length), self.length
        )
        # One request with nothing between its rows is in order as it is.
        self._in_order = len(traces) == 1 and bool((start == ends - self.length).all())
        before = np.concatenate([[0], ends])
        self.rows = np.append(before[self.first], before[-1]).astype(np.int64)

    def take(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return one column per routing row of all requests, in the batch's order."""
        if self._in_order and len(columns[0]) == len(self.source):
            return _frozen(np.ascontiguousarray(columns[0]))
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return _frozen(np.ascontiguousarray(joined[self.source]))


def make_batch(
    traces: Sequence[RequestTrace],
    geometry: RoutingGeometry,
    costs: LaneCosts,
    confidence: str = "previous",
) -> Batch:
    """Merge requests into one batch.

    Args:
        traces: at least one request.
        geometry: what they route over.
        costs: lane costs, for everything that no policy changes.
        confidence: what the confidence at a gate is: ``previous`` and ``end`` take the last one
            known for a position before the pass, ``current`` that of the pass itself.

    Raises:
        ProfileError: a count lies outside the profiled range.
    """
    merged = Merged(traces)
    kind, block, context = _passes(traces)
    event_pass, event_layer = merged.event_pass[merged.first], merged.layer[merged.first]
    routes = merged.take([t.experts for t in traces])
    offset, experts, tokens = activated_sets(merged.rows, routes, geometry.experts)
    course = _course(traces, kind, event_pass, event_layer, merged, offset, experts, tokens)
    fill_fixed_costs(course, _pass_load(traces, len(kind)), _event_load(merged, traces), costs)
    return Batch(
        traces=tuple(traces),
        geometry=geometry,
        mode=confidence,
        merged=merged,
        kind=kind,
        block=block,
        routes=routes,
        experts=_frozen(experts),
        tokens=_frozen(tokens),
        context_tokens=context,
        course=course,
    )


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: policies see these arrays and must not change them."""
    view = array.view()
    view.flags.writeable = False
    return view


def _passes(
    traces: Sequence[RequestTrace],
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64]]:
    """Return kind, block and kept tokens of every pass of the batch."""
    passes = max(t.passes for t in traces)
    kind = np.full(passes, Kind.PREFILL, np.uint8)
    block = np.zeros(passes, np.int32)
    kept = np.zeros(passes, np.int64)
    for trace in reversed(traces):
        block[: trace.passes] = trace.block
        kept[: trace.passes] += trace.context + np.diff(trace.token_offset)
    for wanted in (Kind.COMMIT, Kind.DENOISE):
        for trace in traces:
            kind[: trace.passes][trace.kind == wanted] = wanted
    return kind, block, kept


def _full_gate(merged: Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float32] | None:
    columns = [t.full_gate for t in traces if t.full_gate is not None]
    if len(columns) != len(traces):
        return None
    values = np.concatenate(columns)[merged.order].astype(np.float32)
    weight = merged.length.astype(np.float32)[:, None]
    if len(traces) == 1:
        return _frozen(values)
    total = np.add.reduceat(values * weight, merged.first)
    return _frozen((total / np.add.reduceat(weight, merged.first)).astype(np.float32))


def _embedding(traces: Sequence[RequestTrace], passes: int) -> NDArray[np.float32] | None:
    columns = [t.embedding for t in traces if t.embedding is not None]
    if len(columns) != len(traces):
        return None
    total = np.zeros((passes, columns[0].shape[1]), np.float32)
    weight = np.zeros((passes, 1), np.float32)
    for trace, embedding in zip(traces, columns, strict=True):
        tokens = np.diff(trace.token_offset).astype(np.float32)[:, None]
        total[: trace.passes] += embedding.astype(np.float32) * tokens
        weight[: trace.passes] += tokens
    return _frozen(total / weight)


def _carried(trace: RequestTrace) -> NDArray[np.float64]:
    """Return, per token row, the last confidence known for its position before the pass."""
    size = int(trace.position.max(initial=0)) + 1
    return carry_confidence(
        trace.token_offset, trace.position.astype(np.int64), trace.confidence, size
    )


def _course(
    traces: Sequence[RequestTrace],
    kind: NDArray[np.uint8],
    event_pass: NDArray[np.int64],
    event_layer: NDArray[np.int64],
    merged: Merged,
    offset: NDArray[np.int64],
    experts: NDArray[np.int64],
    tokens: NDArray[np.int64],
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


def _pass_load(traces: Sequence[RequestTrace], passes: int) -> NDArray[np.float64]:
    """Return tokens, requests and their summed context of each pass, float64 [P, 3]."""
    load = np.zeros((passes, 3))
    for trace in traces:
        load[: trace.passes, 0] += np.diff(trace.token_offset)
        load[: trace.passes, 1] += 1
        load[: trace.passes, 2] += trace.context
    return load


def _event_load(merged: Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float64]:
    """Return tokens, requests and their summed context of each event, float64 [V, 3]."""
    context = np.concatenate([t.context[t.event_pass] for t in traces])[merged.order]
    parts = np.stack([merged.length, np.ones_like(merged.length), context], axis=1)
    return np.add.reduceat(parts.astype(np.float64), merged.first, axis=0)
