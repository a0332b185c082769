"""A race of experts for a token, and mixtures of races.

Expert e arrives after an exponential time of rate r_e; the first M to arrive are the token's
candidates, their score is minus the log of the time. So the top-k is k draws without replacement
by preference. Races can be mixed without changing their law (thinning and superposition of Poisson
processes): a token that shares a part p of another race takes each of its arrivals with chance p
and races for the rest at rate 1 - p.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean, merged
from oled_sim.synthesis.fast import Word, exp, exponential, log, new_word
from oled_sim.synthesis.random import draw, normal, uniform

# ruff: noqa: ANN001, ANN201

HEAVY = 1 / 32
"""Experts with a larger part of all arrivals come again and again before the last of M others.

Their first arrival is drawn by itself, unless :data:`FEW` arrivals are to come.
"""

FEW = 16.0

MOST_DRAWS = 40
"""Arrivals per candidate after which a race is over: very sharp preferences repeat themselves."""

_16, _MASK = np.uint64(16), np.uint64(0xFFFF)


class Candidates(NamedTuple):
    """The candidates of the T tokens of a block, M each: ``score`` descends, noise apart.

    ``ids``: int32 [M, T]. ``score``, ``noise``: float32 [M, T].
    """

    ids: NDArray[np.int32]
    score: NDArray[np.float32]
    noise: NDArray[np.float32]


class Rates(NamedTuple):
    """What tokens of one state prefer in a block, see :func:`prepare`.

    ``logs``, ``rate``: float64 [E]. ``heavy``: int64 [32], experts likelier than :data:`HEAVY`;
    ``heavies``: int64 [1], how many. ``all``, ``others``: float64 [E + 1], sums of the rates
    of all or of those who are not heavy, divided by their sum, which is the last entry;
    ``start_all``, ``start_others``: int64 [E], where to look in them.
    """

    logs: NDArray[np.float64]
    rate: NDArray[np.float64]
    heavy: NDArray[np.int64]
    heavies: NDArray[np.int64]
    all: NDArray[np.float64]
    start_all: NDArray[np.int64]
    others: NDArray[np.float64]
    start_others: NDArray[np.int64]


class Bench(NamedTuple):
    """Where a race is put together: room for 3 M arrivals, and a mark per expert, all false."""

    ids: NDArray[np.int32]
    score: NDArray[np.float64]
    noise: NDArray[np.float64]
    seen: NDArray[np.bool_]
    word: Word


def new_candidates(most: int, tokens: int) -> Candidates:
    """Return room for the candidates of a block."""
    score, noise = np.zeros((2, most, tokens), np.float32)
    return Candidates(np.zeros((most, tokens), np.int32), score, noise)


def new_rates(experts: int) -> Rates:
    """Return rates to be filled."""
    logs, rate = np.zeros((2, experts))
    heavy, count = np.zeros(round(1 / HEAVY), np.int64), np.zeros(1, np.int64)
    every, others = np.zeros((2, experts + 1))
    start_all, start_others = np.zeros((2, experts), np.int64)
    return Rates(logs, rate, heavy, count, every, start_all, others, start_others)


def new_bench(most: int, experts: int) -> Bench:
    """Return a bench for races of so many candidates."""
    score, noise = np.zeros((2, 3 * most))
    return Bench(
        np.zeros(3 * most, np.int32), score, noise, np.zeros(experts, np.bool_), new_word()
    )


@lean
def prepare(rates):
    """Turn log rates, ``rates.logs``, into those of a race of rate 1, and fill in the rest."""
    logs, heavy = rates.logs, rates.heavy
    number, sum_ = len(logs), 0.0
    for e in range(number):
        rates.rate[e] = exp(logs[e])
        sum_ += rates.rate[e]
    shift, count, whole, rest = math.log(sum_), 0, 0.0, 0.0
    for e in range(number):
        logs[e] -= shift
        rates.rate[e] /= sum_
        whole += rates.rate[e]
        if rates.rate[e] > HEAVY:
            heavy[count] = e
            count += 1
        else:
            rest += rates.rate[e]
        rates.all[e], rates.others[e] = whole, rest
    rates.heavies[0] = count
    look_up(rates.all, rates.start_all)
    look_up(rates.others, rates.start_others)


@merged
def look_up(total, start):
    """Make running sums [E] end at 1, put their sum after them, and index them."""
    number = len(start)
    whole = total[number - 1]
    total[number] = whole
    if whole <= 0.0:
        return
    e = 0
    for i in range(number):
        total[i] /= whole
    for cell in range(number):
        while total[e] * number <= cell and e < number - 1:
            e += 1
        start[cell] = e


@merged
def pick(rng, total, start):
    """Return an expert by preference; ``total``, ``start``: of :func:`look_up`."""
    u, number = uniform(rng), len(start)
    e = start[int(u * number)]
    while total[e] < u and e < number - 1:
        e += 1
    return e


@lean
def race(rng, block, t, keep, left, share, rates, jitter, bench):
    """Give a token new candidates, some its own or its left neighbour's.

    Args:
        block: :class:`Candidates`. t: the token. keep: chance of each of its own to stay.
        left: the neighbour. share: chance of each of its candidates to be taken.
        rates: :class:`Rates`. jitter: standard deviation of new noise. bench: :class:`Bench`.
    """
    ids, score, noise, seen, _ = bench
    most, count = len(block.ids), 0
    for source in range(2):
        chance, s = (keep, t) if source == 0 else (share, left)
        if chance > 0:
            count = thin(rng, block, s, chance, count, bench)
    if keep + share < 1:
        count = arrive(rng, 1 - keep - share, most, count, rates, jitter, bench)
    for e in range(len(rates.logs)):  # rarely: preferences so sharp that fewer than M came
        if count >= most:
            break
        if not seen[e]:
            ids[count], noise[count], seen[e] = e, 0.0, True
            score[count] = score[count - 1] - 1.0 if count > 0 else 0.0
            count += 1
    for j in range(count):
        seen[ids[j]] = False
    for j in range(most):
        block.ids[j, t], block.score[j, t], block.noise[j, t] = ids[j], score[j], noise[j]


@merged
def thin(rng, block, source, chance, count, bench):
    """Take each candidate of a token with a chance; return how many are there then."""
    word, least = np.uint64(0), chance * 65536.0
    for j in range(len(block.ids)):
        word = draw(rng) if j % 4 == 0 else word >> _16
        if np.int64(word & _MASK) < least:
            count = insert(bench, count, block.ids[j, source], block.score[j, source],
                           block.noise[j, source])  # fmt: skip
    return count


@merged
def arrive(rng, rate, most, count, rates, jitter, bench):
    """Let experts arrive at a rate until no later one could be among the first M."""
    last = most - 1
    latest = exp(-bench.score[last]) if count >= most else math.inf
    few = rate * latest < FEW
    if not few:
        for n in range(rates.heavies[0]):
            e = rates.heavy[n]
            time = exponential(rng) / (rate * rates.rate[e])
            if time < latest:
                count = insert(bench, count, e, -log(time, bench.word), jitter * normal(rng))
                latest = exp(-bench.score[last]) if count >= most else math.inf
    total, start = (rates.all, rates.start_all) if few else (rates.others, rates.start_others)
    pace, time = rate * total[len(rates.logs)], 0.0
    for _ in range(MOST_DRAWS * most if pace > 0.0 else 0):
        time += exponential(rng) / pace
        if time > latest:
            break
        e = pick(rng, total, start)
        count = insert(bench, count, e, -log(time, bench.word), jitter * normal(rng))
        latest = exp(-bench.score[last]) if count >= most else math.inf
    return count


@merged
def insert(bench, count, e, value, extra):
    """Put an arrival among ``count`` in order of score; the first of an expert counts."""
    ids, score, noise, seen, _ = bench
    if seen[e]:
        place = 0
        while ids[place] != e:
            place += 1
        if score[place] >= value:
            return count
        count -= 1
        for j in range(place, count):
            ids[j], score[j], noise[j] = ids[j + 1], score[j + 1], noise[j + 1]
    elif count == len(ids):
        return count
    seen[e] = True
    j = count
    while j > 0 and score[j - 1] < value:
        ids[j], score[j], noise[j] = ids[j - 1], score[j - 1], noise[j - 1]
        j -= 1
    ids[j], score[j], noise[j] = e, value, extra
    return count + 1
