"""Products of a growing query with many stored rows, for searches by cosine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean

# ruff: noqa: ANN001, ANN202


@lean
def add_products(columns, row, size, products):
    """Add the products of ``row`` float64 [E] with ``columns[:, :size]`` to ``products``.

    Every stored row is summed in the order of E, whatever stands beside it, so equal rows give
    equal products to the last bit, and a tie is a tie.
    """
    for e in range(len(row)):
        weight = row[e]
        if weight != 0.0:
            column = columns[e]
            for n in range(size):
                products[n] += weight * column[n]


def norm(values: NDArray[np.float64]) -> float:
    """Return the Euclidean norm, summed in an order that no library decides."""
    return float(np.sqrt(np.add.reduce(np.square(values), axis=None)))


def with_room(array: NDArray[Any], rows: int, axis: int) -> NDArray[Any]:
    """Return an array with at least ``rows`` entries along ``axis``, twice as many if it grows."""
    if array.shape[axis] >= rows:
        return array
    more = list(array.shape)
    more[axis] = max(rows, 2 * array.shape[axis], 8) - array.shape[axis]
    return np.concatenate([array, np.zeros(more, array.dtype)], axis=axis)
