"""Exponentials, logarithms and exponential numbers from tables, for kernels that need many.

Relative errors are below 1e-9: of no importance for what is random anyway. Only sums and products
of table entries occur, so compiled and interpreted code agree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import merged
from oled_sim.synthesis.random import draw

# ruff: noqa: ANN001, ANN201

_CELLS = 256
_STEPS_PER_UNIT, _STEP = _CELLS / math.log(2.0), math.log(2.0) / _CELLS
_FRACTIONS = 2.0 ** (np.arange(_CELLS) / _CELLS)
_LARGEST, _BIAS = 700.0, 1023
_POWERS = 2.0 ** (np.arange(2 * _BIAS) - _BIAS)

_MIDDLES = 1 + (np.arange(_CELLS) + 0.5) / _CELLS
_LOGS, _INVERSES = np.log(_MIDDLES), 1 / _MIDDLES
_MANTISSA, _ONE, _CELL = (1 << 52) - 1, _BIAS << 52, 52 - 8

_QUANTILES = -np.log1p(-np.arange(4096) / 4096)
_LAST = len(_QUANTILES) - 1
_52, _11, _LOW = np.uint64(52), np.uint64(11), np.uint64((1 << 41) - 1)
_UNIT, _SIXTH, _THIRD = 2.0**-41, 1 / 6, 1 / 3


class Word(NamedTuple):
    """One number as float64 [1] and its bits as int64 [1], the same memory."""

    value: NDArray[np.float64]
    bits: NDArray[np.int64]


def new_word() -> Word:
    """Return memory for :func:`log`."""
    value = np.zeros(1)
    return Word(value, value.view(np.int64))


@merged
def exp(x):
    """Return e to the ``x``, of x within ±700."""
    y = min(max(x, -_LARGEST), _LARGEST) * _STEPS_PER_UNIT
    n = math.floor(y)
    r = (y - n) * _STEP
    return _POWERS[(n >> 8) + _BIAS] * _FRACTIONS[n & 255] * (1 + r * (1 + r * (0.5 + r * _SIXTH)))


@merged
def log(x, word):
    """Return the natural logarithm of a normal, positive ``x``; ``word``: to work in."""
    word.value[0] = x
    bits = word.bits[0]
    cell = (bits >> _CELL) & 255
    word.bits[0] = (bits & _MANTISSA) | _ONE
    r = word.value[0] * _INVERSES[cell] - 1
    power = (bits >> 52) - _BIAS
    return power * math.log(2.0) + _LOGS[cell] + r * (1 - r * (0.5 - r * _THIRD))


@merged
def exponential(state):
    """Return an exponential number of mean 1, not 0; ``state``: uint64 [1], a random stream."""
    total = 0.0
    while True:
        x = draw(state)
        cell = np.int64(x >> _52)
        if cell < _LAST:
            break
        total += _QUANTILES[_LAST]
    part = (np.float64((x >> _11) & _LOW) + 0.5) * _UNIT
    return total + _QUANTILES[cell] + part * (_QUANTILES[cell + 1] - _QUANTILES[cell])
