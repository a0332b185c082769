"""What one stretch of a batch hands over to the next (``--batch-mode refill``)."""

from __future__ import annotations

import numpy as np

from oled_sim.engine.rules import Group
from oled_sim.engine.state import N_DEMAND, N_FOLLOWED, N_REUSED, Course, Pools


class Handover:
    """Whether the last transfers of a stretch are used again, which the next one finds out.

    Kernels write it into the row of the event that transferred, once the layer's next event comes.
    A row of the stretch before is out of their reach, so one is added per layer to those of the
    next stretch, and what is written there is brought back.

    Args:
        course: the stretch that ends. pools: as it leaves them.
    """

    def __init__(self, course: Course, pools: Pools) -> None:
        self._counts = course.counts
        mine = (pools.fresh_event >= 0) & (pools.fresh_event < len(course.counts))
        self._layers = np.flatnonzero(mine)
        self._rows = pools.fresh_event[self._layers]

    def begin(self, course: Course, pools: Pools) -> Course:
        """Return the course of the next stretch with the rows added."""
        layers = len(pools.fresh_event)
        counts = np.concatenate([course.counts, np.zeros_like(course.counts[:1]).repeat(layers, 0)])
        added = len(course.counts) + self._layers
        counts[added, N_DEMAND] = self._counts[self._rows, N_DEMAND]
        pools.fresh_event[:] = -1
        pools.fresh_event[self._layers] = added
        return course._replace(counts=counts)

    def finish(self, course: Course) -> Course:
        """Bring back what has become known; return the course with its own rows only."""
        events = len(course.event_layer)
        for column in (N_FOLLOWED, N_REUSED):
            self._counts[self._rows, column] = course.counts[events + self._layers, column]
        return course._replace(counts=course.counts[:events])


class Stretches:
    """Goes from stretch to stretch of a batch, and from batch to batch."""

    def __init__(self) -> None:
        self._before: Handover | None = None

    def forget(self) -> None:
        """Forget the stretch before: none goes on after it."""
        self._before = None

    def begin(self, group: Group, course: Course, pools: Pools) -> Course:
        """Go on after the stretch before, or start a batch of which nothing is known.

        Returns:
            The course that goes with the events that follow.
        """
        if self._before is not None and group.begun:
            return self._before.begin(course, pools)
        self._before = None
        pools.fresh[:] = False
        pools.fresh_event[:] = -1
        return course

    def end(self, group: Group, course: Course, pools: Pools) -> Course:
        """End a stretch; return the course with its own rows only."""
        if self._before is not None:
            course = self._before.finish(course)
        self._before = Handover(course, pools) if group.unfinished else None
        return course
