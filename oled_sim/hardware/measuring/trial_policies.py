"""Made-up policies, which decide in kernels as the real ones do: what that takes is the host's.

Where a prefetch arrives, the policy is asked before the next one starts; so what the answer takes
is part of ``host.per_prefetch``. Hooks give the same answers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import merged
from oled_sim.policy import Compiled, Event, Lane, Policy, Prefetch, Setting

# ruff: noqa: ANN001, ANN201, ANN202

QUEUED = 8
"""Prefetches that a gate asks for: more than the usual layer has time for."""
BY_TRANSFER, ON_CPU = int(Lane.TRANSFER), int(Lane.CPU)


class SendMisses(Policy):
    """Computes residents where they are, some experts on the CPU, and copies all other misses.

    Args:
        residents: bool [L, E], what is there at first.
        on_cpu: bool [L, E], what the CPU computes; none of it is resident.
    """

    def __init__(self, residents: NDArray[np.bool_], on_cpu: NDArray[np.bool_]) -> None:
        self._residents, self._on_cpu = residents, on_cpu

    def place(self, setting: Setting) -> NDArray[np.bool_]:
        """Return the initial residents."""
        return self._residents

    def dispatch(self, event: Event) -> NDArray[np.int64]:
        """Return the lane of each activated expert."""
        missed = np.where(
            self._on_cpu[event.layer, event.experts], int(Lane.CPU), int(Lane.TRANSFER)
        )
        return np.where(event.resident[event.experts], int(Lane.GPU), missed)

    def compiled(self) -> Compiled:
        """Offer the same as a kernel."""
        return Compiled(decide_trial, self._own(), scores=False)

    def _own(self) -> tuple[Any, ...]:
        """Return what the kernels read: see :func:`decide_trial` and :func:`ask_always`."""
        taken = self._taken
        order = np.argsort(taken, axis=1, kind="stable")  # who can be prefetched comes first
        return self._on_cpu, self._residents, order, np.count_nonzero(~taken, axis=1)

    @property
    def _taken(self) -> NDArray[np.bool_]:
        """Who has a place, bool [L, E]: none of these is prefetched."""
        return self._residents | self._on_cpu


class PrefetchAlways(SendMisses):
    """Keeps the copy engine busy with experts of other layers, and lets none of them in."""

    replaces_queue = True

    def prefetch(self, event: Event) -> list[Prefetch]:
        """Return experts of the next layer that have no place yet, in a turn that moves on."""
        layer = (event.layer + 1) % len(self._residents)
        absent = np.flatnonzero(~self._taken[layer])
        first = QUEUED * event.pass_index
        return [
            Prefetch(layer, int(absent[(first + i) % len(absent)]), -float(i))
            for i in range(min(QUEUED, len(absent)))
        ]

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return values by which residents stay."""
        return self._residents[layer].astype(np.float64)

    def compiled(self) -> Compiled:
        """Offer the same as kernels; passes are those of a single request."""
        return Compiled(decide_trial, self._own(), prefetch=ask_always, arrive=arrive_trial)


@merged
def decide_trial(own, gate, v, layer, resident, lanes, scores):
    """Send each miss where it belongs.

    ``own``: on the CPU, bool [L, E]; initial residents, bool [L, E]; experts int64 [L, E] with
    those absent first, and how many these are, int64 [L].
    """
    on_cpu, residents, _, _ = own
    first = gate.offset[v]
    for i in range(len(lanes)):
        expert = gate.experts[first + i]
        missed = ON_CPU if on_cpu[layer, expert] else BY_TRANSFER
        lanes[i] = 0 if resident[expert] else missed
    _stay(residents[layer], scores)


@merged
def arrive_trial(own, layer, resident, scores):
    """Let no arrival in as long as the pool is full of initial residents."""
    _stay(own[1][layer], scores)


@merged
def _stay(residents, scores):
    for expert in range(len(scores)):
        scores[expert] = np.float64(residents[expert])


@merged
def ask_always(own, gate, v, layer, resident, wanted):
    """Ask for experts of the next layer that are not there."""
    _, _, order, absent = own
    ahead = (layer + 1) % len(absent)
    n = min(QUEUED, absent[ahead])
    for i in range(n):
        wanted[i, 0] = ahead
        wanted[i, 1] = order[ahead, (QUEUED * gate.event_pass[v] + i) % absent[ahead]]
        wanted[i, 2] = -float(i)
    return n
