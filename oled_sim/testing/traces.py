"""Small random requests that obey every rule of the trace format.

They follow the course of block diffusion: a prefill over the prompt and the first block, denoise
passes until the block holds no mask, a commit pass, the next block. Everything is a function of a
seed, so a failing example can be replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.builder import LayerRoutes, RequestBuilder
from oled_sim.trace.manifest import Decode, Manifest, Model, Runtime
from oled_sim.trace.reader import Trace, open_trace
from oled_sim.trace.schema import COSINE_GAPS, SIGNALS, Kind, RequestTrace, TokenState
from oled_sim.trace.writer import TraceWriter

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

EMBEDDING_SIZE = 6
BASE_SIGNALS = ("ids", "gates", "confidence", "token_state")


def random_request(
    rng: np.random.Generator,
    geometry: RoutingGeometry,
    *,
    request: int = 0,
    passes: int = 12,
    tokens: int = 4,
    prompt: int | None = None,
    keep: float = 0.8,
    signals: Collection[str] = BASE_SIGNALS,
    ragged: bool = False,
) -> RequestTrace:
    """Return a random request of ``passes`` passes.

    Args:
        rng: source of all randomness.
        geometry: what to route over.
        request: number of the request.
        passes: forward passes I >= 1 (a prefill, then denoise and commit passes).
        tokens: block length.
        prompt: prompt tokens; random up to twice the block length by default.
        keep: chance that a token keeps its route while its state lasts.
        signals: which signals to generate.
        ragged: leave out random layers and tokens of events.
    """
    builder = RequestBuilder(geometry, request)
    course = _Course(rng, geometry, tokens, prompt, keep)
    for i in range(passes):
        step = course.advance()
        # A whole first pass makes sure that the request has an event.
        routing = _routing(rng, geometry, step.routes, signals, ragged and i > 0)
        builder.add_pass(*step.columns, **routing)
    trace = builder.build()
    if "confidence" not in signals:
        trace = replace(trace, confidence=np.full_like(trace.confidence, np.nan))
    return trace


class _Step(NamedTuple):
    """A pass: the first nine arguments of ``add_pass``, and the routes [L, T, k] of its tokens."""

    columns: tuple[Any, ...]
    routes: NDArray[np.int64]


class _Course:
    """The state of one request in generation."""

    def __init__(
        self,
        rng: np.random.Generator,
        geometry: RoutingGeometry,
        block_length: int,
        prompt: int | None,
        keep: float,
    ) -> None:
        self.rng = rng
        self.geometry = geometry
        self.block_length = block_length
        self.prompt = int(rng.integers(1, 2 * block_length + 1)) if prompt is None else prompt
        self.keep = keep
        self.block = self.prompt // block_length
        self.state = np.full(self.block_end, TokenState.MASKED, np.uint8)
        self.state[: self.prompt] = TokenState.PROMPT
        self.token_id = rng.integers(0, 1000, self.block_end)
        self.routes = self._draw(self.block_end)
        self.started = False

    @property
    def block_end(self) -> int:
        return (self.block + 1) * self.block_length

    def advance(self) -> _Step:
        """Run one pass and return what it recorded."""
        kind, start = self._next_pass()
        here = slice(start, self.block_end)
        state = self.state[here].copy()
        accepted = self._accept(state, kind)
        edited = (state == TokenState.DECODED) & (self.rng.random(len(state)) < 0.1)
        edited &= kind == Kind.DENOISE
        confidence = self.rng.random(len(state)).astype(np.float16)
        position = np.arange(start, self.block_end)
        columns = (
            kind, self.block, start, self.token_id[here].copy(), position, state, confidence,
            accepted, edited,
        )  # fmt: skip
        step = _Step(columns, self.routes[:, here].copy())
        self._update(start + np.flatnonzero(accepted | edited))
        if kind == Kind.COMMIT:
            self._open_block()
        return step

    def _next_pass(self) -> tuple[Kind, int]:
        if not self.started:
            self.started = True
            return Kind.PREFILL, 0
        start = self.block * self.block_length
        if (self.state[start:] == TokenState.MASKED).any():
            return Kind.DENOISE, start
        return Kind.COMMIT, start

    def _accept(self, state: NDArray[np.uint8], kind: Kind) -> NDArray[np.bool_]:
        masked = np.flatnonzero(state == TokenState.MASKED)
        accepted = np.zeros(len(state), np.bool_)
        if len(masked):
            count = self.rng.integers(0 if kind == Kind.PREFILL else 1, len(masked) + 1)
            accepted[self.rng.permutation(masked)[:count]] = True
        return accepted

    def _update(self, positions: NDArray[np.int64]) -> None:
        """Decode ``positions``; tokens that changed are routed anew, others by chance."""
        self.state[positions] = TokenState.DECODED
        self.token_id[positions] = self.rng.integers(0, 1000, len(positions))
        moved = self.rng.random(self.routes.shape[:2]) > self.keep
        moved[:, positions] = True
        self.routes = np.where(moved[..., None], self._draw(len(self.state)), self.routes)

    def _open_block(self) -> None:
        self.block += 1
        new = self.block_length
        self.state = np.concatenate([self.state, np.zeros(new, np.uint8)])
        self.token_id = np.concatenate([self.token_id, self.rng.integers(0, 1000, new)])
        self.routes = np.concatenate([self.routes, self._draw(new)], axis=1)

    def _draw(self, tokens: int) -> NDArray[np.int64]:
        shape = (len(self.geometry.layers), tokens, self.geometry.experts)
        return np.argsort(self.rng.random(shape), axis=-1)[..., : self.geometry.top_k]


def _routing(
    rng: np.random.Generator,
    geometry: RoutingGeometry,
    routes: NDArray[np.int64],
    signals: Collection[str],
    ragged: bool,
) -> dict[str, Any]:
    """Return the arguments of ``add_pass`` that describe the events of one pass."""
    gates = None
    if "gates" in signals:
        scores = rng.random(routes.shape) + 0.05
        gates = scores / scores.sum(axis=-1, keepdims=True)
    experts = _drop_rows(rng, routes, gates) if ragged else routes
    events = len(experts)
    found: dict[str, Any] = {"experts": experts, "gates": None if ragged else gates}
    if "full_gate" in signals:
        found["full_gate"] = rng.random((events, geometry.experts))
    if "cosines" in signals:
        found["cosines"] = rng.uniform(-1, 1, (events, COSINE_GAPS))
    if "embedding" in signals:
        found["embedding"] = rng.normal(size=EMBEDDING_SIZE)
    return found


def _drop_rows(
    rng: np.random.Generator, routes: NDArray[np.int64], gates: NDArray[np.float64] | None
) -> list[LayerRoutes]:
    layers, tokens, _ = routes.shape
    events = []
    for layer in np.flatnonzero(rng.random(layers) < 0.8):
        rows = np.sort(rng.permutation(tokens)[: rng.integers(1, tokens + 1)])
        chosen = None if gates is None else gates[layer, rows]
        events.append(LayerRoutes(int(layer), rows, routes[layer, rows], chosen))
    return events


def random_manifest(
    geometry: RoutingGeometry,
    *,
    signals: Collection[str] = BASE_SIGNALS,
    ragged: bool = False,
    block_length: int = 4,
    stands_for: str | None = "llada2.0-mini",
    **rest: Any,
) -> Manifest:
    """Return the manifest of a synthetic trace without requests."""
    return Manifest(
        model=Model(
            name="random",
            layers=geometry.layers,
            experts=geometry.experts,
            top_k=geometry.top_k,
        ),
        stands_for=stands_for,
        decode=Decode(rule="2.0", block_length=block_length),
        origin="synthetic",
        signals=tuple(s for s in SIGNALS if s in signals),
        runtime=Runtime(name="oled_sim.testing"),
        ragged=ragged,
        **rest,
    )


def write_trace(
    path: str | Path,
    requests: Iterable[RequestTrace],
    geometry: RoutingGeometry,
    *,
    manifest: Manifest | None = None,
    **settings: Any,
) -> Trace:
    """Write requests as a trace and open it.

    ``settings`` go to :func:`random_manifest`, which describes the trace unless ``manifest`` does.
    The number of accepted tokens stands for the number of output tokens.
    """
    writer = TraceWriter(path, manifest or random_manifest(geometry, **settings))
    for trace in requests:
        prompt = int((trace.state[: trace.tokens(0)] == TokenState.PROMPT).sum())
        accepted = max(1, int(trace.accepted_count.sum()))
        writer.write_request(trace, prompt_tokens=prompt, output_tokens=accepted)
    return open_trace(Path(path))


def geometries(
    *, max_layers: int = 4, max_experts: int = 12, max_top_k: int = 4
) -> SearchStrategy[RoutingGeometry]:
    """Return a hypothesis strategy of small routing geometries."""
    from hypothesis import strategies as st

    def build(layers: list[int], experts: int, top_k: int) -> RoutingGeometry:
        return RoutingGeometry(tuple(sorted(layers)), experts, min(top_k, experts))

    return st.builds(
        build,
        st.lists(st.integers(0, 20), min_size=1, max_size=max_layers, unique=True),
        st.integers(1, max_experts),
        st.integers(1, max_top_k),
    )


def requests(
    geometry: RoutingGeometry,
    *,
    max_passes: int = 10,
    max_tokens: int = 5,
    request: int = 0,
    signals: Collection[str] = BASE_SIGNALS,
    ragged: bool = False,
) -> SearchStrategy[RequestTrace]:
    """Return a hypothesis strategy of requests that route over ``geometry``.

    To draw both: ``geometries().flatmap(lambda g: st.tuples(st.just(g), requests(g)))``.
    """
    from hypothesis import strategies as st

    def build(seed: int, passes: int, tokens: int, keep: float) -> RequestTrace:
        return random_request(
            np.random.default_rng(seed),
            geometry,
            request=request,
            passes=passes,
            tokens=tokens,
            keep=keep,
            signals=signals,
            ragged=ragged,
        )

    return st.builds(
        build,
        st.integers(0, 2**32 - 1),
        st.integers(1, max_passes),
        st.integers(1, max_tokens),
        st.sampled_from([0.0, 0.5, 0.8, 1.0]),
    )
