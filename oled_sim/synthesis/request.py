"""One synthetic request, from its parameters to the arrays of a trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import RoutingGeometry
from oled_sim.synthesis.course import MASKED, Course, make_course
from oled_sim.synthesis.parameters import DataSet, Relation, Routing
from oled_sim.synthesis.random import streams
from oled_sim.synthesis.ranking import order_ties, sorting_pairs
from oled_sim.synthesis.routing import candidates, route_layer
from oled_sim.trace.manifest import expert_dtype
from oled_sim.trace.schema import RequestTrace

EMBEDDING_SIZE = 64
"""Width of the synthetic input embedding, in elements."""

WORDS = 4096
"""Distinct words of the synthetic vocabulary; the mask is one more."""

_TOPIC_WORDS = 128
_COURSE, _LAYERS, _WORDS, _LENGTH = range(4)
"""Streams of random numbers of a request."""


@dataclass(frozen=True)
class Recipe:
    """What all requests of a synthetic trace share.

    ``model``: name, whose popular experts are the same for every data set and seed. ``coupling``:
    setting of the confidence-stability relation. ``output_tokens``: of every request.
    ``edits``: rule 2.1. ``signals``: besides the base ones, ``full_gate`` and ``embedding``.
    """

    data: DataSet
    model: str
    geometry: RoutingGeometry
    coupling: str = "measured"
    output_tokens: int = 1024
    seed: int = 0
    edits: bool = False
    signals: Collection[str] = ()

    @property
    def routing(self) -> Routing:
        """Parameters of routing at this model's size."""
        return self.data.routing_for(self.model)

    @property
    def relation(self) -> Relation:
        """The confidence-stability relation asked for."""
        return self.data.relation(self.model, self.coupling)

    def key(self, *rest: int) -> tuple[int, ...]:
        """Return the key of a random stream of this trace."""
        return (self.seed, crc32(self.data.name.encode()), *rest)


def prompt_tokens(recipe: Recipe, request: int) -> int:
    """Return the length of a request's prompt, in tokens."""
    about = recipe.data.prompts
    drawn = np.random.default_rng(recipe.key(request, _LENGTH)).normal()
    return max(8, round(about.median_tokens * float(np.exp(about.log_spread * drawn))))


def make_request(recipe: Recipe, request: int) -> RequestTrace:
    """Return one request, a function of recipe and number alone."""
    prompt, length = prompt_tokens(recipe, request), recipe.data.block_length
    course = make_course(
        recipe.key(request, _COURSE),
        prompt,
        recipe.output_tokens,
        length,
        recipe.data.confidence,
        recipe.data.moments,
        edits=recipe.edits,
    )
    experts, scores, mean = _routes(recipe, request, prompt, course)
    tokens, layers = np.diff(course.token_offset), len(recipe.geometry.layers)
    passes = len(course.kind)
    token_id = _words(recipe, request, course)
    return RequestTrace(
        request=request,
        kind=course.kind,
        block=course.block,
        context=course.start,
        accepted_count=course.accepted_count,
        time_us=np.full(passes, np.nan),
        token_offset=course.token_offset,
        position=course.position,
        token_id=token_id,
        state=course.state,
        confidence=course.confidence.astype(np.float16).astype(np.float32),
        accepted=course.accepted,
        edited=course.edited,
        event_pass=np.repeat(np.arange(passes, dtype=np.int32), layers),
        event_layer=np.tile(np.arange(layers, dtype=np.int16), passes),
        event_offset=np.concatenate(([0], np.cumsum(np.repeat(tokens, layers)))),
        experts=experts,
        gates=_gates(recipe, experts, scores),
        row_token=_row_tokens(course.token_offset, layers),
        full_gate=mean.astype(np.float16) if "full_gate" in recipe.signals else None,
        embedding=_embedding(recipe, token_id, course) if "embedding" in recipe.signals else None,
    )


def _routes(
    recipe: Recipe, request: int, prompt: int, course: Course
) -> tuple[NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
    """Return experts and log scores [N, k], and the full gate [V, E] (V = 0 if not wanted)."""
    r, geometry, length = recipe.routing, recipe.geometry, recipe.data.block_length
    g = recipe.data.gates
    layers, wanted = len(geometry.layers), "full_gate" in recipe.signals
    popular, contrast, factor = _model(recipe.model, geometry, r)
    rows = len(course.state) * layers
    experts = np.empty((rows, geometry.top_k), expert_dtype(geometry.experts))
    scores = np.empty((rows, geometry.top_k), np.float32)
    events = len(course.kind) * layers if wanted else 0
    mean = np.zeros((events, geometry.experts), np.float32)
    jitter, carry, drift = _unrest(r, recipe.relation, course, recipe.key(request, _WORDS, 1))
    rng = streams(*recipe.key(request, _LAYERS), count=layers)
    pairs = sorting_pairs(candidates(geometry.experts, geometry.top_k))
    about = (
        course.kind, course.block, course.token_offset,
        course.state, course.accepted, course.edited,
    )  # fmt: skip
    for layer in range(layers):
        values = np.array([
            factor[layer], r.request_taste, r.block_taste, r.block_persistence,
            r.neighbour_masked, r.neighbour_word, r.persistence_masked, r.persistence_word,
            r.masked_sharpness, r.jitter_masked, r.jitter_word, r.boundary_carry,
            r.jitter_shared,
        ])  # fmt: skip
        route_layer(
            rng[layer], prompt, length, (int(course.block[0]), int(course.block[-1]) + 1), values,
            popular[layer], contrast[layer], about, jitter, carry, drift, layer, layers, pairs,
            experts, scores, (g.slope, g.offset, g.floor), mean,
        )  # fmt: skip
    return experts, scores, mean


def _model(
    name: str, geometry: RoutingGeometry, r: Routing
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return log popularity and state contrast [L, E], and the factor on tastes [L]."""
    rng = np.random.default_rng(crc32(name.encode()))
    shape = len(geometry.layers), geometry.experts
    popular, contrast = rng.normal(size=(2, *shape))
    factor = np.exp(r.layer_spread * rng.normal(size=len(geometry.layers)))
    return r.popularity * popular, r.state_contrast * contrast, factor


def _unrest(
    r: Routing, relation: Relation, course: Course, key: tuple[int, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Return jitter, carry and drift [T] of the step from each token row to the next pass."""
    masked = course.state == MASKED
    own = np.random.default_rng(key).standard_normal(len(masked), np.float32)
    effect = np.where(masked, np.float32(relation.masked), np.float32(relation.decoded))
    level = np.where(
        masked,
        np.float32(r.jitter_masked * relation.masked_scale),
        np.float32(r.jitter_word * relation.decoded_scale),
    )
    unrest = np.exp(np.float32(r.jitter_spread) * own - effect * course.z)
    jitter = level * unrest
    accepted = np.repeat(course.accepted_count, np.diff(course.token_offset))
    times = accepted * np.float32(relation.masked_scale) * unrest
    drift = 1 - np.float32(1 - r.drift) ** np.minimum(times, np.float32(1000))
    odds = np.log(r.carry / (1 - r.carry)) + relation.accepted_shift
    carry = 1 / (1 + np.exp(-(odds + relation.accepted * course.z)))
    return np.minimum(jitter, np.float32(20)), carry.astype(np.float32), drift


def _gates(
    recipe: Recipe, experts: NDArray[Any], scores: NDArray[np.float32]
) -> NDArray[np.float16]:
    """Return gates [N, k]; sorts ``experts`` by id where gates are equal."""
    gates = recipe.data.gates
    weight = np.multiply(scores, np.float32(-gates.slope), out=scores)
    weight -= np.float32(gates.offset)
    with np.errstate(over="ignore"):  # a score so low has a gate of 0
        np.exp(weight, out=weight)
    weight += 1
    np.reciprocal(weight, out=weight)
    weight /= np.einsum("nk->n", weight)[:, None]
    found = weight.astype(np.float16)
    order_ties(experts, found.view(np.uint16))
    return found


def _row_tokens(offset: NDArray[np.int64], layers: int) -> NDArray[np.int32]:
    """Return the token row of each routing row: every pass's tokens, once per layer."""
    tokens = np.repeat(np.diff(offset), layers)
    begins = np.repeat(offset[:-1], layers)
    first = np.concatenate(([0], np.cumsum(tokens)[:-1]))
    return np.arange(int(tokens.sum()), dtype=np.int32) + np.repeat(
        (begins - first).astype(np.int32), tokens
    )


def _words(recipe: Recipe, request: int, course: Course) -> NDArray[np.int32]:
    """Return the input token ids [T]: half from the request's own words, half from all; masks."""
    rng = np.random.default_rng(recipe.key(request, _WORDS))
    positions = int(course.position.max()) + 1
    rank = np.minimum(np.exp(rng.exponential(2.5, positions)), WORDS - 1).astype(np.int64)
    topic = rng.integers(0, WORDS, _TOPIC_WORDS)
    own = rng.random(positions) < 0.5
    word = np.where(own, topic[rank % _TOPIC_WORDS], rank)
    return np.where(course.state == MASKED, WORDS, word[course.position]).astype(np.int32)


def _embedding(recipe: Recipe, token_id: NDArray[np.int32], course: Course) -> NDArray[np.float16]:
    """Return the block-mean embedding [I, d] of the input tokens."""
    rng = np.random.default_rng(crc32(recipe.model.encode()) + 1)
    table = rng.normal(0, 0.05, (WORDS + 1, EMBEDDING_SIZE)).astype(np.float32)
    total = np.add.reduceat(table[token_id], course.token_offset[:-1], axis=0)
    return (total / np.diff(course.token_offset)[:, None]).astype(np.float16)
