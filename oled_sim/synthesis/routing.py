"""Routes of one layer over a whole request.

Candidates of a token come from a race of experts (see :mod:`oled_sim.synthesis.race`) whose rates
are the preferences of the token's state in its block. From pass to pass a stationary noise on
their scores moves on; a token that is accepted or edited races anew.
"""

from __future__ import annotations

import math

import numpy as np

from oled_sim.engine.jit import kernel, merged
from oled_sim.synthesis.course import COMMIT, MASKED
from oled_sim.synthesis.race import prepare, race
from oled_sim.synthesis.random import draw, fill_normal, spread, uniform
from oled_sim.synthesis.ranking import put

# ruff: noqa: ANN001, ANN201

LEAST_RENEWAL = 0.25
"""Masks of a layer drift in passes drawn together: seldom and this much, not always and less."""

_16, _32, _48 = np.uint64(16), np.uint64(32), np.uint64(48)


@merged
def candidates(experts, k):
    """Return how many candidates M a token has for its top-k."""
    return min(k + k // 2, experts)


@kernel
def route_layer(
    rng, prompt, length, blocks, values, popular, contrast, course, jitter, carry, drift,
    layer, layers, pairs, experts_out, scores_out, base_out, mean_out,
):  # fmt: skip
    """Fill in the routes of one layer.

    Args:
        rng: uint64 [1]. prompt: tokens. length: of a block. blocks: (first, last) generated.
        values: float64 [13], see ``request.py``. popular, contrast: float64 [E].
        course: (kind [I], block [I], offset [I + 1], state [T], accepted [T], edited [T]).
        jitter, carry, drift: float32 [T], of the transition from the row's pass to the next.
        layer, layers: index and number. pairs: of :func:`sorting_pairs`, for M candidates.
        experts_out, scores_out: [N, k], rows of event (i, l) at offset[i]·L + l·T_i.
        base_out: (slope, offset, floor) of gates. mean_out: float32 [V, E], full gate (or V = 0).
    """
    sharp, request_taste, block_taste, persistence, together_masked, together_word = values[:6]
    keep_masked, keep_word, masked_sharp = values[6], values[7], values[8]
    jitter_masked, jitter_word, boundary_carry, shared = values[9:]
    kinds, block_of, offset, state, accepted, edited = course
    number, k = len(popular), experts_out.shape[1]
    most = candidates(number, k)
    taste, own, fresh = np.empty(number), np.empty(number), np.empty(number)
    fill_normal(rng, taste)
    fill_normal(rng, own)
    total, start = np.empty((2, number)), np.empty((2, number + 1), np.int64)
    logs = np.empty((2, number))
    ids, score = np.empty((length, most), np.int64), np.empty((length, most))
    noise, size = np.empty((length, most)), np.empty(length, np.int64)
    work = (np.empty(3 * most, np.int64), np.empty(3 * most), np.empty(3 * most),
            np.zeros(number, np.bool_))  # fmt: skip
    step_masked = math.sqrt(1 - keep_masked * keep_masked)
    step_all, step_masked = step_masked * math.sqrt(shared), step_masked * math.sqrt(1 - shared)
    common = np.empty(number)
    keys = np.empty((most, length), np.int64)
    step_word = math.sqrt(1 - keep_word * keep_word)
    i = 0
    for block in range(blocks[1]):
        if block > 0:
            fill_normal(rng, fresh)
            for e in range(number):
                own[e] = persistence * own[e] + math.sqrt(1 - persistence**2) * fresh[e]
        for e in range(number):
            like = popular[e] + request_taste * taste[e] + block_taste * own[e]
            logs[0, e] = sharp * masked_sharp * (like + contrast[e])
            logs[1, e] = sharp * (like - contrast[e])
        for s in range(2):
            prepare(logs[s], total[s], start[s])
        for t in range(length):
            s = 1 if block * length + t < prompt else 0
            share = together_word if s == 1 else together_masked
            left = t - 1 if t > 0 else 0
            keep = boundary_carry if s == 0 and block > 0 else 0.0
            share = share * (1 - keep) if t > 0 else 0.0
            has = size[t] if block > 0 else 0
            size[t] = race(rng, ids, score, noise, t, has, keep, left, size[left], share,
                           total[s], start[s], jitter_word if s == 1 else jitter_masked, work,
                           most)  # fmt: skip
        if block < blocks[0]:
            row = layer * offset[1] + block * length
            put(
                ids, score, noise, size, pairs, keys, experts_out, scores_out, row, length,
            )  # fmt: skip
            if len(mean_out) > 0:
                add_mean(mean_out[layer], logs, state, block * length, ids, score, noise, size,
                         length, offset[1], base_out)  # fmt: skip
            continue
        while True:
            token = offset[i + 1] - length
            row = offset[i] * layers + layer * (offset[i + 1] - offset[i]) + token - offset[i]
            put(
                ids, score, noise, size, pairs, keys, experts_out, scores_out, row, length,
            )  # fmt: skip
            if len(mean_out) > 0:
                add_mean(mean_out[i * layers + layer], logs, state, token, ids, score, noise, size,
                         length, offset[i + 1] - offset[i], base_out)  # fmt: skip
            i += 1
            if kinds[i - 1] == COMMIT or i == len(kinds) or block_of[i] != block:
                break
            fill_spread(rng, common)
            chance = uniform(rng)
            for t in range(length):
                r = token + t
                if accepted[r] or edited[r]:
                    decoded = t > 0 and state[r - 1] != MASKED
                    share = together_word * (1 - carry[r]) if decoded else 0.0
                    left = t - 1 if t > 0 else 0
                    size[t] = race(rng, ids, score, noise, t, size[t], carry[r], left, size[left],
                                   share, total[1], start[1], jitter_word, work, most)  # fmt: skip
                elif state[r] == MASKED:
                    new, left = max(drift[r], LEAST_RENEWAL), t - 1 if t > 0 else 0
                    beside = t > 0 and state[r - 1] == MASKED and not accepted[r - 1]
                    if chance * new < drift[r]:
                        share = together_masked * new if beside else 0.0
                        size[t] = race(rng, ids, score, noise, t, size[t], 1 - new, left,
                                       size[left], share, total[0], start[0], jitter_masked,
                                       work, most)  # fmt: skip
                    move(rng, noise[t], size[t], keep_masked, step_masked * jitter[r])
                    for j in range(size[t]):
                        noise[t, j] += step_all * jitter[r] * common[ids[t, j]]
                else:
                    move(rng, noise[t], size[t], keep_word, step_word * jitter[r])


@merged
def move(rng, noise, size, keep, step):
    """Let a token's noise go one pass further: it stays stationary."""
    whole = size - size % 4
    for j in range(0, whole, 4):  # a word of 64 bits does for four
        word = draw(rng)
        noise[j] = keep * noise[j] + step * spread(word)
        noise[j + 1] = keep * noise[j + 1] + step * spread(word >> _16)
        noise[j + 2] = keep * noise[j + 2] + step * spread(word >> _32)
        noise[j + 3] = keep * noise[j + 3] + step * spread(word >> _48)
    for j in range(whole, size):
        noise[j] = keep * noise[j] + step * spread(draw(rng))


@merged
def fill_spread(rng, values):
    """Fill ``values`` [E] with uniform numbers of mean 0 and variance 1."""
    word = np.uint64(0)
    for e in range(len(values)):
        word = draw(rng) if e % 4 == 0 else word >> _16
        values[e] = spread(word)


@kernel
def add_mean(mean, logs, state, token, ids, score, noise, size, length, tokens, base):
    """Add a block's sigmoid scores to the mean [E] of an event of ``tokens`` tokens.

    Candidates count with their score; all others with their log rate, at least ``floor``.
    """
    slope, shift, floor = base
    part = 1.0 / tokens
    for s in range(2):
        with_state = 0
        for t in range(length):
            with_state += int((state[token + t] != MASKED) == (s == 1))
        if with_state > 0:
            for e in range(len(mean)):
                x = slope * max(logs[s, e], floor) + shift
                mean[e] += with_state * part / (1 + math.exp(-x))
    for t in range(length):
        s = 0 if state[token + t] == MASKED else 1
        for j in range(size[t]):
            e = ids[t, j]
            x = slope * (score[t, j] + noise[t, j]) + shift
            other = slope * max(logs[s, e], floor) + shift
            mean[e] += part / (1 + math.exp(-x)) - part / (1 + math.exp(-other))
