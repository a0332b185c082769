"""Putting candidates in order of score, all tokens of a block at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel

# ruff: noqa: ANN001, ANN201

_IDS, _SCALE, _LEAST = 0xFFFF, 2.0**20, -(1 << 62)


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
def order_ties(experts, gates):
    """Order ids ascending where the gates of a row, uint16 bits descending, are equal: [N, k]."""
    for n in range(len(experts)):
        for j in range(1, experts.shape[1]):
            p = j
            while p > 0 and gates[n, p] == gates[n, p - 1] and experts[n, p] < experts[n, p - 1]:
                experts[n, p], experts[n, p - 1] = experts[n, p - 1], experts[n, p]
                p -= 1
