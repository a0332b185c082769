"""What a fit looks at: statistics of real and of synthetic requests, measured the same way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.analysis.popularity import PopularityTally
from oled_sim.analysis.reuse import ReuseTally
from oled_sim.analysis.tally import RequestView
from oled_sim.geometry import RoutingGeometry
from oled_sim.synthesis.course import DECODED, MASKED, PREFILL
from oled_sim.trace.schema import RequestTrace
from oled_sim.trace.stats import trace_statistics

FAR = 4
"""Passes between the two that ``kept_*_far`` compares."""

DISTANCES = {"next": (1, 1), "near": (2, 8), "block": (9, 32), "far": (33, 1 << 30)}
"""Bins of event distances for ``reuse_*``, both ends included."""

CACHE_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7)
"""Cache sizes of ``lru_*``, as shares of the experts of a layer."""

MANY_MASKS = 8
"""Masks to the left of a mask from which it counts as far from all words."""

_TOP_PERCENT = 10


class Decode(NamedTuple):
    """The denoise and commit passes of a request, P of them with T tokens over L layers.

    ``experts``: [P, L, T, k]. ``state``: [P, T]. ``block``: [P].
    """

    experts: NDArray[Any]
    state: NDArray[np.uint8]
    block: NDArray[np.int32]


def decode_passes(trace: RequestTrace, layers: int) -> Decode:
    """Return the decode passes of a request with equal blocks."""
    first = int((trace.kind == PREFILL).sum())
    token, row = trace.token_offset[first], trace.event_offset[first * layers]
    passes, k = trace.passes - first, trace.experts.shape[1]
    tokens = (len(trace.position) - token) // passes
    return Decode(
        trace.experts[row:].reshape(passes, layers, tokens, k),
        trace.state[token:].reshape(passes, tokens),
        trace.block[first:],
    )


def routing_statistics(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry
) -> dict[str, float]:
    """Return the statistics of routing, by name; docs/synthetic-traces.md defines them."""
    requests = list(requests)
    found = trace_statistics(requests, geometry)
    popularity = PopularityTally(geometry)
    views = [RequestView(trace, geometry) for trace in requests]
    for view in views:
        popularity.add(view)
    means = np.array([s.mean for s in found.activated.values()])
    values = {
        "activated": found.activated_mean,
        "activated_layer_spread": float(means.std() / means.mean()),
        "adjacent_overlap": found.adjacent_overlap,
        "boundary_overlap": found.boundary_overlap,
        **{f"kept_{s}": found.stability[s].kept for s in ("masked", "accepted", "decoded")},
        **{
            f"correlation_{s}": found.stability[s].correlation
            for s in ("masked", "accepted", "decoded", "all")
        },
        **_skew(popularity, geometry),
    }
    decode = [decode_passes(trace, len(geometry.layers)) for trace in requests]
    return values | _sizes(views, decode) | _far(decode) | _alike(decode)


def held_out_statistics(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry
) -> dict[str, float]:
    """Return marginals that no fit looks at: reuse distances, and hit rates of LRU."""
    tally = ReuseTally(geometry)
    for trace in requests:
        tally.add(RequestView(trace, geometry))
    tables = tally.tables()
    distances = tables["reuse_distance"].query("phase == 'decode' and measure == 'events'")
    total = distances["activations"].sum()
    values = {
        f"reuse_{name}": float(
            distances.loc[distances["distance"].between(*ends), "activations"].sum() / total
        )
        for name, ends in DISTANCES.items()
    }
    hits = tables["lru_hits"].query("phase == 'decode'").groupby("capacity")
    rate = hits["hits"].sum() / hits["activations"].sum()
    for share in CACHE_SHARES:
        capacity = round(share * geometry.experts)
        values[f"lru_{round(100 * share)}"] = float(rate.loc[capacity])
    return values


def confidence_statistics(requests: Iterable[Any]) -> dict[str, float]:
    """Return the statistics of confidence and acceptance.

    ``requests`` are traces or courses: anything with ``kind``, ``token_offset``, ``position``,
    ``state``, ``confidence``, ``accepted`` and ``accepted_count``.
    """
    parts = [_confidence_rows(r) for r in requests]
    counts = np.concatenate([part[0] for part in parts])
    state, accepted, sure, again, left, beside = (
        np.concatenate([p[i] for p in parts]) for i in range(1, 7)
    )
    masked, decoded = state == MASKED, state == DECODED
    logit = log_odds(sure)
    both, far = masked & ~np.isnan(again), masked & (left >= MANY_MASKS)
    change = log_odds(again) - logit
    return {
        "accepted_per_pass": float(counts.mean()),
        "accepted_spread": float(counts.std()),
        "confidence_masked": float(sure[masked].mean()),
        "confidence_masked_spread": float(logit[masked].std()),
        "confidence_accepted": float(sure[accepted].mean()),
        "confidence_decoded": float(sure[decoded].mean()),
        "confidence_persistence": float(np.corrcoef(logit[both], log_odds(again[both]))[0, 1]),
        "logit_first": float(logit[masked & (left == 0)].mean()),
        "logit_far": float(logit[far].mean()),
        "logit_far_spread": float(logit[far].std()),
        "logit_gain": float(change[both & beside].mean() - change[both & ~beside].mean()),
        "word_logit": float(logit[decoded].mean()),
        "word_logit_spread": float(logit[decoded].std()),
    }


def moments(requests: Iterable[Any]) -> dict[str, tuple[float, float]]:
    """Return mean and standard deviation of confidence by what becomes of the token."""
    parts = [_confidence_rows(r) for r in requests]
    state, accepted, sure = (np.concatenate([p[i] for p in parts]) for i in (1, 2, 3))
    kinds = {
        "masked": (state == MASKED) & ~accepted,
        "accepted": accepted,
        "decoded": state == DECODED,
    }
    return {
        name: (float(sure[chosen].mean()), max(1e-3, float(sure[chosen].std())))
        for name, chosen in kinds.items()
    }


def log_odds(confidence: NDArray[Any]) -> NDArray[np.float64]:
    """Return logits of probabilities, within what float16 tells from 0 and 1."""
    p = np.clip(confidence.astype(np.float64), 1e-3, 1 - 5e-4)
    return np.log(p / (1 - p))


def gate_statistics(requests: Iterable[RequestTrace]) -> dict[str, float]:
    """Return the mean largest and smallest gate of the k chosen, and the mean full gate."""
    requests = list(requests)
    gates = [r.gates for r in requests if r.gates is not None]
    first = np.concatenate([g[:, 0] for g in gates]).astype(np.float64).mean()
    last = np.concatenate([g[:, -1] for g in gates]).astype(np.float64).mean()
    full = [r.full_gate for r in requests if r.full_gate is not None]
    values = {"gate_first": float(first), "gate_last": float(last)}
    if full:
        values["full_gate"] = float(np.concatenate(full).astype(np.float64).mean())
    return values


def _confidence_rows(request: Any) -> tuple[NDArray[Any], ...]:
    """Return accepted counts of denoise passes, and of their tokens what statistics need.

    That is state, accepted, confidence, confidence in the next pass if the state is the same, masks
    to the left in the block, and whether the left neighbour is a mask that the pass accepts.
    """
    first = int((request.kind == PREFILL).sum())
    begin = request.token_offset[first]
    counts = request.accepted_count[first:][request.kind[first:] == 1]
    state, sure, position = (
        values[begin:] for values in (request.state, request.confidence, request.position)
    )
    width = int(request.token_offset[first + 1] - begin)
    again = np.full(len(sure), np.nan)
    same = (position[width:] == position[:-width]) & (state[width:] == state[:-width])
    again[:-width] = np.where(same, sure[width:], np.nan)
    accepted = request.accepted[begin:]
    masked = (state == MASKED).reshape(-1, width)
    left = (np.cumsum(masked, axis=1) - masked).ravel()
    beside = np.zeros(masked.shape, np.bool_)
    beside[:, 1:] = accepted.reshape(-1, width)[:, :-1]
    return counts, state, accepted, sure, again, left, beside.ravel()


def _skew(popularity: PopularityTally, geometry: RoutingGeometry) -> dict[str, float]:
    tables = popularity.tables()
    top = tables["popularity"].query(f"weight == 'tokens' and top_percent == {_TOP_PERCENT}")
    effective = tables["entropy"]["effective_experts"].mean() / geometry.experts
    return {"top_tenth": float(top["share"].mean()), "effective_share": float(effective)}


def _sizes(views: list[RequestView], decode: list[Decode]) -> dict[str, float]:
    """Return mean |A| of passes all of masks but an eighth at most, and of those of words alone."""
    few, none = [], []
    for view, passes in zip(views, decode, strict=True):
        layers = passes.experts.shape[1]
        sizes = view.sizes[-len(passes.state) * layers :].reshape(-1, layers).mean(axis=1)
        masks = (passes.state == MASKED).mean(axis=1)
        few.append(sizes[masks >= 7 / 8])
        none.append(sizes[masks == 0])
    return {
        "activated_masks": _mean(few),
        "activated_words": _mean(none),
    }


def _far(decode: list[Decode]) -> dict[str, float]:
    kept: dict[str, list[NDArray[np.float64]]] = {"masked": [], "decoded": []}
    spread = []
    for d in decode:
        for name, value in (("masked", MASKED), ("decoded", DECODED)):
            kept[name].append(_kept(d, FAR, value))
        spread.append(_kept(d, 1, MASKED))
    values = {f"kept_{n}_far": _mean(v) for n, v in kept.items()}
    return values | {"kept_masked_spread": float(np.concatenate(spread).std())}


def _kept(d: Decode, gap: int, state: int) -> NDArray[np.float64]:
    """Return kept shares of tokens that are in ``state`` in a pass and ``gap`` passes later."""
    if len(d.block) <= gap:
        return np.empty(0)
    same = d.block[gap:] == d.block[:-gap]
    both = (d.state[:-gap] == state) & (d.state[gap:] == state) & same[:, None]
    i, t = np.nonzero(both)
    a, b = d.experts[i, :, t], d.experts[i + gap, :, t]
    return (a[..., :, None] == b[..., None, :]).any(-1).mean(axis=(1, 2))


def _alike(decode: list[Decode]) -> dict[str, float]:
    """Return the share of experts that a token has in common with the one 1 or 8 to its left."""
    values = {}
    for name, value in (("masks", MASKED), ("words", DECODED)):
        for gap in (1, 8):
            shares = []
            for d in decode:
                state, experts = d.state[::3], d.experts[::3]
                if state.shape[1] <= gap:
                    continue
                i, t = np.nonzero((state[:, gap:] == value) & (state[:, :-gap] == value))
                a, b = experts[i, :, t], experts[i, :, t + gap]
                shares.append((a[..., :, None] == b[..., None, :]).any(-1).mean(axis=(1, 2)))
            values[f"alike_{name}_{gap}"] = _mean(shares)
    return values


def _mean(parts: list[NDArray[np.float64]]) -> float:
    """Return the mean over all parts, NaN over nothing."""
    values = np.concatenate([np.empty(0), *parts])
    return float(values.mean()) if len(values) else float("nan")
