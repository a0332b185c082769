"""Statistics of routing locality: how much of a pass's routing the next pass repeats.

Figures are sums over requests, so a trace of any length takes the memory of one request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import Kind, RequestTrace, TokenState

TRANSITIONS = ("masked", "accepted", "decoded", "edited")
"""What happened to a token between two passes, see :class:`Stability`."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and extremes of a figure; NaN over nothing."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Stability:
    """How routes of tokens last from one pass to the next.

    A *transition* is a token that is in passes i and i + 1 of a request; prompt tokens are left
    out. Its *kept share* is the number of experts in both its top-k of pass i and of pass i + 1,
    divided by k, mean over the layers recorded in both.

    ``masked``: masked in pass i and not accepted by it. ``accepted``: masked in pass i, accepted by
    it, so that pass i + 1 sees a word in place of the mask. ``decoded``: decoded in pass i.
    ``edited``: decoded in pass i and overwritten by it.

    Attributes:
        transitions: number of them.
        kept: mean kept share, NaN over nothing.
        correlation: Pearson correlation of the confidence after pass i with the kept share, over
            transitions whose confidence is known; NaN when fewer than two or one does not vary.
    """

    transitions: int
    kept: float
    correlation: float


@dataclass(frozen=True)
class TraceStatistics:
    """Statistics of a trace.

    Attributes:
        requests: number of requests read.
        passes: forward passes by kind.
        tokens_per_pass: mean tokens of a pass by kind, NaN without such passes.
        accepted_per_denoise: mean positions accepted by a denoise pass.
        activated: per layer, |A| over denoise events (A: union of the pass's top-k).
        adjacent_overlap: mean |A_i ∩ A_{i+1}| / |A_i| over layers and consecutive denoise or
            commit passes of one block.
        boundary_overlap: the same across a block boundary: last pass of a block, first of the
            next.
        confidence_masked: mean confidence of masked tokens in denoise passes.
        confidence_accepted: mean confidence of the tokens that a denoise pass accepts.
        stability: by transition, and ``all`` together.
    """

    requests: int
    passes: dict[str, int]
    tokens_per_pass: dict[str, float]
    accepted_per_denoise: float
    activated: dict[int, Spread]
    adjacent_overlap: float
    boundary_overlap: float
    confidence_masked: float
    confidence_accepted: float
    stability: dict[str, Stability]

    @property
    def activated_mean(self) -> float:
        """Mean |A| over denoise events of all layers."""
        return _ratio(sum(s.mean for s in self.activated.values()), len(self.activated))


def trace_statistics(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry
) -> TraceStatistics:
    """Return the statistics of ``requests``, read once, one at a time."""
    tally = _Tally(geometry)
    for trace in requests:
        tally.add(trace)
    return tally.result()


def activation(trace: RequestTrace, experts: int) -> NDArray[np.bool_]:
    """Return which experts each event activates: bool [V, E]."""
    found = np.zeros((trace.events, experts), np.bool_)
    event = np.repeat(np.arange(trace.events), np.diff(trace.event_offset))
    found[event[:, None], trace.experts] = True
    return found


@dataclass
class Moments:
    """Sums over pairs (x, y) from which the mean of y and their Pearson correlation follow."""

    count: int = 0
    total: float = 0.0
    known: int = 0
    sums: NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    """Σx, Σy, Σx², Σy², Σxy over pairs with known x."""

    def add(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> None:
        """Add pairs; one whose x is NaN counts for the mean of y alone."""
        self.count += len(y)
        self.total += float(y.sum())
        known = ~np.isnan(x)
        x, y = x[known], y[known]
        self.known += len(x)
        self.sums += (x.sum(), y.sum(), x @ x, y @ y, x @ y)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.total + other.total,
            self.known + other.known,
            self.sums + other.sums,
        )

    def result(self) -> Stability:
        """Return count, mean of y and correlation."""
        return Stability(self.count, _ratio(self.total, self.count), self._correlation())

    def _correlation(self) -> float:
        if self.known < 2:
            return float("nan")
        x, y, xx, yy, xy = self.sums / self.known
        variances = xx - x * x, yy - y * y
        if min(variances) < 1e-12:  # rounding of a constant
            return float("nan")
        return float((xy - x * y) / np.sqrt(variances[0] * variances[1]))


class _Mean:
    """A mean that grows."""

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    def add(self, values: NDArray[Any]) -> None:
        self.total += float(values.sum(dtype=np.float64))
        self.count += len(values)

    @property
    def value(self) -> float:
        return _ratio(self.total, self.count)


class _Tally:
    """Running sums over requests."""

    def __init__(self, geometry: RoutingGeometry) -> None:
        layers = len(geometry.layers)
        self.geometry = geometry
        self.requests = 0
        self.passes = np.zeros(len(Kind), np.int64)
        self.tokens = np.zeros(len(Kind), np.int64)
        self.accepted = 0
        self.activated = np.zeros((2, layers), np.int64)  # sum, count
        self.extremes = np.stack([np.full(layers, np.inf), np.full(layers, -np.inf)])
        self.adjacent, self.boundary = _Mean(), _Mean()
        self.confidence_masked, self.confidence_accepted = _Mean(), _Mean()
        self.stability = {name: Moments() for name in TRANSITIONS}

    def add(self, trace: RequestTrace) -> None:
        self.requests += 1
        self._add_passes(trace)
        self._add_confidence(trace)
        active = activation(trace, self.geometry.experts)
        self._add_activated(trace, active.sum(axis=1))
        self._add_overlap(trace, active)
        self._add_stability(trace)

    def _add_passes(self, trace: RequestTrace) -> None:
        tokens = np.diff(trace.token_offset)
        self.passes += np.bincount(trace.kind, minlength=len(Kind))
        self.tokens += np.bincount(trace.kind, tokens, len(Kind)).astype(np.int64)
        self.accepted += int(trace.accepted_count[trace.kind == Kind.DENOISE].sum())

    def _add_confidence(self, trace: RequestTrace) -> None:
        denoise = np.repeat(trace.kind == Kind.DENOISE, np.diff(trace.token_offset))
        masked = denoise & (trace.state == TokenState.MASKED) & ~np.isnan(trace.confidence)
        self.confidence_masked.add(trace.confidence[masked])
        self.confidence_accepted.add(trace.confidence[masked & trace.accepted])

    def _add_activated(self, trace: RequestTrace, sizes: NDArray[np.int64]) -> None:
        denoise = trace.kind[trace.event_pass] == Kind.DENOISE
        layer, sizes = trace.event_layer[denoise], sizes[denoise]
        layers = len(self.geometry.layers)
        self.activated[0] += np.bincount(layer, sizes, layers).astype(np.int64)
        self.activated[1] += np.bincount(layer, minlength=layers)
        np.minimum.at(self.extremes[0], layer, sizes)
        np.maximum.at(self.extremes[1], layer, sizes)

    def _add_overlap(self, trace: RequestTrace, active: NDArray[np.bool_]) -> None:
        now, then = event_pairs(trace, len(self.geometry.layers))
        share = (active[now] & active[then]).sum(axis=1) / active[now].sum(axis=1)
        block = trace.block[trace.event_pass]
        same = block[now] == block[then]
        self.adjacent.add(share[same])
        self.boundary.add(share[~same])

    def _add_stability(self, trace: RequestTrace) -> None:
        found = token_transitions(trace, len(self.geometry.layers))
        for name, chosen in found.members.items():
            self.stability[name].add(found.confidence[chosen], found.kept[chosen])

    def result(self) -> TraceStatistics:
        names = [kind.name.lower() for kind in Kind]
        stability = {name: moments.result() for name, moments in self.stability.items()}
        stability["all"] = sum(self.stability.values(), Moments()).result()
        pairs = zip(self.tokens.tolist(), self.passes.tolist(), strict=True)
        return TraceStatistics(
            requests=self.requests,
            passes=dict(zip(names, self.passes.tolist(), strict=True)),
            tokens_per_pass=dict(zip(names, (_ratio(*p) for p in pairs), strict=True)),
            accepted_per_denoise=_ratio(self.accepted, self.passes[Kind.DENOISE]),
            activated=self._activated_spread(),
            adjacent_overlap=self.adjacent.value,
            boundary_overlap=self.boundary.value,
            confidence_masked=self.confidence_masked.value,
            confidence_accepted=self.confidence_accepted.value,
            stability=stability,
        )

    def _activated_spread(self) -> dict[int, Spread]:
        (total, count), (low, high) = self.activated, self.extremes
        return {
            layer: Spread(
                _ratio(total[i], count[i]),
                float(low[i]) if count[i] else float("nan"),
                float(high[i]) if count[i] else float("nan"),
            )
            for i, layer in enumerate(self.geometry.layers)
        }


class Transitions(NamedTuple):
    """The n transitions of a request, see :class:`Stability`.

    ``confidence``: float64 [n], after the earlier pass, NaN where unknown. ``kept``: float64 [n],
    the kept share. ``members``: bool [n] for each of :data:`TRANSITIONS`; every transition is in
    exactly one.
    """

    confidence: NDArray[np.float64]
    kept: NDArray[np.float64]
    members: dict[str, NDArray[np.bool_]]


def token_transitions(trace: RequestTrace, layers: int) -> Transitions:
    """Return the transitions of ``trace``, which routes over ``layers`` layers."""
    now, then = _token_pairs(trace)
    kept, recorded = _kept_share(trace, now, then, layers)
    now = now[recorded]
    confidence = trace.confidence[now].astype(np.float64)
    return Transitions(confidence, kept[recorded], _classify(trace, now))


def event_pairs(
    trace: RequestTrace, layers: int, gap: int = 1
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return events and those of the same layer ``gap`` passes later, neither in a prefill."""
    key = trace.event_pass.astype(np.int64) * layers + trace.event_layer
    now, then = _successors(key, layers * gap)
    decode = trace.kind[trace.event_pass] != Kind.PREFILL
    kept = decode[now] & decode[then]
    return now[kept], then[kept]


def _token_pairs(trace: RequestTrace) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return token rows and their successors: same position, next pass, not of the prompt."""
    step = int(trace.position.max()) + 1
    pass_index = np.repeat(np.arange(trace.passes), np.diff(trace.token_offset))
    now, then = _successors(pass_index * step + trace.position, step)
    kept = trace.state[now] != TokenState.PROMPT
    return now[kept], then[kept]


def _successors(key: NDArray[np.int64], step: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the pairs of indices into ascending ``key`` whose values differ by ``step``."""
    then = np.minimum(np.searchsorted(key, key + step), len(key) - 1)
    now = np.flatnonzero(key[then] == key + step)
    return now, then[now]


def _kept_share(
    trace: RequestTrace, now: NDArray[np.intp], then: NDArray[np.intp], layers: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the kept share of each transition, and whether any layer recorded both passes."""
    row = np.full((len(trace.position), layers), -1, np.int64)
    layer = np.repeat(trace.event_layer, np.diff(trace.event_offset))
    row[trace.row_token, layer] = np.arange(len(trace.experts))
    before, after = row[now], row[then]
    both = (before >= 0) & (after >= 0)
    kept = np.zeros(both.shape, np.int64)
    kept[both] = _common(trace.experts[before[both]], trace.experts[after[both]])
    count = both.sum(axis=1)
    return kept.sum(axis=1) / np.maximum(1, count * trace.experts.shape[1]), count > 0


def _common(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """Return how many ids the rows of ``a`` and ``b`` [n, k] share (ids of a row are distinct)."""
    a, b = np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)
    count = np.zeros(a.shape[1], np.int64)
    for slot in a:
        count += (b == slot).any(axis=0)
    return count


def _classify(trace: RequestTrace, tokens: NDArray[np.intp]) -> dict[str, NDArray[np.bool_]]:
    """Return which of ``tokens`` belong to each of :data:`TRANSITIONS`."""
    masked = trace.state[tokens] == TokenState.MASKED
    decoded = trace.state[tokens] == TokenState.DECODED
    accepted, edited = trace.accepted[tokens], trace.edited[tokens]
    return {
        "masked": masked & ~accepted,
        "accepted": masked & accepted,
        "decoded": decoded & ~edited,
        "edited": decoded & edited,
    }


def _ratio(total: float, count: float) -> float:
    return float(total) / float(count) if count else float("nan")
