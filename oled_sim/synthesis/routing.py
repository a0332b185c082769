"""Routes of one layer over a whole request.

Candidates of a token come from a race of experts (see :mod:`oled_sim.synthesis.race`) whose rates
are the preferences of the token's state in its block. From pass to pass a stationary noise on
their scores moves on; a token that is accepted or edited races anew, others now and then in part.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean, merged
from oled_sim.synthesis.course import COMMIT, MASKED
from oled_sim.synthesis.gate_signal import add_mean
from oled_sim.synthesis.noise import UNIFORM, WORD, move, move_together
from oled_sim.synthesis.race import (
    Bench,
    Candidates,
    Rates,
    new_bench,
    new_candidates,
    new_rates,
    prepare,
    race,
)
from oled_sim.synthesis.random import fill_normal, uniform
from oled_sim.synthesis.ranking import MOST_CANDIDATES, give_out, rank, sorting_pairs

# ruff: noqa: ANN001, ANN201

LEAST_RENEWAL = 0.25
"""Tokens drift in passes drawn by chance: seldom and this much, not always and less."""


NO_RACE, MASKS, WORDS = range(3)


class Shape(NamedTuple):
    """Parameters of one layer, as :class:`~oled_sim.synthesis.parameters.Routing` explains them.

    ``sharp``: factor on all its tastes.
    """

    sharp: float
    request_taste: float
    block_taste: float
    block_persistence: float
    neighbour_masked: float
    neighbour_word: float
    persistence_masked: float
    persistence_word: float
    masked_sharpness: float
    jitter_masked: float
    jitter_word: float
    boundary_carry: float
    jitter_shared: float


class Steps(NamedTuple):
    """The course of a request as routes need it: I passes, T token rows.

    ``kind``, ``block``: [I]. ``offset``: [I + 1]. ``state``, ``accepted``, ``edited``: [T].
    ``jitter``, ``carry``, ``drift``: float32 [T], of the step from the row's pass to the next.
    """

    kind: NDArray[np.uint8]
    block: NDArray[np.int32]
    offset: NDArray[np.int64]
    state: NDArray[np.uint8]
    accepted: NDArray[np.bool_]
    edited: NDArray[np.bool_]
    jitter: NDArray[np.float32]
    carry: NDArray[np.float32]
    drift: NDArray[np.float32]


class Plan(NamedTuple):
    """What happens to the T tokens of a block before a pass.

    ``race``: :data:`NO_RACE`, or the state of the preferences by which it races; ``keep``,
    ``share``: float32, see :func:`~oled_sim.synthesis.race.race`. ``persist``, ``new``,
    ``together``: float32, see :mod:`oled_sim.synthesis.noise`. ``masks``: int64 [1], how many stay.
    """

    race: NDArray[np.int64]
    keep: NDArray[np.float32]
    share: NDArray[np.float32]
    persist: NDArray[np.float32]
    new: NDArray[np.float32]
    together: NDArray[np.float32]
    masks: NDArray[np.int64]


class Desk(NamedTuple):
    """What a layer is worked out on; another layer may use it afterwards.

    ``rounds``: float32 [R, 4, T], the same memory as ``common``.
    """

    tokens: Candidates
    bench: Bench
    tastes: NDArray[np.float64]
    masks: Rates
    words: Rates
    plan: Plan
    parts: NDArray[np.float32]
    rounds: NDArray[np.float32]
    common: NDArray[np.float32]
    pairs: NDArray[np.int64]
    keys: NDArray[np.int32]
    weight: NDArray[np.float32]
    bits: NDArray[np.int32]
    chosen: NDArray[np.int32]
    table: NDArray[np.float32]


class Routes(NamedTuple):
    """What comes out: rows of event (i, l) are at offset[i] · L + l · T_i.

    ``experts``: [N, k]. ``gates``: uint16 [N, k], bits of float16. ``mean``: float32 [V, E], the
    full gate, or V = 0. ``base``: float64 [3], slope, offset and floor of gates.
    """

    experts: NDArray[Any]
    gates: NDArray[np.uint16]
    mean: NDArray[np.float32]
    base: NDArray[np.float64]


def candidates(experts: int, k: int) -> int:
    """Return how many candidates M a token has for its top-k."""
    return min(k + k // 2, experts, MOST_CANDIDATES)


def new_desk(experts: int, k: int, length: int, table: NDArray[np.float32]) -> Desk:
    """Return a desk for blocks of ``length`` tokens; ``table``: of ``gate_table``."""
    most, weight = candidates(experts, k), np.zeros((k + 1, length), np.float32)
    rounds = np.zeros((-(-experts // (WORD * length)), WORD, length), np.float32)
    keep, share, persist, new, together = np.zeros((5, length), np.float32)
    plan = Plan(
        np.zeros(length, np.int64), keep, share, persist, new, together, np.zeros(1, np.int64)
    )
    return Desk(
        tokens=new_candidates(most, length),
        bench=new_bench(most, experts),
        tastes=np.zeros((3, experts)),
        masks=new_rates(experts),
        words=new_rates(experts),
        plan=plan,
        parts=np.zeros((WORD, length), np.float32),
        rounds=rounds,
        common=rounds.ravel(),
        pairs=sorting_pairs(most, k),
        keys=np.zeros((most, length), np.int32),
        weight=weight,
        bits=weight.view(np.int32),
        chosen=np.zeros((2, k, length), np.int32),
        table=table,
    )


@lean
def route_layer(rng, lanes, prompt, shape, popular, contrast, steps, desk, layer, layers, out):
    """Fill in the routes of one layer.

    Args:
        rng: uint64 [1]. lanes: uint64 [T]. prompt: tokens.
        shape: :class:`Shape`. popular, contrast: float64 [E].
        steps: :class:`Steps`. desk: :class:`Desk`. layer, layers: index and number.
        out: :class:`Routes`.
    """
    length = len(lanes)
    fill_normal(rng, desk.tastes[0])
    fill_normal(rng, desk.tastes[1])
    i, first = 0, steps.block[0]
    for block in range(steps.block[-1] + 1):
        prefer(rng, block, shape, popular, contrast, desk)
        fresh, more = True, True
        while more:
            begins, ends = steps.offset[i], steps.offset[i + 1]
            token = begins + block * length if block < first else ends - length
            if fresh:
                plan_block(block, prompt - block * length, shape, desk.plan)
            else:
                plan_step(rng, token - length, shape, steps, desk.plan)
            renew(rng, shape, desk)
            if not fresh:
                move(lanes, desk.parts, desk.tokens.noise, desk.plan.persist, desk.plan.new)
                if desk.plan.masks[0] > 0:
                    move_together(lanes, desk.rounds, desk.common, desk.tokens.ids,
                                  desk.tokens.noise, desk.plan.together)  # fmt: skip
            row = begins * layers + layer * (ends - begins) + token - begins
            put(desk, row, steps.state, token, ends - begins, i * layers + layer, out)
            fresh, more = False, False
            if block >= first:
                i += 1
                ended = steps.kind[i - 1] == COMMIT or i == len(steps.kind)
                more = not ended and steps.block[i] == block


@merged
def put(desk, row, state, token, tokens, event, out):
    """Write the routes of a block into an event of ``tokens`` tokens."""
    ids, score, noise = desk.tokens
    rank(ids, score, noise, desk.pairs, desk.keys)
    give_out(ids, desk.keys, desk.table, desk.weight, desk.bits, desk.chosen, out.experts,
             out.gates, row)  # fmt: skip
    if len(out.mean) > 0:
        add_mean(
            out.mean[event],
            desk.masks.logs,
            desk.words.logs,
            state,
            token,
            desk.tokens,
            tokens,
            out.base,
        )


@merged
def prefer(rng, block, shape, popular, contrast, desk):
    """Set what masks and words of a block prefer; the block's taste follows the last one's."""
    taste, own, fresh = desk.tastes
    keep = shape.block_persistence
    if block > 0:
        fill_normal(rng, fresh)
        for e in range(len(own)):
            own[e] = keep * own[e] + math.sqrt(1 - keep * keep) * fresh[e]
    for e in range(len(own)):
        like = popular[e] + shape.request_taste * taste[e] + shape.block_taste * own[e]
        desk.masks.logs[e] = shape.sharp * shape.masked_sharpness * (like + contrast[e])
        desk.words.logs[e] = shape.sharp * (like - contrast[e])
    prepare(desk.masks)
    prepare(desk.words)


@merged
def plan_block(block, prompt, shape, plan):
    """Plan candidates for all tokens of a block; its first ``prompt`` tokens are words."""
    for t in range(len(plan.race)):
        s = WORDS if t < prompt else MASKS
        keep = shape.boundary_carry if s == MASKS and block > 0 else 0.0
        share = shape.neighbour_word if s == WORDS else shape.neighbour_masked * (1 - keep)
        plan.race[t], plan.keep[t] = s, keep
        plan.share[t] = share if t > 0 else 0.0


@merged
def plan_step(rng, token, shape, steps, plan):
    """Plan how the tokens of a block, rows from ``token`` on, go on to the next pass.

    The masks of a layer drift in the same passes, words each by themselves.
    """
    together, masks = uniform(rng), 0
    keep_masked, keep_word = shape.persistence_masked, shape.persistence_word
    step_masked = math.sqrt(1 - keep_masked * keep_masked) * UNIFORM
    step_all = step_masked * math.sqrt(shape.jitter_shared)
    step_masked *= math.sqrt(1 - shape.jitter_shared)
    step_word = math.sqrt(1 - keep_word * keep_word) * UNIFORM
    for t in range(len(plan.race)):
        r = token + t
        masked, before = steps.state[r] == MASKED, t > 0 and steps.state[r - 1] == MASKED
        speaks = steps.accepted[r] or steps.edited[r]
        jitter, carry = float(steps.jitter[r]), float(steps.carry[r])
        new = max(float(steps.drift[r]), LEAST_RENEWAL)
        plan.race[t], plan.keep[t], plan.share[t] = NO_RACE, 1.0, 0.0
        plan.persist[t], plan.new[t], plan.together[t] = 1.0, 0.0, 0.0
        if speaks:
            plan.race[t], plan.keep[t] = WORDS, carry
            if t > 0 and not before:
                plan.share[t] = shape.neighbour_word * (1 - carry)
        elif masked:
            masks += 1
            if together * new < steps.drift[r]:
                plan.race[t], plan.keep[t] = MASKS, 1 - new
                if before and not steps.accepted[r - 1]:
                    plan.share[t] = shape.neighbour_masked * new
            plan.persist[t], plan.new[t] = keep_masked, step_masked * jitter
            plan.together[t] = step_all * jitter
        else:
            if steps.drift[r] > 0 and uniform(rng) * new < steps.drift[r]:
                plan.race[t], plan.keep[t] = WORDS, 1 - new
            plan.persist[t], plan.new[t] = keep_word, step_word * jitter
    plan.masks[0] = masks


@merged
def renew(rng, shape, desk):
    """Let tokens race as planned."""
    plan = desk.plan
    for t in range(len(plan.race)):
        if plan.race[t] != NO_RACE:
            words = plan.race[t] == WORDS
            race(rng, desk.tokens, t, float(plan.keep[t]), max(t - 1, 0), float(plan.share[t]),
                 desk.words if words else desk.masks,
                 shape.jitter_word if words else shape.jitter_masked, desk.bench)  # fmt: skip
