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
    """Maps of the tokens of one pass; the tokens are those of its first event.

    Attributes:
        trajectories: one per token, in the order of the routing rows.
    """

    def __init__(self, layers: int, experts: int) -> None:
        self._shape = layers, experts
        self._token: dict[tuple[int, int], int] = {}
        self.trajectories: list[Trajectory] = []

    def add(self, event: Event) -> None:
        """Add the rows of an event; in ragged traces it may lack tokens, or have others."""
        who = list(zip(event.owner.tolist(), event.position.tolist(), strict=True))
        if not self._token:
            self._token = {token: i for i, token in enumerate(who)}
            self.trajectories = [Trajectory(*self._shape) for _ in who]
        for token, row in zip(who, token_rows(event, self._shape[1]), strict=True):
            if token in self._token:
                self.trajectories[self._token[token]].observe(event.layer, row)


def _normal(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scale rows to sum 1; one of zeros stays."""
    total = rows.sum(axis=-1, keepdims=True)
    return np.divide(rows, total, out=np.zeros_like(rows), where=total > 0)
