"""What a run keeps of every job, for timelines: who ran what, when, and what held meanwhile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.state import LOG_COLUMNS, LOGGED, QUEUED, USED, State


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
        state.lanes.work[LOGGED] = 0  # of groups whose log nobody wanted
        self._rows: list[NDArray[np.float64]] = []
        self._pass: list[int] = []
        self._residents: list[NDArray[np.int64]] = []

    def drain(self, p: int) -> None:
        """Take over what was logged since the last call, all of it in pass ``p``."""
        lanes = self._state.lanes
        n = int(lanes.work[LOGGED])
        if n:
            self._rows.append(lanes.log[:n].copy())
            self._pass.append(p)
            self._residents.append(self._state.pools.occupied.copy())
            lanes.work[LOGGED] = 0

    def finish(self) -> Jobs:
        """Return all jobs, and add what holds now."""
        work, jobs = self._state.lanes.work, len(LOG_COLUMNS)
        drained = [len(rows) for rows in self._rows]
        rows = np.concatenate(self._rows)
        passes = np.repeat(np.array(self._pass, np.float64), drained)
        log = np.column_stack([rows[:, :jobs], passes])
        left = [[work[USED], 0, work[QUEUED]]]  # no demand transfer outlasts its layer
        gauges = np.concatenate([rows[:, jobs:].astype(np.int64), left])
        residents = np.repeat([*self._residents, self._state.pools.occupied], [*drained, 1], axis=0)
        return Jobs(log, np.hstack([gauges, residents]))
