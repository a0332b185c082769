"""Sums and selections inside kernels, bit for bit what numpy gives."""

from __future__ import annotations

from oled_sim.engine.jit import lean

# ruff: noqa: ANN001, ANN202

BLOCK = 128
"""Numbers that are summed side by side in eight sums; of more, halves are summed first."""


@lean
def pairwise_sum(values):
    """Return the sum of float64 [n] in the order of ``numpy.sum``."""
    n = len(values)
    if n > BLOCK:
        half = n // 2
        half -= half % 8
        return pairwise_sum(values[:half]) + pairwise_sum(values[half:])
    total, done = 0.0, 0
    if n >= 8:
        a, b, c, d = values[0], values[1], values[2], values[3]
        e, f, g, h = values[4], values[5], values[6], values[7]
        for i in range(8, n - n % 8, 8):
            a += values[i]
            b += values[i + 1]
            c += values[i + 2]
            d += values[i + 3]
            e += values[i + 4]
            f += values[i + 5]
            g += values[i + 6]
            h += values[i + 7]
        total, done = ((a + b) + (c + d)) + ((e + f) + (g + h)), n - n % 8
    for i in range(done, n):
        total += values[i]
    return total


@lean
def fill_largest(values, chosen):
    """Write the indices of the largest of float64 [E], falling, equals by index, to int64 [n]."""
    n = 0
    for i in range(len(values)):
        if n == len(chosen) and not values[i] > values[chosen[n - 1]]:
            continue
        at = min(n, len(chosen) - 1)
        n = min(n + 1, len(chosen))
        while at > 0 and values[chosen[at - 1]] < values[i]:
            chosen[at] = chosen[at - 1]
            at -= 1
        chosen[at] = i
