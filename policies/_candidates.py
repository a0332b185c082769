"""The prefetch list of MoE-Infinity's task pool, which FineMoE inherits: who is on it, and why.

A list replaces what is still queued, and those on it are protected: a prefetch does not evict
them (``ReplaceCacheCandidates`` and ``RemoveCachedSparseNode`` in ``core/prefetch``).
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, Setting

Protect = Literal["pool", "list"]
"""Whom a list protects: as many of its first as a pool can hold, or everybody on it."""

UNLISTED = -np.inf


class Candidates:
    """The current list.

    Args:
        setting: of the run.
        protect: see ``Protect``.
        most: entries of a list, 0 for all.

    Attributes:
        protected: bool [L, E].
    """

    def __init__(self, setting: Setting, protect: Protect, most: int) -> None:
        layers, experts = len(setting.routing.layers), setting.routing.experts
        self.protected = np.zeros((layers, experts), np.bool_)
        self._whole = setting.scope == "global"
        self._protect = protect
        self._most = most
        self._residents = setting.residents
        self._slots = np.full(layers, setting.budget) if self._whole else setting.capacity.copy()

    def note_slots(self, event: Event) -> None:
        """Learn the slots of a pool, which may change between events."""
        self._slots[slice(None) if self._whole else event.layer] = event.capacity

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
        slots = self._slots[:1] if self._whole else self._slots
        if self._protect == "pool":
            listed = _first(listed, order, slots)
        self.protected = listed
        resident = self._residents()
        wanted = listed & ~resident & ~executing
        if self._protect == "list":
            held = ((resident & listed) | executing).reshape(len(order), -1).sum(axis=1)
            wanted = _first(wanted, order, slots - held)
        return _entries(wanted, priority, order)


def ranks_at_arrival(
    resident: NDArray[np.bool_], protected: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return classes of experts when a prefetch arrives, 0 to 2: a lower one leaves first.

    What arrives, the only one without a slot that matters, replaces anybody but the protected.
    """
    return np.where(resident, 2 * protected, 1)


def by_class(ranks: NDArray[np.int64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return scores that compare classes first, then ``values``."""
    width = values.max(initial=0.0) - values.min(initial=0.0) + 1.0
    return np.asarray(values + ranks * width, np.float64)


def _best_first(
    priority: NDArray[np.float64], tie: NDArray[np.float64] | None, *, whole: bool
) -> NDArray[np.int64]:
    """Return indices of each row by priority, int64 [L, E]; of all rows as one, [1, L·E]."""
    if whole:
        priority = priority.reshape(1, -1)
        tie = None if tie is None else tie.reshape(1, -1)
    if tie is None:
        return np.argsort(-priority, axis=1, kind="stable")
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
