"""The passes, events and routing rows of several requests, merged into those of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.members import Member
from oled_sim.trace.schema import Kind, RequestTrace


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Return a read-only view: policies see these arrays and must not change them."""
    view = array.view()
    view.flags.writeable = False
    return view


def own(array: NDArray[Any], dtype: type | None = None) -> NDArray[Any]:
    """Return a read-only copy: a view would lead to the rest of the trace, or of the state."""
    copied = array.copy() if dtype is None else array.astype(dtype)
    copied.flags.writeable = False
    return copied


class Merged:
    """The source events of a batch in execution order: by pass, layer, then request."""

    def __init__(self, members: Sequence[Member]) -> None:
        traces = [m.trace for m in members]
        event_pass = np.concatenate([m.at[m.trace.event_pass] for m in members])
        layer = np.concatenate([t.event_layer for t in traces]).astype(np.int64)
        owner = np.repeat(np.arange(len(traces)), [t.events for t in traces])
        order = _execution_order(event_pass, layer, owner)
        self.order = order
        self.own_pass = np.concatenate([t.event_pass for t in traces]).astype(np.int64)[order]
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
        self._shift = start - (ends - self.length)
        # One request with nothing between its rows is in order as it is.
        self._in_order = len(traces) == 1 and not self._shift.any()
        before = np.concatenate([[0], ends])
        self.rows = np.append(before[self.first], before[-1]).astype(np.int64)

    @cached_property
    def source(self) -> NDArray[np.int64]:
        """int64 [N]: row i of the batch is row ``source[i]`` of the concatenated requests."""
        return np.arange(self.rows[-1]) + np.repeat(self._shift, self.length)

    def take(self, columns: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Return one column per routing row of all requests, in the batch's order."""
        if self._in_order and len(columns[0]) == self.rows[-1]:
            return frozen(np.ascontiguousarray(columns[0]))
        joined = columns[0] if len(columns) == 1 else np.concatenate(columns)
        return frozen(np.ascontiguousarray(joined[self.source]))


def passes_of(
    members: Sequence[Member],
) -> tuple[NDArray[np.uint8], NDArray[np.int32], NDArray[np.int64]]:
    """Return kind, block and kept tokens of every pass of the batch."""
    passes = 1 + max(int(m.at[-1]) for m in members)
    kind = np.full(passes, Kind.PREFILL, np.uint8)
    block = np.zeros(passes, np.int32)
    kept = np.zeros(passes, np.int64)
    for member in reversed(members):
        trace, at = member.trace, member.at
        block[at] = trace.block
        # A request that sits out keeps what it had.
        span = np.arange(at[0], at[-1] + 1)
        own = np.searchsorted(at, span, "right") - 1
        kept[span] += (trace.context + np.diff(trace.token_offset))[own]
    for wanted in (Kind.COMMIT, Kind.DENOISE):
        for member in members:
            kind[member.at[member.trace.kind == wanted]] = wanted
    return kind, block, kept


def full_gate_means(merged: Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float32] | None:
    """Return float32 [V, E], means weighted by tokens over the requests; None if one has none."""
    columns = [t.full_gate for t in traces if t.full_gate is not None]
    if len(columns) != len(traces):
        return None
    values = np.concatenate(columns)[merged.order].astype(np.float32)
    weight = merged.length.astype(np.float32)[:, None]
    if len(traces) == 1:
        return frozen(values)
    total = np.add.reduceat(values * weight, merged.first)
    return frozen((total / np.add.reduceat(weight, merged.first)).astype(np.float32))


def embedding_means(members: Sequence[Member], passes: int) -> NDArray[np.float32] | None:
    """Return float32 [P, d], means weighted by tokens over the requests; None if one has none."""
    columns = [m.trace.embedding for m in members if m.trace.embedding is not None]
    if len(columns) != len(members):
        return None
    total = np.zeros((passes, columns[0].shape[1]), np.float32)
    weight = np.zeros((passes, 1), np.float32)
    for member, embedding in zip(members, columns, strict=True):
        tokens = np.diff(member.trace.token_offset).astype(np.float32)[:, None]
        total[member.at] += embedding.astype(np.float32) * tokens
        weight[member.at] += tokens
    return frozen(total / weight)


def pass_load(members: Sequence[Member], passes: int) -> NDArray[np.float64]:
    """Return tokens, requests, summed context and rows of the LM head by pass, float64 [P, 4]."""
    load = np.zeros((passes, 4))
    for member in members:
        load[member.at, 0] += np.diff(member.trace.token_offset)
        load[member.at, 1] += 1
        load[member.at, 2] += member.trace.context
        load[member.at, 3] += member.head_rows
    return load


def event_load(merged: Merged, traces: Sequence[RequestTrace]) -> NDArray[np.float64]:
    """Return tokens, requests and their summed context of each event, float64 [V, 3]."""
    context = np.concatenate([t.context[t.event_pass] for t in traces])[merged.order]
    parts = np.stack([merged.length, np.ones_like(merged.length), context], axis=1)
    return np.add.reduceat(parts.astype(np.float64), merged.first, axis=0)


def _execution_order(
    event_pass: NDArray[np.int64], layer: NDArray[np.int64], owner: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the order of events by pass, layer, then request."""
    key = event_pass * (int(layer.max(initial=0)) + 1) + layer
    if bool((key[1:] > key[:-1]).all()):  # as they are in a trace of one request
        return np.arange(len(key))
    return np.lexsort((owner, layer, event_pass))
