"""A race of experts for a token, and mixtures of races.

Expert e arrives after an exponential time of rate r_e; the first M to arrive are the token's
candidates, their score is minus the log of the time. So the top-k is k draws without replacement
by preference. Races can be mixed without changing their law (thinning and superposition of Poisson
processes): a token that shares a part p of another race takes each of its arrivals with chance p
and races for the rest at rate 1 - p.
"""

from __future__ import annotations

import math

from oled_sim.engine.jit import kernel, lean, merged
from oled_sim.synthesis.random import exponential, normal, uniform

# ruff: noqa: ANN001, ANN201

MOST_DRAWS = 40
"""Arrivals per candidate after which a race is over: very sharp preferences repeat themselves."""


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
