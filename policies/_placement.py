"""Static placement: which experts are resident from the start, by a value per expert."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.policy import Event, RequestInfo, Setting


@dataclass
class Popularity:
    """Tokens routed to every expert while the history split runs.

    ``counts``: float64 [L, E], prefill included, as recorders of expert distributions count;
    None before the first run. ``known``: whether anything was counted.
    """

    counts: NDArray[np.float64] | None = None
    learning: bool = False

    def open(self, setting: Setting) -> NDArray[np.float64]:
        """Return the counts, which survive from the history split to the run."""
        if self.counts is None:
            self.counts = np.zeros((len(setting.routing.layers), setting.routing.experts))
        return self.counts

    @property
    def known(self) -> bool:
        """Whether anything was counted."""
        return self.counts is not None and bool(self.counts.any())

    def begin(self, info: RequestInfo) -> None:
        """Count during requests of the history split alone."""
        self.learning = info.history

    def notes(self) -> tuple[str, ...]:
        """Return what a result without any history must say."""
        if self.known:
            return ()
        return ("without history every layer holds the experts of lowest id",)

    def note(self, event: Event) -> None:
        """Count the tokens of an event."""
        if self.learning and self.counts is not None:
            self.counts[event.layer, event.experts] += event.tokens


def best_of_each_layer(value: NDArray[np.float64], setting: Setting) -> NDArray[np.bool_]:
    """Return the experts of highest value that fit the slots of each layer.

    Args:
        value: float64 [L, E]; equal ones go to the lower id.
        setting: gives ``capacity``, the equal share of every layer.

    Returns:
        bool [L, E].
    """
    order = np.argsort(-value, axis=1, kind="stable")
    rank = np.argsort(order, axis=1)
    return rank < setting.capacity[:, None]


def best_of_all(value: NDArray[np.float64], setting: Setting) -> NDArray[np.bool_]:
    """Return the experts of highest value that fit the whole budget, wherever they are.

    Args:
        value: float64 [L, E]; equal ones go to the lower layer, then the lower id.
        setting: gives the budget, as slots and bytes of every layer.

    Returns:
        bool [L, E]; a layer may get nothing.
    """
    order = np.argsort(-value.ravel(), kind="stable")
    size = np.repeat(setting.expert_bytes, value.shape[1])[order]
    budget = int((setting.capacity * setting.expert_bytes).sum())
    mask = np.zeros(value.size, np.bool_)
    mask[order[np.cumsum(size) <= budget]] = True
    return mask.reshape(value.shape)
