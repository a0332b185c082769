"""Gate probabilities of an event as rows that sum to 1, from whatever signals a trace holds."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event

from ._expert_maps import Trajectory


def block_row(event: Event, experts: int) -> NDArray[np.float64]:
    """Return the mean over the event's tokens, float64 [E], summing to 1 (or all 0).

    From the full gate if there is one; else from the top-k gates, the others counting as 0; else
    from token counts.
    """
    if event.full_gate is not None:
        return _normal(event.full_gate.astype(np.float64))
    row = np.zeros(experts)
    row[event.experts] = event.tokens if event.gates is None else event.gate_mass
    return _normal(row)


def token_rows(event: Event, experts: int) -> NDArray[np.float64]:
    """Return a row per token from its top-k gates, float64 [T, E]; equal ones without gates."""
    rows = np.zeros((len(event.routes), experts))
    gates = np.ones(event.routes.shape) if event.gates is None else event.gates
    np.put_along_axis(rows, event.routes.astype(np.int64), gates.astype(np.float64), axis=1)
    return _normal(rows)


class TokenMaps:
    """Maps of the tokens of one pass; tokens are those of its first event."""

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = layers, experts
        self._who: NDArray[np.int64] | None = None
        self._maps = np.zeros((0, layers, experts))

    def add(self, event: Event) -> NDArray[np.float64]:
        """Add an event; return the row of its last token, float64 [E]."""
        rows = token_rows(event, self._shape[1])
        who = event.owner.astype(np.int64) << 32 | event.position
        if self._who is None:
            self._who = who
            self._maps = np.zeros((len(who), *self._shape))
        # In ragged traces later events may lack tokens, or have others.
        _, mine, here = np.intersect1d(self._who, who, assume_unique=True, return_indices=True)
        self._maps[mine, event.layer] = rows[here]
        return rows[-1]

    def trajectories(self) -> list[Trajectory]:
        """Return the maps as trajectories of all layers."""
        found = []
        for each in self._maps:
            trajectory = Trajectory(*self._shape)
            trajectory.map[:] = each
            trajectory.observed = len(each)
            found.append(trajectory)
        return found


def _normal(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale rows to sum 1; one of zeros stays."""
    total = rows.sum(axis=-1, keepdims=True)
    return np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)
