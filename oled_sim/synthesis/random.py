"""Random numbers inside kernels: xorshift64 (Marsaglia 2003), one stream per request and layer.

It multiplies and adds nothing, so compiled and interpreted code give the same numbers without a
word about overflow.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean, merged

# ruff: noqa: ANN001, ANN201

_13, _7, _17 = np.uint64(13), np.uint64(7), np.uint64(17)
_11, _16, _MASK = np.uint64(11), np.uint64(16), np.uint64(0xFFFF)
_UNIT = 2.0**-53
_NORMAL = math.sqrt(3.0) / 65536.0


def streams(*keys: int, count: int, lanes: int = 1) -> NDArray[np.uint64]:
    """Return seeds of independent streams, uint64 [count, lanes], a function of ``keys``."""
    seeds = np.random.SeedSequence(keys).generate_state(count * lanes, np.uint64)
    return np.maximum(seeds, np.uint64(1)).reshape(count, lanes)


@merged
def draw(state):
    """Advance ``state`` (uint64 [1], not zero) and return it."""
    x = state[0]
    x ^= x << _13
    x ^= x >> _7
    x ^= x << _17
    state[0] = x
    return x


@merged
def uniform(state):
    """Return a float64 in (0, 1)."""
    return (np.float64(draw(state) >> _11) + 0.5) * _UNIT


@merged
def normal(state):
    """Return the sum of four uniform numbers, of mean 0 and variance 1: nearly normal."""
    x = draw(state)
    total = np.int64(x & _MASK)
    for _ in range(3):
        x >>= _16
        total += np.int64(x & _MASK)
    return (total - 131070.0) * _NORMAL


@lean
def fill_normal(state, values):
    """Fill a float64 array [n] with :func:`normal`."""
    for i in range(len(values)):
        values[i] = normal(state)
