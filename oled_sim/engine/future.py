"""The future, handed out through a cursor only (spec §4: nobody reads it undeclared).

A clairvoyant policy asks, at a gate, when each expert is used next. The answer is exact over the
whole run in trace order, since the cache outlives a request, yet no more than one batch is in
memory at a time: a first pass over the trace notes the first use of every expert in every group
of requests, O(groups × L × E) numbers, and inside a group one walk backwards over its events does
the rest. Nothing of this happens before a policy asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.batch import Batch
from oled_sim.engine.jit import kernel
from oled_sim.engine.rules import Group
from oled_sim.engine.state import Course
from oled_sim.errors import PolicyError
from oled_sim.policy import NEVER, Future

# ruff: noqa: ANN001, ANN201, ANN202

Beyond = Callable[[], NDArray[np.int64]]
"""Returns the first use of each expert after a group, int64 [L, E], in event numbers of the run."""

CLOSED = -1


def nothing_beyond(layers: int, experts: int) -> Beyond:
    """Say that nothing follows."""
    return lambda: np.full((layers, experts), NEVER, np.int64)


class Withheld(Future):
    """What a policy gets that does not declare ``future``: a refusal."""

    def __init__(self, fail: Callable[[str], PolicyError]) -> None:
        self._fail = fail

    def next_use(self, layer: int) -> NDArray[np.int64]:
        """Refuse."""
        raise self._fail("asks for next uses without declaring 'future' in `needs`")


class Cursor(Future):
    """The future at the gate that is open.

    Args:
        fail: words an error of the policy.
    """

    def __init__(self, fail: Callable[[str], PolicyError]) -> None:
        self._fail = fail
        self._event = CLOSED

    def enter(self, course: Course, first_event: int, beyond: Beyond) -> None:
        """Go to a group of requests; ``first_event`` is the number of its first event."""
        self._course, self._first, self._beyond = course, first_event, beyond
        self._passed = 0
        self._following: NDArray[np.int64] | None = None

    def open(self, event: int) -> None:
        """Stand at the gate of an event of the group."""
        self._event = event

    def close(self) -> None:
        """Leave the gate."""
        self._event = CLOSED

    def next_use(self, layer: int) -> NDArray[np.int64]:
        """Return the next event that activates each expert of a layer, int64 [E]."""
        if self._event == CLOSED:
            raise self._fail("asks for next uses where no gate is open")
        course = self._course
        if self._following is None:
            self._following, self._upcoming = next_uses(
                course.offset, course.event_layer, course.experts, self._first, self._beyond()
            )
        until = self._event + 1
        _go_on(course.offset, course.event_layer, course.experts, self._following,
               self._passed, until, self._upcoming)  # fmt: skip
        self._passed = until
        return self._upcoming[layer].copy()


class Horizon:
    """First uses after every group of a run, worked out when they are first asked for.

    Args:
        fed: yields the groups of the run in order, made ready; called at most once.
        layers, experts: L and E.
        cold: the cache is emptied before every group.
    """

    def __init__(
        self,
        fed: Callable[[], Iterable[tuple[Group, Batch]]],
        layers: int,
        experts: int,
        *,
        cold: bool,
    ) -> None:
        self._fed = fed
        self._nothing = nothing_beyond(layers, experts)
        self._cold = cold
        self._beyond: dict[Group, NDArray[np.int64]] | None = None
        self._one_at_a_time = Lock()

    def beyond(self, group: Group) -> Beyond:
        """Return what says when experts are used after ``group``."""
        return lambda: self._table()[group]

    def _table(self) -> dict[Group, NDArray[np.int64]]:
        with self._one_at_a_time:  # several policies may ask at the same time
            if self._beyond is None:
                self._beyond = {}
                for episode in self._episodes():
                    later = self._nothing()
                    for group, first in reversed(episode):
                        self._beyond[group] = later
                        later = np.minimum(first, later)
            return self._beyond

    def _episodes(self) -> Iterable[list[tuple[Group, NDArray[np.int64]]]]:
        """Return groups between which the cache persists, with the first uses in each."""
        found: dict[Group | bool, list[tuple[Group, NDArray[np.int64]]]] = {}
        events: dict[Group | bool, int] = {}
        for group, batch in self._fed():
            episode = group if self._cold else group.split == "history"
            course, begin = batch.course, events.get(episode, 0)
            layer, none = course.event_layer, self._nothing()
            first = next_uses(course.offset, layer, course.experts, begin, none)[1]
            found.setdefault(episode, []).append((group, first))
            events[episode] = begin + len(layer)
        return found.values()


@kernel
def next_uses(offset, event_layer, experts, first_event, beyond):
    """Walk backwards over the events of a group.

    Returns:
        int64 [ΣA], next use of each activated expert; int64 [L, E], first use of every expert.
    """
    following = np.empty(len(experts), np.int64)
    upcoming = beyond.copy()
    for v in range(len(event_layer) - 1, -1, -1):
        layer = event_layer[v]
        for i in range(offset[v], offset[v + 1]):
            following[i] = upcoming[layer, experts[i]]
            upcoming[layer, experts[i]] = first_event + v
    return following, upcoming


@kernel
def _go_on(offset, event_layer, experts, following, begin, end, upcoming):
    """Bring next uses from before event ``begin`` to after event ``end - 1``, in place."""
    for v in range(begin, end):
        for i in range(offset[v], offset[v + 1]):
            upcoming[event_layer[v], experts[i]] = following[i]
