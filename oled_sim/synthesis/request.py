"""One synthetic request, from its parameters to the arrays of a trace."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import direct
from oled_sim.geometry import RoutingGeometry
from oled_sim.synthesis.course import MASKED, Course, make_course
from oled_sim.synthesis.parameters import DataSet, Relation, Routing
from oled_sim.synthesis.random import streams
from oled_sim.synthesis.ranking import gate_table
from oled_sim.synthesis.routing import Routes, Shape, Steps, new_desk, route_layer
from oled_sim.trace.manifest import expert_dtype
from oled_sim.trace.schema import RequestTrace

EMBEDDING_SIZE = 64
"""Width of the synthetic input embedding, in elements."""

WORDS = 4096
"""Distinct words of the synthetic vocabulary; the mask is one more."""

_TOPIC_WORDS = 128
_route_layer = direct(route_layer)

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
    experts, gates, mean = _routes(recipe, request, prompt, course)
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
        gates=gates,
        row_token=_row_tokens(course.token_offset, layers),
        full_gate=mean.astype(np.float16) if "full_gate" in recipe.signals else None,
        embedding=_embedding(recipe, token_id, course) if "embedding" in recipe.signals else None,
    )


def _routes(
    recipe: Recipe, request: int, prompt: int, course: Course
) -> tuple[NDArray[Any], NDArray[np.float16], NDArray[np.float32]]:
    """Return experts and gates [N, k], and the full gate [V, E] (V = 0 if not wanted)."""
    r, geometry, length = recipe.routing, recipe.geometry, recipe.data.block_length
    g, layers, k = recipe.data.gates, len(recipe.geometry.layers), recipe.geometry.top_k
    popular, contrast, factor = _model(recipe.model, geometry, r)
    rows, wanted = len(course.state) * layers, "full_gate" in recipe.signals
    out = Routes(
        np.empty((rows, k), expert_dtype(geometry.experts)),
        np.empty((rows, k), np.uint16),
        np.zeros((len(course.kind) * layers if wanted else 0, geometry.experts), np.float32),
        np.array([g.slope, g.offset, g.floor]),
    )
    steps = Steps(
        course.kind, course.block, course.token_offset, course.state, course.accepted,
        course.edited, *_unrest(r, recipe.relation, course, recipe.key(request, _WORDS, 1)),
    )  # fmt: skip
    rng = streams(*recipe.key(request, _LAYERS), count=layers, lanes=1 + length)
    desk = new_desk(geometry.experts, k, length, gate_table(g))
    own = {name: getattr(r, name) for name in Shape._fields if name != "sharp"}
    for layer in range(layers):
        _route_layer(
            rng[layer, :1], rng[layer, 1:], prompt, Shape(float(factor[layer]), **own),
            popular[layer], contrast[layer], steps, desk, layer, layers, out,
        )  # fmt: skip
    return out.experts, out.gates.view(np.float16), out.mean


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
    scale = np.where(masked, np.float32(relation.masked_scale), np.float32(relation.decoded_scale))
    times = np.minimum(accepted * scale * unrest, np.float32(1000))
    stays = np.where(masked, np.float32(1 - r.drift), np.float32(1 - r.drift_word))
    drift = 1 - stays**times
    odds = np.log(r.carry / (1 - r.carry)) + relation.accepted_shift
    carry = 1 / (1 + np.exp(-(odds + relation.accepted * course.z)))
    return np.minimum(jitter, np.float32(20)), carry.astype(np.float32), drift


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
