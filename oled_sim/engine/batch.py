"""Requests made ready for a run: lock-step passes, activated sets, policy-independent costs.

A batch of B requests starts together. Its pass p advances each request that has a pass p by that
pass, whatever its kind; an event of the batch is the union of the requests' events of one layer.
Everything here is the same for every policy, so one batch serves many runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.fixed_costs import fill_fixed_costs
from oled_sim.engine.routes import activated_sets, carry_confidence
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES, Course
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace

CONFIDENCE_MODES = ("previous", "end", "current")


@dataclass(frozen=True)
class Batch:
    """Requests that run in lock step. B requests, P passes, V events, N routing rows.

    Attributes:
        traces: the requests.
        kind: uint8 [P], prefill only if every request present prefills; else denoise if any
            request denoises, else commit.
        block: int32 [P], of the first request present.
        event_pass, event_layer: int64 [V].
        rows: int64 [V + 1], routing rows of each event.
        routes: uint8/uint16 [N, k]. gates: float32 [N, k] or None.
        experts, tokens: int64 [ΣA] and gate_mass: float64 [ΣA] (NaN without gates), those of
            event v from ``course.offset[v]`` on.
        confidence: float64 [N], as known at the gate in the run's mode, 1 where unknown.
        confidence_after: float64 [N], of the pass itself, 1 where unknown.
        position: int32 [N]. state: uint8 [N]. owner: int32 [N], request of each row.
        full_gate: float32 [V, E] or None; embedding: float32 [P, d] or None (means weighted by
            tokens over the requests of the batch).
        context_tokens: int64 [P], tokens whose keys and values are kept during the pass.
        course: what kernels read; ``counts`` and ``times`` in it are filled by a run.
    """

    traces: tuple[RequestTrace, ...]
    kind: NDArray[np.uint8]
    block: NDArray[np.int32]
    event_pass: NDArray[np.int64]
    event_layer: NDArray[np.int64]
    rows: NDArray[np.int64]
    routes: NDArray[Any]
    gates: NDArray[np.float32] | None
    experts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    gate_mass: NDArray[np.float64]
    confidence: NDArray[np.float64]
    confidence_after: NDArray[np.float64]
    position: NDArray[np.int32]
    state: NDArray[np.uint8]
    owner: NDArray[np.int32]
    full_gate: NDArray[np.float32] | None
    embedding: NDArray[np.float32] | None
    context_tokens: NDArray[np.int64]
    course: Course

    @property
    def passes(self) -> int:
        """Number of passes P, that of the longest request."""
        return len(self.kind)

    def fresh_course(self) -> Course:
        """Return the course with empty rows for measurements."""
        return self.course._replace(
            counts=np.zeros_like(self.course.counts),
            times=np.zeros_like(self.course.times),
            pass_counts=np.zeros_like(self.course.pass_counts),
            pass_times=np.zeros_like(self.course.pass_times),
        )


class _Merged:
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
        before = np.concatenate([[0], ends])
        self.rows = np.append(before[self.first], before[-1]).astype(np.int64)

    def take(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return one column per routing row of all requests, in the batch's order."""
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
    merged = _Merged(traces)
    kind, block, context = _passes(traces)
    event_pass, event_layer = merged.event_pass[merged.first], merged.layer[merged.first]
    routes = merged.take([t.experts for t in traces])
    gates = _gates(merged, traces)
    offset, experts, tokens, mass = activated_sets(
        merged.rows, routes, _or_nan(gates), geometry.experts
    )
    tokens_of = [t.row_token for t in traces]
    after = [np.where(np.isnan(t.confidence), 1.0, t.confidence) for t in traces]
    after_rows = merged.take([c[r] for c, r in zip(after, tokens_of, strict=True)])
    before_rows = after_rows
    if confidence != "current":
        known = [_carried(t) for t in traces]
        before_rows = merged.take([c[r] for c, r in zip(known, tokens_of, strict=True)])
    course = _course(traces, kind, event_pass, event_layer, merged, offset, experts, tokens)
    fill_fixed_costs(course, _pass_load(traces, len(kind)), _event_load(merged, traces), costs)
    return Batch(
        traces=tuple(traces),
        kind=kind,
        block=block,
        event_pass=event_pass,
        event_layer=event_layer,
        rows=merged.rows,
        routes=routes,
        gates=gates,
        experts=_frozen(experts),
        tokens=_frozen(tokens),
        gate_mass=_frozen(mass),
        confidence=before_rows,
        confidence_after=after_rows,
        position=merged.take([t.position[t.row_token] for t in traces]),
        state=merged.take([t.state[t.row_token] for t in traces]),
        owner=merged.take([np.full(len(t.experts), t.request, np.int32) for t in traces]),
        full_gate=_full_gate(merged, traces),
        embedding=_embedding(traces, len(kind)),
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


def _gates(merged: _Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float32] | None:
    columns = [t.gates.astype(np.float32) for t in traces if t.gates is not None]
    return merged.take(columns) if len(columns) == len(traces) else None


def _or_nan(gates: NDArray[np.float32] | None) -> NDArray[np.float32]:
    """Return gates, or one row that stands for none: kernels take no None."""
    return np.full((1, 1), np.nan, np.float32) if gates is None else gates


def _full_gate(merged: _Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float32] | None:
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
    merged: _Merged,
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


def _event_load(merged: _Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float64]:
    """Return tokens, requests and their summed context of each event, float64 [V, 3]."""
    context = np.concatenate([t.context[t.event_pass] for t in traces])[merged.order]
    parts = np.stack([merged.length, np.ones_like(merged.length), context], axis=1)
    return np.add.reduceat(parts.astype(np.float64), merged.first, axis=0)
