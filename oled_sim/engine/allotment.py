"""What a budget comes to in one run: bytes, slots, and between which bounds they are shared."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.budget import Budget, apportion


@dataclass(frozen=True)
class Allotment:
    """A budget for layers of experts of known size. L layers, E experts.

    Attributes:
        budget: how much may be resident.
        expert_bytes: int64 [L], bytes of one expert per layer.
        experts: E. top_k: experts that a token activates.
        per_layer: whether every layer has a pool of its own.
    """

    budget: Budget
    expert_bytes: NDArray[np.int64]
    experts: int
    top_k: int
    per_layer: bool

    @cached_property
    def total_bytes(self) -> int:
        """The whole budget."""
        return self.budget.total_bytes(self.expert_bytes)

    @property
    def shares(self) -> NDArray[np.int64]:
        """Slots per layer to begin with, int64 [L], the caller's own."""
        return self.budget.shares(self.expert_bytes, self.experts)

    @property
    def capacity(self) -> NDArray[np.int64]:
        """Slots of each layer's pool to begin with, int64 [L]; of the one pool, if there is one."""
        if self.per_layer:
            return self.shares
        return np.full(len(self.expert_bytes), self.pool_slots, np.int64)

    @property
    def pool_slots(self) -> int:
        """Slots of one pool for all layers."""
        everything = len(self.expert_bytes) * self.experts
        # As many as may be resident: if sizes differ, all of the smallest.
        return min(everything, self.total_bytes // int(self.expert_bytes.min()))

    @cached_property
    def holds_all(self) -> bool:
        """Whether every expert fits, which is full residency."""
        return self.total_bytes >= int(self.expert_bytes.sum()) * self.experts

    @cached_property
    def can_move(self) -> bool:
        """Whether slots can move between layers: something, but not everything, fits."""
        something = self.total_bytes >= int(self.expert_bytes.min())
        return self.per_layer and something and not self.holds_all

    def bytes_of(self, count: NDArray[np.int64]) -> int:
        """Return the bytes of ``count`` [L] experts per layer."""
        return int((count * self.expert_bytes).sum())

    def just(self, count: NDArray[np.int64]) -> NDArray[np.int64]:
        """Share the budget so that every layer holds at least ``count`` [L], which must fit."""
        return self._apportion(count.astype(np.float64), count)

    @cached_property
    def _least(self) -> NDArray[np.int64]:
        """Fewest slots that a policy may leave a layer, int64 [L]."""
        average = self.budget.slots_per_layer(self.expert_bytes)
        return np.full(len(self.expert_bytes), min(self.top_k, average), np.int64)

    def by_weight(self, wanted: NDArray[np.float64]) -> NDArray[np.int64]:
        """Share the budget by weight; every layer can hold the experts of one token, if all can."""
        return self._apportion(wanted, self._least)

    def _apportion(
        self, weights: NDArray[np.float64], lower: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        upper = np.full(len(lower), self.experts, np.int64)
        return apportion(weights, lower, upper, self.expert_bytes, self.total_bytes)
