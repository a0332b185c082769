"""Rules that every request of a trace obeys (spec §3), checked on every write and every read.

Each rule is a function that raises :class:`RuleError` at the first place where it does not hold.
Later rules rely on earlier ones. All are vectorised: checking costs a fraction of reading.

Several come from traces in the wild: recorders that pad with -1 or with zeros, that leave the
shard of another device unfilled, that write every layer into slot 0, or that keep the dummy batch
an engine profiles itself with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.files import table_path
from oled_sim.trace.manifest import RENORMALISED_GATES, Manifest, RequestEntry
from oled_sim.trace.schema import COSINE_GAPS, Kind, RequestTrace, TokenState

GATE_SUM_TOLERANCE = 4e-3
"""Renormalised gates sum to 1 up to the rounding of k float16 scores (at most k/E·2⁻¹¹ each)."""

DUMMY_ROWS = 64
"""This many equal routing rows in a row, ids and gates, are no text but a profiling batch."""

DUMMY_ROWS_WITHOUT_GATES = 128

_FLOAT16_INFINITY = 0x7C00
_FLOAT16_ONE = 0x3C00

_Mask = NDArray[np.bool_] | np.bool_
"""numpy's stubs let ``any(axis=1)`` be a scalar too."""


class RuleError(Exception):
    """A violation: which table, what, and where in the request.

    ``layer`` is the model's own index.
    """

    def __init__(
        self, table: str, problem: str, iteration: int | None = None, layer: int | None = None
    ) -> None:
        super().__init__(problem)
        self.table = table
        self.iteration = iteration
        self.layer = layer

    def locate(self, where: str, request: int) -> TraceError:
        """Return the error for the user, which names file, request, iteration and layer."""
        place = f"{where}/{table_path(self.table, request)}, request {request}"
        if self.iteration is not None:
            place += f", iteration {self.iteration}"
        if self.layer is not None:
            place += f", layer {self.layer}"
        return TraceError(f"{place}: {self}")


def check_request(
    trace: RequestTrace,
    manifest: Manifest,
    where: str,
    *,
    signals: Collection[str] | None = None,
    entry: RequestEntry | None = None,
) -> None:
    """Check one request against every rule.

    Args:
        trace: the request.
        manifest: of its trace.
        where: path of the trace, for the message.
        signals: the optional signals that were read (None: all of the manifest's).
        entry: the request's entry in the manifest, whose counts must agree.

    Raises:
        TraceError: the first violation, with file, request, iteration and layer.
    """
    view = _View(trace, manifest, frozenset(manifest.signals if signals is None else signals))
    try:
        for rule in _RULES:
            rule(view)
        if entry is not None:
            _identity(trace, entry)
    except RuleError as broken:
        raise broken.locate(where, trace.request if entry is None else entry.request) from None


class _View:
    """A request in the form that rules read: slots as rows, so that numpy runs along tokens.

    ``ids``: [k, N]. ``gate_bits``: uint16 [k, N], the float16 scores as bits, or None.
    """

    def __init__(self, trace: RequestTrace, manifest: Manifest, signals: frozenset[str]) -> None:
        self.trace = trace
        self.manifest = manifest
        self.signals = signals
        self.ids = np.ascontiguousarray(trace.experts.T)
        gates = trace.gates
        self.gate_bits = None if gates is None else np.ascontiguousarray(gates.T).view(np.uint16)

    @property
    def geometry(self) -> RoutingGeometry:
        return self.manifest.geometry

    def refuse_pass(self, table: str, wrong: _Mask, problem: str) -> None:
        """Raise for the first True of ``wrong`` [I]."""
        if wrong.any():
            raise RuleError(table, problem, int(np.argmax(wrong)))

    def refuse_token(self, wrong: _Mask, problem: str) -> None:
        """Raise for the first True of ``wrong`` [T]."""
        if wrong.any():
            token = int(np.argmax(wrong))
            iteration = int(np.searchsorted(self.trace.token_offset, token, "right")) - 1
            position = self.trace.position[token]
            raise RuleError("tokens", f"position {position}: {problem}", iteration)

    def refuse_event(self, wrong: _Mask, problem: str) -> None:
        """Raise for the first True of ``wrong`` [V]."""
        if wrong.any():
            self.blame_event(int(np.argmax(wrong)), problem)

    def refuse_row(self, wrong: _Mask, problem: str) -> None:
        """Raise for the first True of ``wrong`` [N]; ``{}`` in ``problem`` takes its ids."""
        if wrong.any():
            row = int(np.argmax(wrong))
            event = int(np.searchsorted(self.trace.event_offset, row, "right")) - 1
            position = self.trace.position[self.trace.row_token[row]]
            ids = self.trace.experts[row].tolist()
            self.blame_event(event, f"position {position}: " + problem.format(ids))

    def blame_event(self, event: int, problem: str) -> NoReturn:
        iteration = int(self.trace.event_pass[event])
        layer = self.geometry.layers[self.trace.event_layer[event]]
        raise RuleError("routing", problem, iteration, layer)


def _lengths(view: _View) -> None:
    t = view.trace
    passes, tokens = t.passes, len(t.position)
    events, rows = t.events, len(t.experts)
    if passes == 0:
        raise RuleError("iterations", "there is no pass")
    for name in ("block", "context", "accepted_count", "time_us"):
        _length("iterations", name, getattr(t, name), passes)
    for name in ("token_id", "state", "confidence", "accepted", "edited"):
        _length("tokens", name, getattr(t, name), tokens)
    _length("routing", "event_pass", t.event_pass, events)
    _length("routing", "row_token", t.row_token, rows)
    _partition("tokens", "token_offset", t.token_offset, passes, tokens)
    _partition("routing", "event_offset", t.event_offset, events, rows)
    view.refuse_pass("tokens", np.diff(t.token_offset) == 0, "the pass has no token")


def _length(table: str, name: str, values: NDArray[Any], expected: int) -> None:
    if len(values) != expected:
        raise RuleError(table, f"{name} has {len(values)} values instead of {expected}")


def _partition(table: str, name: str, offset: NDArray[Any], groups: int, total: int) -> None:
    _length(table, name, offset, groups + 1)
    if offset[0] != 0 or offset[-1] != total or (np.diff(offset) < 0).any():
        raise RuleError(table, f"{name} does not partition {total} rows")


def _signal_shapes(view: _View) -> None:
    t, g = view.trace, view.geometry
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "gates": ("routing", t.experts.shape),
        "full_gate": ("routing", (t.events, g.experts)),
        "cosines": ("iterations", (t.events, COSINE_GAPS)),
        "embedding": ("iterations", (t.passes,)),
    }
    for name, (table, shape) in shapes.items():
        values = getattr(t, name)
        if name in view.signals and values is None:
            raise RuleError(table, f"the manifest promises the signal {name!r}, which is missing")
        if values is not None and values.shape[: len(shape)] != shape:
            raise RuleError(table, f"{name} has shape {values.shape}, expected {shape}")
    if t.experts.shape[1:] != (g.top_k,):
        raise RuleError("routing", f"{t.experts.shape[-1]} ids per token, expected {g.top_k}")


def _passes(view: _View) -> None:
    t = view.trace
    view.refuse_pass("iterations", t.kind > max(Kind), "the kind of the pass is unknown")
    late = (t.kind == Kind.PREFILL) & np.logical_or.accumulate(t.kind != Kind.PREFILL)
    view.refuse_pass("iterations", late, "a prefill pass comes after a denoise or commit pass")
    view.refuse_pass("iterations", t.block < 0, "the block is negative")
    view.refuse_pass("iterations", t.context < 0, "the context length is negative")
    timed = ~np.isnan(t.time_us)
    wrong = timed & ~((t.time_us >= 0) & (t.time_us < np.inf))
    view.refuse_pass("iterations", wrong, "time_us is negative or infinite")


def _token_rows(view: _View) -> None:
    t = view.trace
    view.refuse_token(t.state > max(TokenState), "the token state is unknown")
    view.refuse_token(t.position < 0, "the position is negative")
    repeated = np.diff(t.position, prepend=-1) <= 0
    repeated[t.token_offset[:-1]] = False
    view.refuse_token(repeated, "positions of a pass are not strictly ascending")
    view.refuse_token(t.token_id < -1, "the token id is negative (-1 alone says redacted)")


def _acceptance(view: _View) -> None:
    t = view.trace
    view.refuse_token(t.accepted & (t.state != TokenState.MASKED), "accepted but not masked")
    view.refuse_token(t.edited & (t.state != TokenState.DECODED), "edited but not decoded")
    accepted = np.add.reduceat(t.accepted.astype(np.int64), t.token_offset[:-1])
    wrong = accepted != t.accepted_count
    view.refuse_pass("iterations", wrong, "the accepted count is not that of the tokens table")


def _confidence(view: _View) -> None:
    t = view.trace
    known = ~np.isnan(t.confidence)
    outside = known & ~((t.confidence >= 0) & (t.confidence <= 1))
    view.refuse_token(outside, "the confidence is not within 0..1")
    if "confidence" in view.manifest.signals:
        unknown = ~known & (t.state == TokenState.MASKED)
        view.refuse_token(unknown, "a masked token has no confidence")


def _event_order(view: _View) -> None:
    t, layers = view.trace, len(view.geometry.layers)
    if t.events == 0:
        raise RuleError("routing", "there is no event")
    _range("event_pass", t.event_pass, t.passes)
    _range("event_layer", t.event_layer, layers)
    order = t.event_pass.astype(np.int64) * layers + t.event_layer
    wrong = np.diff(order, prepend=-1) <= 0
    view.refuse_event(wrong, "events are not in order of iteration and layer")


def _range(name: str, values: NDArray[Any], end: int) -> None:
    if not 0 <= values.min() <= values.max() < end:
        raise RuleError("routing", f"{name} is not within 0..{end - 1}")


def _coverage(view: _View) -> None:
    t = view.trace
    rows = np.diff(t.event_offset)
    tokens = np.diff(t.token_offset)[t.event_pass]
    view.refuse_event(rows == 0, "the event has no row")
    if not view.manifest.ragged:
        _every_layer(view)
        view.refuse_event(rows != tokens, "the event does not hold every token of its pass")
    within = t.row_token - np.repeat(t.token_offset[t.event_pass], rows)
    outside = (within < 0) | (within >= np.repeat(tokens, rows))
    wrong = np.logical_or.reduceat(outside, t.event_offset[:-1])
    view.refuse_event(wrong, "a row belongs to no token of the pass")
    _distinct_rows(view, rows)


def _every_layer(view: _View) -> None:
    t, layers = view.trace, view.geometry.layers
    if t.events == t.passes * len(layers):  # events are distinct
        return
    seen = np.zeros((t.passes, len(layers)), np.bool_)
    seen[t.event_pass, t.event_layer] = True
    iteration, layer = np.argwhere(~seen)[0].tolist()
    raise RuleError("routing", "the layer has no event", iteration, layers[layer])


def _distinct_rows(view: _View, rows: NDArray[np.int64]) -> None:
    t = view.trace
    # Only ragged traces store which token a row belongs to.
    if view.manifest.row_order == "canonical" or not view.manifest.ragged:
        descends = np.diff(t.row_token, prepend=-1) <= 0
        descends[t.event_offset[:-1]] = False
        view.refuse_row(descends, "rows are not in position order")
        return
    event = np.repeat(np.arange(t.events), rows)
    order = np.lexsort((t.row_token, event))
    again = (np.diff(t.row_token[order], prepend=-1) == 0) & (np.diff(event, prepend=-1) == 0)
    wrong = np.zeros(len(again), np.bool_)
    wrong[order] = again
    view.refuse_row(wrong, "the token has two rows in one event")


def _expert_ids(view: _View) -> None:
    ids, experts = view.ids, view.geometry.experts
    outside = (ids >= experts).any(axis=0)
    view.refuse_row(outside, f"ids {{}} are not all within 0..{experts - 1}")
    if len(ids) > 1:
        zero = ~ids.any(axis=0)
        view.refuse_row(zero, "ids {} are all 0: drop padding rows and unfilled shards")
    view.refuse_row(_repeats(ids), "an expert occurs twice in the top-k {}")


def _repeats(ids: NDArray[Any]) -> NDArray[np.bool_]:
    """Return which columns of ``ids`` [k, N] hold a value twice."""
    found = np.zeros(ids.shape[1], np.bool_)
    for slot in range(1, len(ids)):
        found |= (ids[:slot] == ids[slot]).any(axis=0)
    return found


def _dummy_rows(view: _View) -> None:
    t, gated = view.trace, "gates" in view.manifest.signals
    run = DUMMY_ROWS if gated else DUMMY_ROWS_WITHOUT_GATES
    trivial = view.geometry.top_k == view.geometry.experts and not gated
    unread = gated and view.gate_bits is None
    if trivial or unread or np.diff(t.event_offset).max() < run:
        return
    same = (view.ids[:, 1:] == view.ids[:, :-1]).all(axis=0)
    if view.gate_bits is not None:
        same &= (view.gate_bits[:, 1:] == view.gate_bits[:, :-1]).all(axis=0)
    same[t.event_offset[1:-1] - 1] = False
    count = np.concatenate(([0], np.cumsum(same)))
    whole = count[run - 1 :] - count[: 1 - run] == run - 1
    view.refuse_row(whole, f"{run} equal rows {{}}: drop the dummy rows of a profiling batch")


def _unfilled_shards(view: _View) -> None:
    """Find slots that hold expert 0 (and gate 0) in every row of a layer."""
    t, g = view.trace, view.geometry
    gated = "gates" in view.manifest.signals
    if g.top_k == g.experts or (gated and view.gate_bits is None):
        return
    zero = view.ids == 0
    if view.gate_bits is not None:
        zero &= view.gate_bits == 0
    slots = np.flatnonzero(zero.sum(axis=1) >= DUMMY_ROWS)
    layer = np.repeat(t.event_layer, np.diff(t.event_offset))
    for slot in slots:
        spikes = np.bincount(layer[zero[slot]], minlength=len(g.layers))
        rows = np.bincount(layer, minlength=len(g.layers))
        filled = (spikes == rows) & (rows >= DUMMY_ROWS)
        problem = "expert 0 fills one slot of every row of the layer: a shard was not recorded"
        view.refuse_event(filled[t.event_layer], problem)


def _gate_values(view: _View) -> None:
    gates, bits = view.trace.gates, view.gate_bits
    if gates is None or bits is None:
        return
    if view.manifest.gate_convention != RENORMALISED_GATES:
        wrong = ((bits & _FLOAT16_INFINITY) == _FLOAT16_INFINITY).any(axis=0)
        view.refuse_row(wrong, "a gate of the experts {} is not finite")
        return
    # Bits above infinity's are NaN or have the sign bit set.
    wrong = (bits >= _FLOAT16_INFINITY).any(axis=0)
    view.refuse_row(wrong, "a gate of the experts {} is negative or not finite")
    total = np.einsum("nk->n", gates.astype(np.float32))  # many times faster than a product
    wrong = np.abs(total - 1) > GATE_SUM_TOLERANCE
    view.refuse_row(wrong, "the gates of the experts {} do not sum to 1")


def _slot_order(view: _View) -> None:
    gated = "gates" in view.manifest.signals
    if view.manifest.row_order != "canonical" or (gated and view.gate_bits is None):
        return
    ascending = view.ids[:-1] < view.ids[1:]
    if view.gate_bits is None:
        view.refuse_row(~ascending.all(axis=0), "ids {} are not ascending")
        return
    scores = sortable_bits(view.gate_bits)
    ordered = (scores[:-1] > scores[1:]) | ((scores[:-1] == scores[1:]) & ascending)
    view.refuse_row(~ordered.all(axis=0), "experts {} are not in order of gate score, then id")


def sortable_bits(bits: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """Map bits of float16 to integers of the same order, which compare many times faster."""
    negative = (bits >> 15).astype(np.bool_)
    return np.where(negative, ~bits, bits | np.uint16(0x8000))


def _event_signals(view: _View) -> None:
    t = view.trace
    if t.full_gate is not None:
        wrong = (t.full_gate.view(np.uint16) > _FLOAT16_ONE).any(axis=1)
        view.refuse_event(wrong, "the full gate is not within 0..1")
    if t.cosines is not None:
        wrong = (np.abs(t.cosines) > 1 + 1e-3).any(axis=1)  # NaN compares false: unknown
        view.refuse_event(wrong, "a cosine is not within -1..1")
    if t.embedding is not None:
        wrong = ~np.isfinite(t.embedding).all(axis=1)
        view.refuse_pass("iterations", wrong, "the embedding is not finite")


def _identity(trace: RequestTrace, entry: RequestEntry) -> None:
    if trace.request != entry.request:
        raise RuleError("iterations", f"the file is that of request {trace.request}")
    for name, table in (("passes", "iterations"), ("events", "routing")):
        found, stated = getattr(trace, name), getattr(entry, name)
        if found != stated:
            raise RuleError(table, f"{found} {name}, the manifest says {stated}")


_RULES = (
    _lengths,
    _passes,
    _token_rows,
    _acceptance,
    _confidence,
    _event_order,
    _coverage,
    _signal_shapes,
    _expert_ids,
    _dummy_rows,
    _unfilled_shards,
    _gate_values,
    _slot_order,
    _event_signals,
)
