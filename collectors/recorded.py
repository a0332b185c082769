"""One request as a recording tells it, and the trace request it becomes.

Importers of arrays, JSON lines and tables bring their sources into :class:`Recorded`; what all of
them must check, and how passes become events, is here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.trace.manifest import expert_dtype
from oled_sim.trace.schema import Kind, RequestTrace, TokenState
from oled_sim.trace.validate import GATE_SUM_TOLERANCE

Place = Callable[[int, int], str]
"""Says where a route stands in its file, of its ``place`` and layer: ``line 17``."""

Mask = NDArray[np.bool_] | np.bool_
"""numpy's stubs let ``any(axis=1)`` be a scalar too."""

AUTOREGRESSIVE_PREFILL = -1
"""Step of the prompt; a decoded token's step is its position."""

TOKEN_DTYPES: Mapping[str, Any] = {
    "kind": np.uint8,
    "block": np.int32,
    "context": np.int32,
    "time_us": np.float64,
    "token_id": np.int32,
    "state": np.uint8,
    "confidence": np.float32,
    "accepted": np.bool_,
    "edited": np.bool_,
}
"""Facts that a source may tell of a token in a pass; the first four are the same in all tokens of
the pass."""


@dataclass(frozen=True)
class Recorded:
    """One request: T tokens in all of its passes, n routes of one token in one layer each.

    Attributes:
        number: of the request.
        step: int64 [T], ascending: tokens of one step are one pass.
        position: int64 [T], strictly ascending within a step.
        token: int64 [n], index among the T of each route. layer: int32 [n], the model's own index.
        experts: integers [n, k]. gates: floats [n, k] as the source has them, or None.
        place: int64 [n], number of the line or row that a route was read from.
        source: the file. where: see :data:`Place`.
        about: what the source tells of tokens, arrays [T] of :data:`TOKEN_DTYPES`.
    """

    number: int
    step: NDArray[np.int64]
    position: NDArray[np.int64]
    token: NDArray[np.int64]
    layer: NDArray[np.int32]
    experts: NDArray[Any]
    gates: NDArray[Any] | None
    place: NDArray[np.int64]
    source: Path
    where: Place
    about: dict[str, NDArray[Any]] = field(default_factory=dict)

    def keep(self, wanted: Mask) -> Recorded:
        """Return the request with some of its routes, without tokens that are left with none."""
        if wanted.all():
            return self
        token = self.token[wanted]
        used = np.zeros(len(self.step), np.bool_)
        used[token] = True
        return replace(
            self,
            step=self.step[used],
            position=self.position[used],
            token=(np.cumsum(used) - 1)[token],
            layer=self.layer[wanted],
            experts=self.experts[wanted],
            gates=None if self.gates is None else self.gates[wanted],
            place=self.place[wanted],
            about={name: values[used] for name, values in self.about.items()},
        )

    def refuse_if(self, wrong: Mask, problem: str) -> None:
        """Raise for the first True of ``wrong`` [n]; ``{}`` in ``problem`` takes its ids."""
        if wrong.any():
            self.refuse(int(np.argmax(wrong)), problem)

    def refuse(self, route: int, problem: str) -> NoReturn:
        """Raise the complaint about one route; ``{}`` in ``problem`` takes its ids."""
        where = self.where(int(self.place[route]), int(self.layer[route]))
        ids = self.experts[route].tolist()
        raise TraceError(f"{self.source}, {where}: {problem.format(ids)}")


def autoregressive(position: NDArray[np.int64], prompt_tokens: int) -> NDArray[np.int64]:
    """Return the step of every token of a model that decodes one token per pass."""
    return np.where(position < prompt_tokens, AUTOREGRESSIVE_PREFILL, position)


def normalised(recorded: Recorded) -> NDArray[np.float16] | None:
    """Return gates that sum to 1 over the k, None where one is unknown (NaN).

    Rows that do already, up to rounding, are kept as they are.

    Raises:
        TraceError: a weight is negative or infinite, or all of a token are 0.
    """
    if recorded.gates is None:
        return None
    gates = recorded.gates.astype(np.float32)  # a copy: it is divided in place
    problem = "a weight of the experts {} is negative or infinite"
    recorded.refuse_if(((gates < 0) | np.isinf(gates)).any(axis=1), problem)
    total = np.einsum("nk->n", gates)[:, None]
    if np.isnan(total).any():
        return None
    recorded.refuse_if(total[:, 0] == 0, "the weights of the experts {} are all 0")
    np.divide(gates, total, out=gates, where=np.abs(total - 1) > GATE_SUM_TOLERANCE)
    return gates.astype(np.float16)


def check_routes(recorded: Recorded, experts: int) -> None:
    """Check the routes themselves.

    Args:
        recorded: the request.
        experts: per layer, or the most there can be.

    Raises:
        TraceError: an id out of range, an expert twice in a top-k, a token twice in a layer.
    """
    ids = recorded.experts
    recorded.refuse_if((ids < 0).any(axis=1), "the ids {} are negative in part")
    problem = f"the ids {{}} are not all within 0..{experts - 1}"
    recorded.refuse_if((ids >= experts).any(axis=1), problem)
    repeated = np.zeros(len(ids), np.bool_)
    for slot in range(1, ids.shape[1]):
        repeated |= (ids[:, :slot] == ids[:, slot : slot + 1]).any(axis=1)
    recorded.refuse_if(repeated, "an expert occurs twice in the top-k {}")
    layers = int(recorded.layer.max()) + 1 if len(ids) else 1
    key = recorded.token * layers + recorded.layer
    if not (np.diff(key) > 0).all():
        order = np.argsort(key, kind="stable")
        again = np.zeros(len(key), np.bool_)
        again[order[1:]] = np.diff(key[order]) == 0
        recorded.refuse_if(again, "the token is there twice in this layer, with the experts {}")


def build_request(
    recorded: Recorded,
    layers: Sequence[int],
    experts: int,
    gates: NDArray[np.float16] | None,
    block_length: int,
) -> RequestTrace:
    """Return the request of a trace; rows of an event keep the order of the source.

    Args:
        recorded: the request, checked.
        layers: of the trace, by the model's own index.
        experts: per layer.
        gates: [n, k], or None.
        block_length: of blocks where the source does not tell a pass's block.
    """
    start = np.flatnonzero(np.diff(recorded.step, prepend=recorded.step[0] - 1))
    token_offset = np.append(start, len(recorded.step))
    about = {
        name: values.astype(TOKEN_DTYPES[name], copy=False)
        for name, values in recorded.about.items()
    }
    kind = about["kind"][start] if "kind" in about else _kinds(recorded, start)
    tokens = _tokens(recorded, about, np.repeat(kind, np.diff(token_offset)))
    passes = _passes(recorded, about, kind, token_offset, block_length)
    return RequestTrace(
        request=recorded.number,
        kind=kind,
        accepted_count=np.add.reduceat(tokens["accepted"].astype(np.int32), start),
        token_offset=token_offset,
        **passes,
        **tokens,
        **_events(recorded, layers, expert_dtype(experts), gates, token_offset),
    )


def _events(
    recorded: Recorded,
    layers: Sequence[int],
    dtype: np.dtype[Any],
    gates: NDArray[np.float16] | None,
    token_offset: NDArray[np.int64],
) -> dict[str, Any]:
    """Return the events, by pass and layer, and their rows in the order of the source."""
    owner = np.searchsorted(token_offset, recorded.token, "right") - 1
    key = owner * len(layers) + np.searchsorted(np.asarray(layers), recorded.layer)
    ids = recorded.experts.astype(dtype, copy=False)
    row_token = recorded.token.astype(np.int32)
    if (np.diff(key) < 0).any():
        order = np.argsort(key, kind="stable")
        key, ids, row_token = key[order], ids[order], row_token[order]
        gates = None if gates is None else gates[order]
    event = np.flatnonzero(np.diff(key, prepend=-1))
    return {
        "event_pass": (key[event] // len(layers)).astype(np.int32),
        "event_layer": (key[event] % len(layers)).astype(np.int16),
        "event_offset": np.append(event, len(key)),
        "experts": ids,
        "gates": gates,
        "row_token": row_token,
    }


def _kinds(recorded: Recorded, start: NDArray[np.int64]) -> NDArray[np.uint8]:
    prefill = recorded.step[start] == AUTOREGRESSIVE_PREFILL
    return np.where(prefill, Kind.PREFILL, Kind.DENOISE).astype(np.uint8)


def _tokens(
    recorded: Recorded, about: Mapping[str, NDArray[Any]], kind: NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    """Return the token columns; without any word from the source, of a model that accepts a
    position in the last denoise pass that holds it."""
    size = len(recorded.step)
    denoise = kind == Kind.DENOISE
    state = np.where(denoise, TokenState.MASKED, TokenState.DECODED)
    state[kind == Kind.PREFILL] = TokenState.PROMPT
    defaults = {
        "token_id": np.full(size, -1, np.int32),
        "state": state.astype(np.uint8),
        "confidence": np.full(size, np.nan, np.float32),
        "edited": np.zeros(size, np.bool_),
    }
    found = {name: about.get(name, values) for name, values in defaults.items()}
    accepted = about.get("accepted")
    if accepted is None:
        accepted = _last_of_each(recorded.position, denoise)
        accepted &= found["state"] == TokenState.MASKED
    return {**found, "accepted": accepted, "position": recorded.position.astype(np.int32)}


def _last_of_each(values: NDArray[np.int64], among: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which elements are the last of their value among the selected ones."""
    found = np.zeros(len(values), np.bool_)
    chosen = np.flatnonzero(among)
    _, first = np.unique(values[chosen][::-1], return_index=True)
    found[chosen[len(chosen) - 1 - first]] = True
    return found


def _passes(
    recorded: Recorded,
    about: Mapping[str, NDArray[Any]],
    kind: NDArray[np.uint8],
    token_offset: NDArray[np.int64],
    block_length: int,
) -> dict[str, NDArray[Any]]:
    start, last = token_offset[:-1], token_offset[1:] - 1
    first_position = recorded.position[start]
    block = np.where(kind == Kind.PREFILL, recorded.position[last] + 1, first_position)
    defaults = {
        "block": (block // block_length).astype(np.int32),
        "context": first_position.astype(np.int32),
        "time_us": np.full(len(start), np.nan),
    }
    return {n: about[n][start] if n in about else v for n, v in defaults.items()}
