"""What a trace holds (spec §3): vocabularies and the in-memory form of one request.

A trace on disk is ``manifest.json`` plus one Parquet file per table and request. In memory a
request is a set of flat numpy arrays (:class:`RequestTrace`); nothing here knows how it was
stored.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1

SIGNALS = ("ids", "gates", "confidence", "token_state", "full_gate", "embedding", "cosines")
"""Signals that a trace may hold and that a policy or analysis may need."""

TABLES = ("iterations", "tokens", "routing")
"""Parquet tables of a request: one row per pass, per token of a pass, per event."""

COSINE_GAPS = 8
"""``cosines`` compares a pass with each of this many previous passes of the request."""


class Kind(IntEnum):
    """What a forward pass is for."""

    PREFILL = 0
    DENOISE = 1
    COMMIT = 2


class TokenState(IntEnum):
    """State of a position at the start of a pass."""

    MASKED = 0
    DECODED = 1
    PROMPT = 2


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """One request, columnar.

    I passes, V events (one per pass and recorded MoE layer), T token rows in all passes, N
    routing rows in all events. Rows of pass ``i`` are ``token_offset[i]:token_offset[i + 1]``;
    routing rows of event ``v`` are ``event_offset[v]:event_offset[v + 1]``. Events are in
    execution order: by pass, then by layer. Arrays are made read-only, whoever built them, so that
    compiled code sees one type.

    Attributes:
        request: number of the request in the trace.
        kind: uint8 [I], a :class:`Kind`.
        block: int32 [I], index of the block being denoised (absolute, counted from position 0).
        context: int32 [I], tokens whose keys and values precede this pass (KV length).
        accepted_count: int32 [I], positions accepted by the pass.
        time_us: float64 [I], measured wall time of the pass, NaN where not measured.
        position: int32 [T], absolute position of the token in the request.
        token_id: int32 [T], -1 where the trace holds no ids (redacted prompts).
        state: uint8 [T], a :class:`TokenState` at the start of the pass.
        confidence: float32 [T], after the pass; NaN where unknown (prompt before the block).
        accepted: bool [T]. edited: bool [T].
        event_pass: int32 [V], the pass of the event.
        event_layer: int16 [V], index into ``geometry.layers``.
        experts: uint8 or uint16 [N, k], distinct ids per row, gate score descending.
        gates: float16 [N, k], renormalised top-k weights before the routed scaling factor;
            None when the trace has no ``gates``.
        row_token: int32 [N], row of the token table (0..T-1) that each routing row belongs to.
        full_gate: float16 [V, E] block-mean unbiased sigmoid, or None.
        embedding: float16 [I, d] block-mean input embedding, or None.
        cosines: float32 [V, 8] cosine of the block-mean gate input to that of the previous
            8 passes at the same layer (column g - 1 is gap g; NaN before the first), or None.
    """

    request: int
    kind: NDArray[np.uint8]
    block: NDArray[np.int32]
    context: NDArray[np.int32]
    accepted_count: NDArray[np.int32]
    time_us: NDArray[np.float64]
    token_offset: NDArray[np.int64]
    position: NDArray[np.int32]
    token_id: NDArray[np.int32]
    state: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    accepted: NDArray[np.bool_]
    edited: NDArray[np.bool_]
    event_pass: NDArray[np.int32]
    event_layer: NDArray[np.int16]
    event_offset: NDArray[np.int64]
    experts: NDArray[np.uint8] | NDArray[np.uint16]
    gates: NDArray[np.float16] | None
    row_token: NDArray[np.int32]
    full_gate: NDArray[np.float16] | None = None
    embedding: NDArray[np.float16] | None = None
    cosines: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if isinstance(values, np.ndarray):
                values.flags.writeable = False

    @property
    def passes(self) -> int:
        """Number of forward passes I."""
        return len(self.kind)

    @property
    def events(self) -> int:
        """Number of events V."""
        return len(self.event_layer)

    def tokens(self, i: int) -> int:
        """Number of tokens of pass ``i``."""
        return int(self.token_offset[i + 1] - self.token_offset[i])
