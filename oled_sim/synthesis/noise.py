"""The part of log scores that changes from pass to pass, all tokens of a block at once.

Every token has a stream of random numbers of its own, a lane: one instruction then serves several
tokens. A word of 64 bits gives four uniform numbers.
"""

from __future__ import annotations

import math

import numpy as np

from oled_sim.engine.jit import merged

# ruff: noqa: ANN001, ANN201

WORD = 4
"""Uniform numbers of one random word."""

UNIFORM = math.sqrt(12.0) / 65536.0
"""What makes a number of 16 bits one of variance 1."""

_13, _7, _17 = np.uint64(13), np.uint64(7), np.uint64(17)
_16, _32, _48, _MASK = (np.uint64(n) for n in (16, 32, 48, 0xFFFF))
_MIDDLE = np.float32(32767.5)


@merged
def advance(lanes, parts):
    """Advance all lanes, uint64 [T]; leave their words in ``parts``, float32 [4, T], in 16 bits."""
    for t in range(len(lanes)):
        x = lanes[t]
        x ^= x << _13
        x ^= x >> _7
        x ^= x << _17
        lanes[t] = x
        parts[0, t] = np.float32(np.int32(x & _MASK)) - _MIDDLE
        parts[1, t] = np.float32(np.int32((x >> _16) & _MASK)) - _MIDDLE
        parts[2, t] = np.float32(np.int32((x >> _32) & _MASK)) - _MIDDLE
        parts[3, t] = np.float32(np.int32(x >> _48)) - _MIDDLE


@merged
def move(lanes, parts, noise, keep, step):
    """Let the noise, float32 [M, T], go one pass further: it stays stationary.

    Args:
        keep: float32 [T], correlation with the last pass. step: float32 [T], size of what is new,
            times :data:`UNIFORM`.
    """
    for j in range(len(noise)):
        if j % WORD == 0:
            advance(lanes, parts)
        fresh, values = parts[j % WORD], noise[j]
        for t in range(len(lanes)):
            values[t] = keep[t] * values[t] + step[t] * fresh[t]


@merged
def move_together(lanes, rounds, common, ids, noise, step):
    """Add the same to all tokens that hold the same expert.

    Args:
        rounds: float32 [R, 4, T], to work in; common: the same memory, flat, one for an expert.
        step: float32 [T], times :data:`UNIFORM`.
    """
    for r in range(len(rounds)):
        advance(lanes, rounds[r])
    for j in range(len(noise)):
        experts, values = ids[j], noise[j]
        for t in range(len(step)):
            values[t] += step[t] * common[experts[t]]
