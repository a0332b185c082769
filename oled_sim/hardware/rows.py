"""The routed rows of an event, sorted by expert. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from oled_sim.engine.jit import kernel

_FOREIGN = -1
_TWICE = -2


@dataclass(slots=True)
class EventRows:
    """Which rows each activated expert computes, and with what weight. A experts, T·k rows.

    Attributes:
        tokens: T. top_k: k.
        expert: int32 [A], the activated experts in the order they were given.
        first: int32 [A + 1]: rows of ``expert[i]`` are ``row[first[i]:first[i + 1]]``.
        row: int32 [T·k], flat index token·k + j, grouped by expert, ascending within.
        weight: float32 [T·k], gate weight of that row, scaling included.
    """

    tokens: int
    top_k: int
    expert: NDArray[np.int32]
    first: NDArray[np.int32]
    row: NDArray[np.int32]
    weight: NDArray[np.float32]


def event_rows(
    routes: ArrayLike, gates: ArrayLike | None, experts: ArrayLike, scale: float
) -> EventRows:
    """Sort the assignments of one event by expert, stably.

    Args:
        routes: int [T, k], distinct expert ids of each token.
        gates: [T, k] gate scores, renormalised here over each token's k; None for equal ones.
        experts: int [A], every expert that occurs in ``routes``, each once, in the order wanted.
        scale: the model's factor on renormalised gates (2.5 for LLaDA2).

    Raises:
        ValueError: an expert of ``routes`` is not among ``experts``, or one is there twice.
    """
    ids = np.ascontiguousarray(routes, np.int32)
    order = np.ascontiguousarray(experts, np.int32)
    first = np.empty(len(order) + 1, np.int32)
    row = np.empty(ids.size, np.int32)
    weight = np.empty(ids.size, np.float32)
    if gates is None:
        fault = _sort_equal(ids, order, first, row)
        weight.fill(scale / ids.shape[1])
    else:
        fault = _sort(ids, np.ascontiguousarray(gates, np.float32), order, np.float32(scale),
                      first, row, weight)  # fmt: skip
    if fault == _FOREIGN:
        raise ValueError("an expert of the routes is not among the activated ones")
    if fault == _TWICE:
        raise ValueError("an activated expert is named twice")
    return EventRows(ids.shape[0], ids.shape[1], order, first, row, weight)


@kernel
def _sort_equal(ids: NDArray, order: NDArray, first: NDArray, row: NDArray) -> int:
    """Fill ``first`` and ``row`` by counting; return 0, or what is wrong."""
    flat = ids.reshape(-1)
    size = 1
    for e in order:
        size = max(size, e + 1)
    place = np.full(size, -1, np.int32)
    for i in range(len(order)):
        if place[order[i]] >= 0:
            return _TWICE
        place[order[i]] = i
    first[:] = 0
    for e in flat:
        if e < 0 or e >= size or place[e] < 0:
            return _FOREIGN
        first[place[e] + 1] += 1
    for i in range(len(order)):
        first[i + 1] += first[i]
    filled = first[:-1].copy()
    for r in range(len(flat)):
        i = place[flat[r]]
        row[filled[i]] = r
        filled[i] += 1
    return 0


@kernel
def _sort(
    ids: NDArray,
    gates: NDArray,
    order: NDArray,
    scale: np.float32,
    first: NDArray,
    row: NDArray,
    weight: NDArray,
) -> int:
    """As :func:`_sort_equal`, and renormalise and scale each row's gate."""
    fault = _sort_equal(ids, order, first, row)
    if fault != 0:
        return fault
    top_k = ids.shape[1]
    total = np.empty(len(ids), np.float32)
    for token in range(len(ids)):
        total[token] = np.float32(1e-20)
        for j in range(top_k):
            total[token] += gates[token, j]
    for r in range(len(row)):
        token = row[r] // top_k
        weight[r] = gates[token, row[r] - token * top_k] / total[token] * scale
    return 0
