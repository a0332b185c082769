"""Does the confidence of a token say how long its route lasts? (figure 10a and 10b)"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.analysis.tally import RequestView, ratio, tabulate
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.schema import RequestTrace
from oled_sim.trace.stats import TRANSITIONS, Moments, token_transitions

BINS = 20
"""Bins of confidence and of kept share: [0, 0.05), ... [0.95, 1]."""

STATES = (*TRANSITIONS, "all")
"""What happened to the token between the passes (:class:`oled_sim.trace.stats.Stability`)."""


def confidence_stability(
    requests: Iterable[RequestTrace], geometry: RoutingGeometry
) -> dict[str, pd.DataFrame]:
    """Relate the confidence of tokens to the stability of their routes, by token state.

    A transition is a token in passes i and i + 1; its kept share is the part of its top-k of pass
    i that is in its top-k of pass i + 1, mean over layers. Its confidence is the one after pass i,
    which is all that a policy could know before pass i + 1. Transitions are told apart by what
    happened in between, because a token that was just accepted enters the next pass as a word
    instead of a mask, and its route moves with it.

    Args:
        requests: read once, one at a time; they need ``confidence`` and ``token_state``.
        geometry: what they route over.

    Returns:
        Three tables, ``state`` being one of :data:`STATES`:

        - ``confidence_bins`` (figure 10a): ``state``, ``confidence_low``, ``confidence_high``,
          ``transitions``, ``kept`` (mean kept share); bins without a transition are left out;
        - ``confidence_joint`` (figure 10b): ``state``, ``confidence_low``, ``confidence_high``,
          ``kept_low``, ``kept_high``, ``transitions``; cells without a transition are left out;
        - ``confidence_correlation``: ``state``, ``transitions`` (all, those of unknown confidence
          too), ``kept``, ``correlation`` (Pearson; NaN over fewer than two or without variation).
    """
    return tabulate(requests, geometry, StabilityTally(geometry))


class StabilityTally:
    """Counts :func:`confidence_stability`."""

    def __init__(self, geometry: RoutingGeometry) -> None:
        self._layers = len(geometry.layers)
        self._moments = {state: Moments() for state in TRANSITIONS}
        self._joint = np.zeros((len(TRANSITIONS), BINS, BINS), np.int64)
        self._kept = np.zeros((len(TRANSITIONS), BINS))

    def add(self, view: RequestView) -> None:
        """Count one request."""
        found = token_transitions(view.trace, self._layers)
        known = ~np.isnan(found.confidence)
        for i, state in enumerate(TRANSITIONS):
            member = found.members[state]
            self._moments[state].add(found.confidence[member], found.kept[member])
            self._add_bins(i, found.confidence[member & known], found.kept[member & known])

    def _add_bins(
        self, state: int, confidence: NDArray[np.float64], kept: NDArray[np.float64]
    ) -> None:
        column = _bins(confidence)
        cells = column * BINS + _bins(kept)
        self._joint[state] += np.bincount(cells, minlength=BINS * BINS).reshape(BINS, BINS)
        self._kept[state] += np.bincount(column, kept, BINS)

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables."""
        joint = np.concatenate([self._joint, self._joint.sum(axis=0, keepdims=True)])
        kept = np.concatenate([self._kept, self._kept.sum(axis=0, keepdims=True)])
        return {
            "confidence_bins": _bin_table(joint.sum(axis=2), kept),
            "confidence_joint": _joint_table(joint),
            "confidence_correlation": self._correlation_table(),
        }

    def _correlation_table(self) -> pd.DataFrame:
        moments = self._moments | {"all": sum(self._moments.values(), Moments())}
        results = [moments[state].result() for state in STATES]
        return pd.DataFrame(
            {
                "state": STATES,
                "transitions": [r.transitions for r in results],
                "kept": [r.kept for r in results],
                "correlation": [r.correlation for r in results],
            }
        )


def _bins(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the bin of each value in [0, 1]; a share that equals an edge belongs above it."""
    return np.minimum((values * BINS + 1e-9).astype(np.int64), BINS - 1)


def _bin_table(transitions: NDArray[np.int64], kept: NDArray[np.float64]) -> pd.DataFrame:
    state, column = np.nonzero(transitions)
    return pd.DataFrame(
        {
            "state": np.array(STATES)[state],
            "confidence_low": column / BINS,
            "confidence_high": (column + 1) / BINS,
            "transitions": transitions[state, column],
            "kept": ratio(kept[state, column], transitions[state, column]),
        }
    )


def _joint_table(joint: NDArray[np.int64]) -> pd.DataFrame:
    state, column, row = np.nonzero(joint)
    return pd.DataFrame(
        {
            "state": np.array(STATES)[state],
            "confidence_low": column / BINS,
            "confidence_high": (column + 1) / BINS,
            "kept_low": row / BINS,
            "kept_high": (row + 1) / BINS,
            "transitions": joint[state, column, row],
        }
    )
