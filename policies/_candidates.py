"""The prefetch list of MoE-Infinity's task pool, which FineMoE inherits: who is on it, and why.

A list replaces what is still queued, and those on it are protected: a prefetch does not evict
them (``ReplaceCacheCandidates`` and ``RemoveCachedSparseNode`` in ``core/prefetch``).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean
from oled_sim.policy import Event, Setting

Protect = Literal["pool", "list"]
"""Whom a list protects: as many of its first as a pool can hold, or everybody on it."""

# ruff: noqa: ANN001, ANN202

UNLISTED = -np.inf


class Candidates:
    """The current list.

    Args:
        setting: of the run.
        protect: see ``Protect``.
        most: entries of a list, 0 for all.

    Attributes:
        protected: bool [L, E]. slots: int64 [L], of the pools as last seen.
        by_pool: whether a list protects as many of each layer as its pool holds, whatever other
            layers list: then :meth:`replace_ordered` does.
    """

    def __init__(self, setting: Setting, protect: Protect, most: int) -> None:
        layers, experts = len(setting.routing.layers), setting.routing.experts
        self.protected = np.zeros((layers, experts), np.bool_)
        self._whole = setting.scope == "global"
        self.by_pool = protect == "pool" and most == 0 and not self._whole
        self._protect = protect
        self._most = most
        self._residents = setting.residents
        self.slots = np.full(layers, setting.budget) if self._whole else setting.capacity.copy()

    def note_slots(self, event: Event) -> None:
        """Learn the slots of a pool, which may change between events."""
        self.slots[slice(None) if self._whole else event.layer] = event.capacity

    def replace(
        self,
        priority: NDArray[np.float64],
        executing: NDArray[np.bool_] | None = None,
        tie: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """Make a new list; return what of it is to be copied, float64 [n, 3].

        Args:
            priority: float64 [L, E], ``UNLISTED`` for experts that are not on it.
            executing: bool [L, E], experts that the running event uses: they come on demand.
            tie: float64 [L, E], larger first among equal priorities; then the lower layer and id.
        """
        if executing is None:
            executing = np.zeros_like(self.protected)
        order = _best_first(priority, tie, whole=self._whole)
        listed = priority > UNLISTED
        if 0 < self._most < listed.sum():
            overall = order if self._whole else _best_first(priority, tie, whole=True)
            listed = _first(listed, overall, np.array([self._most]))
        slots = self.slots[:1] if self._whole else self.slots
        if self._protect == "pool":
            listed = _first(listed, order, slots)
        self.protected[:] = listed
        resident = self._residents()
        wanted = listed & ~resident & ~executing
        if self._protect == "list":
            held = ((resident & listed) | executing).reshape(len(order), -1).sum(axis=1)
            wanted = _first(wanted, order, slots - held)
        return _entries(wanted, priority, order)

    def replace_ordered(
        self, order: NDArray[np.int32], start: int, executing: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        """Make a new list of all experts of some layers whose order is known (``by_pool`` only).

        It is the list that :meth:`replace` makes of priorities in that order, without sorting.

        Args:
            order: int32 [n, E], experts of layers ``start`` to ``start + n - 1``, best first.
            start: the first layer. executing: as for :meth:`replace`.

        Returns:
            int64 [m, 3]: layer, expert and place in the layer's order of what is to be copied.
        """
        found = np.empty((order.size, 3), np.int64)
        resident = self._residents()
        n = list_pools(order, start, self.slots, resident, executing, self.protected, found)
        return found[:n]


@lean
def list_pools(order, start, slots, resident, executing, protected, found):
    """Protect the first of each layer that its slots hold; return how many are to be copied.

    ``found``: [≥ n, 3] of any kind of numbers, filled as :meth:`Candidates.replace_ordered` says.
    """
    n = 0
    protected[:] = False
    for x in range(order.shape[0]):
        layer = start + x
        for i in range(min(slots[layer], order.shape[1])):
            expert = order[x, i]
            protected[layer, expert] = True
            if not (resident[layer, expert] or executing[layer, expert]):
                found[n, 0], found[n, 1], found[n, 2] = layer, expert, i
                n += 1
    return n


def ranked(values: NDArray[np.float64]) -> NDArray[np.int32]:
    """Return the indices of each row, the largest value first, equals by index: int32 [n, E]."""
    return np.argsort(-values, axis=1, kind="stable").astype(np.int32)


def scores_at_arrival(
    resident: NDArray[np.bool_], protected: NDArray[np.bool_], values: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the scores that a prefetch meets when it arrives, float64 [n, E].

    What arrives, the only one without a slot that matters, replaces anybody but the protected.
    """
    scores = np.empty(values.shape)
    compare_at_arrival(resident.ravel(), protected.ravel(), values.ravel(), scores.reshape(-1))
    return scores


@lean
def compare_at_arrival(resident, protected, values, scores):
    """Fill scores, float64 [n]; they may be the values themselves."""
    width = _width(values)
    for i in range(len(values)):
        rank = 2 * int(protected[i]) if resident[i] else 1
        scores[i] = values[i] + rank * width


def by_class(ranks: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores that compare classes first, then ``values``; float64 [n, E] all."""
    scores = np.empty(values.shape)
    compare_by_class(ranks.ravel(), values.ravel(), scores.reshape(-1))
    return scores


@lean
def compare_by_class(ranks, values, scores):
    """Fill scores, float64 [n]; they may be the values themselves."""
    width = _width(values)
    for i in range(len(values)):
        scores[i] = values[i] + ranks[i] * width


@lean
def _width(values):
    """Return by how much classes are apart: more than any two values are."""
    low, high = 0.0, 0.0
    for i in range(len(values)):
        low, high = min(low, values[i]), max(high, values[i])
    return high - low + 1.0


def _best_first(
    priority: NDArray[np.float64], tie: NDArray[np.float64] | None, *, whole: bool
) -> NDArray[np.int64]:
    """Return indices of each row by priority, int64 [L, E]; of all rows as one, [1, L·E]."""
    if whole:
        priority = priority.reshape(1, -1)
        tie = None if tie is None else tie.reshape(1, -1)
    if tie is None:
        return ranked(priority).astype(np.int64)
    return np.lexsort((-tie, -priority), axis=1)


def _first(
    mask: NDArray[np.bool_], order: NDArray[np.int64], number: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Keep the first ``number`` of each row of an order that are in the mask."""
    rows = mask.reshape(len(order), -1)
    here = np.take_along_axis(rows, order, axis=1)
    here &= np.cumsum(here, axis=1) <= number[:, None]
    kept = np.empty_like(rows)
    np.put_along_axis(kept, order, here, axis=1)
    return kept.reshape(mask.shape)


def _entries(
    wanted: NDArray[np.bool_], priority: NDArray[np.float64], order: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return (layer, expert, priority) of the wanted, in order."""
    experts = wanted.shape[1]
    row, at = np.nonzero(np.take_along_axis(wanted.reshape(len(order), -1), order, axis=1))
    flat = order[row, at] + row * order.shape[1]
    return np.column_stack([flat // experts, flat % experts, priority.ravel()[flat]])
