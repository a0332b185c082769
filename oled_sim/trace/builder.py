"""Putting a request together pass by pass, as a model runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oled_sim.errors import TraceError
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.manifest import expert_dtype
from oled_sim.trace.schema import COSINE_GAPS, RequestTrace
from oled_sim.trace.validate import sortable_bits


class LayerRoutes(NamedTuple):
    """Routes of one layer in one pass of a ragged trace.

    ``layer``: index into ``geometry.layers``. ``rows`` [n]: tokens of the pass (0..T-1), in the
    order they were added. ``experts`` [n, k]; ``gates`` [n, k] or None.
    """

    layer: int
    rows: ArrayLike
    experts: ArrayLike
    gates: ArrayLike | None = None


class _Routes(NamedTuple):
    """Routes of a pass: events in ``layer`` order with ``counts`` rows each."""

    layer: NDArray[np.int16]
    counts: NDArray[np.int64]
    rows: NDArray[np.int32]
    experts: NDArray[Any]
    gates: NDArray[np.float16] | None


class _Pass(NamedTuple):
    kind: int
    block: int
    context: int
    time_us: float
    tokens: dict[str, NDArray[Any]]
    routes: _Routes
    signals: dict[str, NDArray[Any]]


_TOKEN_DTYPES = {
    "token_id": np.int32,
    "position": np.int32,
    "state": np.uint8,
    "confidence": np.float32,
    "accepted": np.bool_,
    "edited": np.bool_,
}
_SIGNAL_DTYPES = {"cosines": np.float32, "full_gate": np.float16, "embedding": np.float16}


class RequestBuilder:
    """Collects the passes of one request; memory grows with that request alone.

    Rows of an event are put in position order and the k slots of each by gate score descending,
    then id (spec §2), unless ``source_order`` keeps the order given.
    """

    def __init__(
        self, geometry: RoutingGeometry, request: int, *, source_order: bool = False
    ) -> None:
        self.geometry = geometry
        self.request = request
        self.source_order = source_order
        self._passes: list[_Pass] = []

    @property
    def passes(self) -> int:
        """Passes added so far."""
        return len(self._passes)

    def add_pass(
        self,
        kind: int,
        block: int,
        context: int,
        token_id: ArrayLike,
        position: ArrayLike,
        state: ArrayLike,
        confidence: ArrayLike,
        accepted: ArrayLike,
        edited: ArrayLike,
        experts: ArrayLike | Sequence[LayerRoutes],
        gates: ArrayLike | None = None,
        *,
        time_us: float | None = None,
        cosines: ArrayLike | None = None,
        full_gate: ArrayLike | None = None,
        embedding: ArrayLike | None = None,
    ) -> None:
        """Add one forward pass of T tokens over the model's L recorded MoE layers.

        Args:
            kind: a ``Kind``.
            block: index of the block, counted from position 0.
            context: tokens whose keys and values precede the pass.
            token_id: [T], the input of the pass.
            position: [T] strictly ascending.
            state: [T], a ``TokenState`` at the start of the pass.
            confidence: [T] in [0, 1], NaN unknown.
            accepted: [T] bool.
            edited: [T] bool.
            experts: [L, T, k] ids, or one :class:`LayerRoutes` per event of a ragged pass.
            gates: [L, T, k] as ``RequestTrace.gates``, or None.
            time_us: measured wall time of the pass.
            cosines: [L, 8] as ``RequestTrace.cosines``.
            full_gate: [L, E] block mean.
            embedding: [d] block mean.

        Raises:
            TraceError: shapes that do not fit each other, or ids that are no expert.
        """
        given = (token_id, position, state, confidence, accepted, edited)
        tokens = {
            name: np.array(values, dtype)  # a copy: callers may reuse their buffers
            for (name, dtype), values in zip(_TOKEN_DTYPES.items(), given, strict=True)
        }
        optional = {"cosines": cosines, "full_gate": full_gate, "embedding": embedding}
        signals = {
            name: np.array(values, _SIGNAL_DTYPES[name])
            for name, values in optional.items()
            if values is not None
        }
        routes = self._routes(experts, gates)
        time = np.nan if time_us is None else float(time_us)
        added = _Pass(int(kind), int(block), int(context), time, tokens, routes, signals)
        self._check_shapes(added)
        self._passes.append(added)

    def add_late(self, late: Callable[[], Mapping[str, Any]], **known: Any) -> None:
        """Add a pass whose arrays ``late`` returns, perhaps after waiting for them.

        ``known`` and what ``late`` returns are the arguments of :meth:`add_pass`.
        """
        self.add_pass(**known, **late())

    def build(self) -> RequestTrace:
        """Return the request.

        Raises:
            TraceError: no pass was added, or a signal is there in some passes only.
        """
        passes = self._passes
        if not passes:
            raise TraceError(f"request {self.request} has no pass: nothing was recorded")
        tokens = {name: np.concatenate([p.tokens[name] for p in passes]) for name in _TOKEN_DTYPES}
        routes = [p.routes for p in passes]
        token_offset = offsets([len(p.tokens["position"]) for p in passes])
        row_token = [r.rows + first for r, first in zip(routes, token_offset[:-1], strict=True)]
        trace = RequestTrace(
            request=self.request,
            kind=np.array([p.kind for p in passes], np.uint8),
            block=np.array([p.block for p in passes], np.int32),
            context=np.array([p.context for p in passes], np.int32),
            accepted_count=np.array([p.tokens["accepted"].sum() for p in passes], np.int32),
            time_us=np.array([p.time_us for p in passes], np.float64),
            token_offset=token_offset,
            **tokens,
            event_pass=np.repeat(
                np.arange(len(passes), dtype=np.int32), [len(r.layer) for r in routes]
            ),
            event_layer=np.concatenate([r.layer for r in routes]),
            event_offset=offsets(np.concatenate([r.counts for r in routes])),
            experts=np.concatenate([r.experts for r in routes]),
            gates=self._gates(routes),
            row_token=np.concatenate(row_token).astype(np.int32),
            full_gate=self._signal("full_gate", np.concatenate),
            embedding=self._signal("embedding", np.stack),
            cosines=self._signal("cosines", np.concatenate),
        )
        return trace if self.source_order else canonical(trace)

    def _routes(self, experts: Any, gates: Any) -> _Routes:
        if isinstance(experts, Sequence) and all(isinstance(r, LayerRoutes) for r in experts):
            return self._ragged_routes(experts)
        ids = np.asarray(experts)
        if ids.ndim != 3 or len(ids) != len(self.geometry.layers):
            self._refuse(
                f"experts has shape {ids.shape}, expected [{len(self.geometry.layers)}, T, k]"
            )
        layers, tokens, k = ids.shape
        layer, counts, rows = _dense(layers, tokens)
        return _Routes(
            layer=layer,
            counts=counts,
            rows=rows,
            experts=self._narrow(ids.reshape(-1, k), lambda: np.repeat(layer, counts)),
            gates=None if gates is None else np.array(gates, np.float16).reshape(-1, k),
        )

    def _ragged_routes(self, events: Sequence[LayerRoutes]) -> _Routes:
        events = sorted(events, key=lambda e: e.layer)
        k = self.geometry.top_k
        counts = np.array([len(np.asarray(e.rows)) for e in events], np.int64)
        layer = np.array([e.layer for e in events], np.int16)
        ids = _concatenate([e.experts for e in events], (-1, k))
        gated = [e.gates for e in events if e.gates is not None]
        if len(gated) not in (0, len(events)):
            self._refuse("gates are given for some layers only")
        return _Routes(
            layer=layer,
            counts=counts,
            rows=_concatenate([e.rows for e in events], (-1,)).astype(np.int32),
            experts=self._narrow(ids, lambda: np.repeat(layer, counts)),
            gates=_concatenate(gated, (-1, k)).astype(np.float16) if gated else None,
        )

    def _narrow(self, ids: NDArray[Any], layer: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return a copy of ids in their stored dtype; refuse what the cast would wrap around."""
        stored = expert_dtype(self.geometry.experts)
        if ids.dtype == stored and self.geometry.experts > np.iinfo(stored).max:
            return ids.copy()  # every value is an expert
        wrong = ((ids < 0) | (ids >= self.geometry.experts)).any(axis=1)
        if wrong.any():
            row = int(np.argmax(wrong))
            model_layer = self.geometry.layers[layer()[row]]
            self._refuse(
                f"layer {model_layer}: experts {ids[row].tolist()} are not all within"
                f" 0..{self.geometry.experts - 1} (padding rows must be dropped)"
            )
        return ids.astype(stored)

    def _check_shapes(self, added: _Pass) -> None:
        sizes = {name: values.shape for name, values in added.tokens.items()}
        if len(set(sizes.values())) != 1:
            self._refuse(f"token columns differ in shape: {sizes}")
        tokens, rows = len(added.tokens["position"]), added.routes.rows
        if len(rows) and not 0 <= rows.min() <= rows.max() < tokens:
            self._refuse(f"routes name token {rows.max()} of a pass with {tokens} tokens")
        wanted = (len(rows), self.geometry.top_k)
        for name in ("experts", "gates"):
            values = getattr(added.routes, name)
            if values is not None and values.shape != wanted:
                self._refuse(f"{name} has shape {values.shape}, expected {wanted}")
        events = len(added.routes.layer)
        widths = {"cosines": (events, COSINE_GAPS), "full_gate": (events, self.geometry.experts)}
        for name, shape in widths.items():
            if name in added.signals and added.signals[name].shape != shape:
                self._refuse(f"{name} has shape {added.signals[name].shape}, expected {shape}")

    def _gates(self, routes: list[_Routes]) -> NDArray[np.float16] | None:
        gates = [r.gates for r in routes if r.gates is not None]
        if not gates:
            return None
        if len(gates) != sum(len(r.layer) > 0 for r in routes):
            raise TraceError(f"request {self.request}: gates were given for some passes only")
        return np.concatenate(gates)

    def _signal(self, name: str, join: Any) -> NDArray[Any] | None:
        values = [p.signals[name] for p in self._passes if name in p.signals]
        if not values:
            return None
        if len(values) != len(self._passes):
            raise TraceError(f"request {self.request}: {name} was given for some passes only")
        return join(values)

    def _refuse(self, problem: str) -> None:
        raise TraceError(f"request {self.request}, iteration {self.passes}: {problem}")


@lru_cache(maxsize=64)
def _dense(layers: int, tokens: int) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Return ``layer``, ``counts`` and ``rows`` of a pass in which every layer has every token."""
    return (
        np.arange(layers, dtype=np.int16),
        np.full(layers, tokens),
        np.tile(np.arange(tokens, dtype=np.int32), layers),
    )


def canonical(trace: RequestTrace) -> RequestTrace:
    """Return ``trace`` with its routing rows and slots in the one order of the format.

    Rows of an event by token, the k slots of a row by stored gate score descending, then id.
    """
    experts, gates, row_token = trace.experts, trace.gates, trace.row_token
    if (order := _row_order(trace)) is not None:
        experts, row_token = experts[order], row_token[order]
        gates = None if gates is None else gates[order]
    if gates is None:
        experts = np.sort(experts, axis=1)
    else:
        experts, gates = sort_slots(experts, gates)
    return replace(trace, experts=experts, gates=gates, row_token=row_token)


def _row_order(trace: RequestTrace) -> NDArray[np.intp] | None:
    """Return the permutation that puts rows in token order, None when they are."""
    descends = np.diff(trace.row_token) < 0
    descends[trace.event_offset[1:-1] - 1] = False
    if not descends.any():
        return None
    event = np.repeat(np.arange(trace.events), np.diff(trace.event_offset))
    return np.lexsort((trace.row_token, event))


def sort_slots(
    experts: NDArray[Any], gates: NDArray[np.float16]
) -> tuple[NDArray[Any], NDArray[np.float16]]:
    """Sort rows by gate descending, then id.

    Score and id share one integer, so that a plain sort does it, with nothing to gather.
    """
    score = sortable_bits(gates.view(np.uint16))
    keys = ((~score).astype(np.uint32) << 16) | experts
    keys.sort(axis=1)
    score = ~(keys >> 16).astype(np.uint16)
    positive = (score >> 15).astype(np.bool_)
    bits = np.where(positive, score & np.uint16(0x7FFF), ~score)
    return (keys & 0xFFFF).astype(experts.dtype), bits.view(np.float16)


def offsets(counts: ArrayLike) -> NDArray[np.int64]:
    """Return where each group starts, and the end: int64 [n + 1]."""
    return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))


def _concatenate(arrays: Sequence[ArrayLike], shape: tuple[int, ...]) -> NDArray[Any]:
    if not arrays:
        return np.empty([max(0, n) for n in shape], np.int64)
    return np.concatenate([np.asarray(a).reshape(shape) for a in arrays])
