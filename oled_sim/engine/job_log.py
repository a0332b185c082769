"""What a run keeps of every job, for timelines: who ran what, when, and what held meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.state import GAUGES, LOG_COLUMNS, LOGGED, QUEUED, USED, State


class Jobs(NamedTuple):
    """Every job of a group of requests, in the order in which jobs ended. J jobs, L layers.

    Attributes:
        log: float64 [J, 9]: ``LOG_COLUMNS``, then the pass that the job ended in.
        gauges: int64 [J + 1, 3 + L]: ``GAUGES``, then residents of each layer. Row j is what held
            just before job j ended, since the end before it; the last row is what the group left.
    """

    log: NDArray[np.float64]
    gauges: NDArray[np.int64]


class JobLog:
    """Collects what kernels log while a group of requests runs.

    Who is resident changes only between kernels, so it must be drained before and after each
    decision.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._log: list[NDArray[np.float64]] = []
        self._gauges: list[NDArray[np.int64]] = []

    def drain(self, p: int) -> None:
        """Take over what was logged since the last call, all of it in pass ``p``."""
        work = self._state.lanes.work
        n, jobs = int(work[LOGGED]), len(LOG_COLUMNS)
        if n == 0:
            return
        rows = self._state.lanes.log[:n]
        residents = np.tile(self._state.pools.occupied, (n, 1))
        self._log.append(np.column_stack([rows[:, :jobs], np.full(n, float(p))]))
        self._gauges.append(np.hstack([rows[:, jobs:].astype(np.int64), residents]))
        work[LOGGED] = 0

    def finish(self) -> Jobs:
        """Return all jobs, and add what holds now."""
        work, occupied = self._state.lanes.work, self._state.pools.occupied
        now = np.array([[work[USED], 0, work[QUEUED], *occupied]], np.int64)
        columns = len(LOG_COLUMNS) + 1
        log = np.concatenate(self._log) if self._log else np.zeros((0, columns))
        assert now.shape[1] == len(GAUGES) + len(occupied)
        return Jobs(log, np.concatenate([*self._gauges, now]))
