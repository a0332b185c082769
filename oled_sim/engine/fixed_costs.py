"""Costs that no policy changes: everything outside the lanes of an event."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.tables import (
    dense_batch_us,
    dense_layer_us,
    embedding_us,
    gate_us,
    lm_head_us,
    merge_us,
    shared_expert_us,
)
from oled_sim.engine.jit import kernel
from oled_sim.engine.state import Course
from oled_sim.errors import ProfileError


def fill_fixed_costs(
    course: Course,
    passes: NDArray[np.float64],
    events: NDArray[np.float64],
    costs: LaneCosts,
) -> None:
    """Fill the policy-independent costs of a course.

    A pass starts with the embedding and the dense layers and ends with the LM head; an event has
    a dense part with the gate before its lanes and a merge after them.

    Args:
        course: whose costs are filled.
        passes: float64 [P, 3], tokens, requests and summed context of each pass.
        events: float64 [V, 3], the same of each event, over the requests that have rows in it.
        costs: lane costs.

    Raises:
        ProfileError: a count lies outside the profiled range.
    """
    _fill(course, costs.tables, passes, events, costs.geometry.dense_layers)
    for p in np.flatnonzero(np.isnan(course.start_us + course.head_us)):
        _explain(costs, *passes[p])
    for v in np.flatnonzero(np.isnan(course.dense_us + course.shared_us + course.merge_us)):
        _explain(costs, *events[v])


def _explain(costs: LaneCosts, tokens: float, requests: float, context: float) -> None:
    """Ask for every cost of a pass, so that the one outside the profile raises its sentence."""
    costs.dense_batch_us(tokens, requests, context / requests)
    for curve in (
        costs.embedding_us,
        costs.gate_us,
        costs.shared_expert_us,
        costs.merge_us,
        costs.dense_layer_us,
        costs.lm_head_us,
    ):
        curve(tokens)
    raise ProfileError(
        f"profile {costs.profile.name!r} has no time for a pass of {tokens:g} tokens and"
        f" {requests:g} requests: extrapolate, or use one that covers it"
    )


@kernel
def _fill(course, tables, passes, events, dense_layers):  # noqa: ANN001, ANN202
    for p in range(len(passes)):
        tokens, requests, context = passes[p, 0], passes[p, 1], passes[p, 2]
        attention = dense_batch_us(tables, tokens, requests, context / requests)
        layer = attention + dense_layer_us(tables, tokens)
        course.start_us[p] = embedding_us(tables, tokens) + dense_layers * layer
        course.head_us[p] = lm_head_us(tables, tokens)
    for v in range(len(events)):
        tokens, requests, context = events[v, 0], events[v, 1], events[v, 2]
        attention = dense_batch_us(tables, tokens, requests, context / requests)
        course.dense_us[v] = attention + gate_us(tables, tokens)
        course.shared_us[v] = shared_expert_us(tables, tokens)
        course.merge_us[v] = merge_us(tables, tokens)
