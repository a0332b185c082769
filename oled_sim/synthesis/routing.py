"""Routes of one layer over a whole request: a race of experts for every token.

Expert e arrives at a token after an exponential time of rate r_e, r the preferences of the token's
state in its block; the first M to arrive are its candidates, their score is minus the log of the
time. So the top-k is k draws without replacement by preference. Such races can be mixed without
changing their law (thinning and superposition of Poisson processes): a token that shares a part p
of its left neighbour's arrivals, or of its own before it was accepted, takes each with chance p
and races for the rest at rate 1 - p. From pass to pass a stationary noise is added to the scores.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel, lean, merged
from oled_sim.synthesis.course import COMMIT, MASKED
from oled_sim.synthesis.random import (
    draw,
    exponential,
    fill_normal,
    normal,
    spread,
    uniform,
)

# ruff: noqa: ANN001, ANN201

MOST_DRAWS = 40
"""Arrivals per candidate after which a race is over: very sharp preferences repeat themselves."""

_IDS, _SCALE, _LEAST = 0xFFFF, 2.0**20, -(1 << 62)

_16, _32, _48 = np.uint64(16), np.uint64(32), np.uint64(48)


@merged
def candidates(experts, k):
    """Return how many candidates M a token has for its top-k."""
    return min(k + k // 2, experts)


@kernel
def route_layer(
    rng, prompt, length, blocks, values, popular, contrast, course, jitter, carry,
    layer, layers, pairs, experts_out, scores_out, base_out, mean_out,
):  # fmt: skip
    """Fill in the routes of one layer.

    Args:
        rng: uint64 [1]. prompt: tokens. length: of a block. blocks: (first, last) generated.
        values: float64 [13], see ``request.py``. popular, contrast: float64 [E].
        course: (kind [I], block [I], offset [I + 1], state [T], accepted [T], edited [T]).
        jitter, carry: float32 [T], of the transition from the row's pass to the next.
        layer, layers: index and number. pairs: of :func:`sorting_pairs`, for M candidates.
        experts_out, scores_out: [N, k], rows of event (i, l) at offset[i]·L + l·T_i.
        base_out: (slope, offset, floor) of gates. mean_out: float32 [V, E], full gate (or V = 0).
    """
    sharp, request_taste, block_taste, persistence, together_masked, together_word = values[:6]
    keep_masked, keep_word, masked_sharp = values[6], values[7], values[8]
    jitter_masked, jitter_word, boundary_carry, shared = (
        values[9],
        values[10],
        values[11],
        values[12],
    )
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
        for s in range(2):
            factor = sharp * (masked_sharp if s == 0 else 1.0)
            for e in range(number):
                side = contrast[e] if s == 0 else -contrast[e]
                logs[s, e] = factor * (
                    popular[e] + side + request_taste * taste[e] + block_taste * own[e]
                )
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
            for t in range(length):
                r = token + t
                if accepted[r] or edited[r]:
                    decoded = t > 0 and state[r - 1] != MASKED
                    share = together_word * (1 - carry[r]) if decoded else 0.0
                    left = t - 1 if t > 0 else 0
                    size[t] = race(rng, ids, score, noise, t, size[t], carry[r], left, size[left],
                                   share, total[1], start[1], jitter_word, work, most)  # fmt: skip
                elif state[r] == MASKED:
                    move(rng, noise[t], size[t], keep_masked, step_masked * jitter[r])
                    for j in range(size[t]):
                        noise[t, j] += step_all * jitter[r] * common[ids[t, j]]
                else:
                    move(rng, noise[t], size[t], keep_word, step_word * jitter[r])


@merged
def prepare(logs, total, start):
    """Turn log rates [E] into running sums that end at 1, and an index of where to look in them."""
    number = len(logs)
    sum_ = 0.0
    for e in range(number):
        sum_ += math.exp(logs[e])
        total[e] = sum_
    shift = math.log(sum_)
    for e in range(number):
        total[e] /= sum_
        logs[e] -= shift
    e = 0
    for cell in range(number):
        while total[e] * number <= cell:
            e += 1
        start[cell] = e


@merged
def pick(rng, total, start):
    """Return an expert by preference."""
    u = uniform(rng)
    e = start[int(u * len(total))]
    while total[e] < u and e < len(total) - 1:
        e += 1
    return e


@kernel
def race(rng, ids, score, noise, t, own, keep, left, other, share, total, start, jitter,
         work, most):  # fmt: skip
    """Give a token new candidates, some its own or its left neighbour's; return how many.

    Args:
        ids, score, noise: [T, M]. own: candidates it has, each kept with chance ``keep``.
        left, other: the neighbour and how many it has, each shared with chance ``share``.
        total, start: of :func:`prepare`. jitter: standard deviation of new noise.
        work: ids, score, noise [3 M] and a mark per expert (all false). most: M.
    """
    new_ids, new_score, new_noise, seen = work
    count = 0
    for j in range(own):
        if uniform(rng) < keep:
            count = insert(new_ids, new_score, new_noise, count, ids[t, j], score[t, j],
                           noise[t, j], seen, 3 * most)  # fmt: skip
    for j in range(other):
        if share > 0 and uniform(rng) < share:
            count = insert(new_ids, new_score, new_noise, count, ids[left, j], score[left, j],
                           noise[left, j], seen, 3 * most)  # fmt: skip
    rate = 1.0 - keep - share
    time = 0.0
    for _ in range(MOST_DRAWS * most):
        if rate <= 0.0:
            break
        time += exponential(rng) / rate
        value = -math.log(time)
        if count >= most and value < new_score[most - 1]:
            break
        e = pick(rng, total, start)
        count = insert(new_ids, new_score, new_noise, count, e, value, jitter * normal(rng), seen,
                       3 * most)  # fmt: skip
    for e in range(len(total)):  # rarely: preferences so sharp that fewer than M came
        if count >= most:
            break
        if not seen[e]:
            count = insert(new_ids, new_score, new_noise, count, e,
                           new_score[count - 1] - 1.0 if count > 0 else 0.0, 0.0, seen,
                           3 * most)  # fmt: skip
    for j in range(count):
        seen[new_ids[j]] = False
    count = min(count, most)
    for j in range(count):
        ids[t, j], score[t, j], noise[t, j] = new_ids[j], new_score[j], new_noise[j]
    return count


@lean
def insert(ids, score, noise, count, e, value, extra, seen, room):
    """Put an arrival among ``count`` in order of score; the first of an expert counts."""
    if seen[e]:
        place = 0
        while ids[place] != e:
            place += 1
        if score[place] >= value:
            return count
        count -= 1
        for j in range(place, count):
            ids[j], score[j], noise[j] = ids[j + 1], score[j + 1], noise[j + 1]
    elif count == room:
        return count
    seen[e] = True
    j = count
    while j > 0 and score[j - 1] < value:
        ids[j], score[j], noise[j] = ids[j - 1], score[j - 1], noise[j - 1]
        j -= 1
    ids[j], score[j], noise[j] = e, value, extra
    return count + 1


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
def put(ids, score, noise, size, pairs, keys, ids_out, scores_out, row, length):
    """Give out the first k candidates of each token by score, then id; T rows from ``row`` on.

    All tokens go through the same comparisons at once, so that nothing branches. A key holds a
    score in units of 2⁻²⁰ above 16 bits that count ids down.

    Args:
        pairs: int64 [C, 2], of :func:`sorting_pairs`. keys: int64 [M, T], to work in.
    """
    for t in range(length):
        for j in range(len(keys)):
            place = np.int64((score[t, j] + noise[t, j]) * _SCALE)
            keys[j, t] = (place << 16) | (_IDS - ids[t, j]) if j < size[t] else _LEAST
    for c in range(len(pairs)):
        high, low = keys[pairs[c, 0]], keys[pairs[c, 1]]
        for t in range(length):
            x, y = high[t], low[t]
            high[t], low[t] = max(x, y), min(x, y)
    for t in range(length):
        for j in range(ids_out.shape[1]):
            ids_out[row + t, j] = _IDS - (keys[j, t] & _IDS)
            scores_out[row + t, j] = (keys[j, t] >> 16) / _SCALE


def sorting_pairs(number: int) -> NDArray[np.int64]:
    """Return the comparisons [C, 2] of Batcher's odd-even merge sort of ``number`` values.

    Source: Knuth, TAOCP 3, 5.2.2, algorithm M. The first of a pair gets the larger value.
    """
    found, whole = [], 1 << max(0, number - 1).bit_length()
    p = whole // 2
    while p > 0:
        q, r, d = whole // 2, 0, p
        while d > 0:
            found += [(i, i + d) for i in range(number - d) if i & p == r]
            d, q, r = q - p, q // 2, p
        p //= 2
    return np.array(found, np.int64).reshape(-1, 2)


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


@kernel
def order_ties(experts, gates):
    """Order ids ascending where the gates of a row, uint16 bits descending, are equal: [N, k]."""
    for n in range(len(experts)):
        for j in range(1, experts.shape[1]):
            p = j
            while p > 0 and gates[n, p] == gates[n, p - 1] and experts[n, p] < experts[n, p - 1]:
                experts[n, p], experts[n, p - 1] = experts[n, p - 1], experts[n, p]
                p -= 1
