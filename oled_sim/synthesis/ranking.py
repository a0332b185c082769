"""Putting candidates in order of score, all tokens of a block at once, and giving them gates."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean, merged
from oled_sim.synthesis.parameters import Gates

# ruff: noqa: ANN001, ANN201

MOST_CANDIDATES = 64
"""As many as the low bits of a key can tell apart."""

_SLOT_BITS, _SLOTS = 6, MOST_CANDIDATES - 1
_SCALE = np.float32(2.0**18)
_HIGHEST = np.float32(2.0**25 - 64)
"""Scores are told apart by 2⁻¹⁸ and lie within ±128."""

GATE_STEP = 2.0**-8
"""Scores that differ by less may have the same gate."""

_GATE_BITS = 10 + _SLOT_BITS
_MIDDLE = 1 << 15

_HALF_ROUND, _HALF_SHIFT, _HALF_BIAS = 0xFFF, 13, 112 << 10
_LEAST_NORMAL, _SUBNORMAL = np.float32(2.0**-14), np.float32(2.0**24)
_HALF = np.float32(0.5)


@lru_cache(maxsize=8)
def gate_table(gates: Gates) -> NDArray[np.float32]:
    """Return the gate, before renormalising, of every score from -128 in :data:`GATE_STEP`."""
    scores = (np.arange(2 * _MIDDLE) - _MIDDLE + 0.5) * GATE_STEP
    with np.errstate(over="ignore"):  # a score so low has a gate of 0
        found = 1 / (1 + np.exp(-(gates.slope * scores + gates.offset)))
    return np.maximum(found, 1e-30).astype(np.float32)


@lean
def rank(ids, score, noise, pairs, keys):
    """Sort keys of the candidates of each token, descending: by score, then by slot.

    All tokens go through the same comparisons at once, so that nothing branches.

    Args:
        ids: int32 [M, T]. score, noise: float32 [M, T]. keys: int32 [M, T], what comes out.
        pairs: int64 [C, 2], of :func:`sorting_pairs`.
    """
    for j in range(len(keys)):
        a, b, out = score[j], noise[j], keys[j]
        for t in range(keys.shape[1]):
            place = (a[t] + b[t]) * _SCALE
            place = min(max(place, -_HIGHEST), _HIGHEST)
            out[t] = (np.int32(place) << _SLOT_BITS) | (_SLOTS - j)
    for c in range(len(pairs)):
        high, low = keys[pairs[c, 0]], keys[pairs[c, 1]]
        for t in range(keys.shape[1]):
            x, y = high[t], low[t]
            high[t], low[t] = max(x, y), min(x, y)


@lean
def give_out(ids, keys, table, weight, bits, chosen, experts_out, gates_out, row):
    """Write the first k experts and gates of T tokens, as bits of float16, from ``row`` on.

    Args:
        keys: of :func:`rank`. table: of :func:`gate_table`.
        weight: float32 [k + 1, T], to work in; bits: the same memory as int32.
        chosen: int32 [2, k, T], to work in.
    """
    slots, halves = chosen
    k, tokens = len(slots), keys.shape[1]
    total = weight[k]
    for t in range(tokens):
        total[t] = 0.0
    for j in range(k):
        for t in range(tokens):
            weight[j, t] = table[(keys[j, t] >> _GATE_BITS) + _MIDDLE]
            total[t] += weight[j, t]
    for j in range(k):
        for t in range(tokens):
            weight[j, t] /= total[t]
            slots[j, t] = _SLOTS - (keys[j, t] & _SLOTS)
    ties = 0
    for j in range(k):
        for t in range(tokens):
            half = (bits[j, t] + _HALF_ROUND + ((bits[j, t] >> _HALF_SHIFT) & 1)) >> _HALF_SHIFT
            small = np.int32(weight[j, t] * _SUBNORMAL + _HALF)
            halves[j, t] = small if weight[j, t] < _LEAST_NORMAL else half - _HALF_BIAS
    for j in range(1, k):
        for t in range(tokens):
            ties += int(halves[j, t] == halves[j - 1, t])
    for t in range(tokens):
        experts, gates = experts_out[row + t], gates_out[row + t]
        for j in range(k):
            experts[j], gates[j] = ids[slots[j, t], t], halves[j, t]
        if ties > 0:
            order_ties(experts, gates)


@merged
def order_ties(experts, gates):
    """Order ids ascending where the gates of a row, descending, are equal."""
    for j in range(1, len(experts)):
        p = j
        while p > 0 and gates[p] == gates[p - 1] and experts[p] < experts[p - 1]:
            experts[p], experts[p - 1] = experts[p - 1], experts[p]
            p -= 1


def sorting_pairs(number: int, wanted: int) -> NDArray[np.int64]:
    """Return comparisons [C, 2] that bring the ``wanted`` largest of ``number`` values in order.

    Batcher's odd-even merge sort without what the others alone would need. Source: Knuth, TAOCP 3,
    5.2.2, algorithm M. The first of a pair gets the larger value.
    """
    found, whole = [], 1 << max(0, number - 1).bit_length()
    p = whole // 2
    while p > 0:
        q, r, d = whole // 2, 0, p
        while d > 0:
            found += [(i, i + d) for i in range(number - d) if i & p == r]
            d, q, r = q - p, q // 2, p
        p //= 2
    needed, kept = set(range(wanted)), []
    for pair in reversed(found):
        if needed.intersection(pair):
            needed.update(pair)
            kept.append(pair)
    return np.array(kept[::-1], np.int64).reshape(-1, 2)
