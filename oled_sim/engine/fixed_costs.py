"""Costs that no policy changes: everything outside the lanes of an event."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import BEYOND, LaneCosts
from oled_sim.costs.tables import (
    DENSE_LAYER,
    EMBEDDING,
    GATE,
    LM_HEAD,
    MERGE,
    SHARED_EXPERT,
    CostTables,
    dense_batch_us,
    lookup,
)
from oled_sim.engine.jit import inlined, kernel
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
        passes: float64 [P, 4], tokens, requests, summed context and rows of the LM head by pass.
        events: float64 [V, 3], the first three of each event, over the requests with rows in it.
        costs: lane costs.

    Raises:
        ProfileError: a count lies outside the profiled range.
    """
    tables, dense_layers = costs.tables, costs.geometry.dense_layers
    attention, (embedding, mlp) = _times(tables, passes, (EMBEDDING, DENSE_LAYER))
    (head,) = curve_us(tables, np.array((LM_HEAD,)), passes[:, 3].copy())
    course.start_us[:] = embedding + dense_layers * (attention + mlp)
    course.head_us[:] = head + tables.per_pass_us
    attention, (gate, shared, merge) = _times(tables, events, (GATE, SHARED_EXPERT, MERGE))
    course.dense_us[:] = attention + gate + tables.per_event_us
    course.shared_us[:] = shared
    course.merge_us[:] = merge
    for p in np.flatnonzero(np.isnan(course.start_us + course.head_us)):
        _explain(costs, passes[p])
    for v in np.flatnonzero(np.isnan(course.dense_us + course.shared_us + course.merge_us)):
        _explain(costs, events[v])


def _explain(costs: LaneCosts, load: NDArray[np.float64]) -> None:
    """Raise the sentence of the cost of a pass, or of an event, that the profile lacks."""
    require_fixed_costs(costs, load)
    raise ProfileError(
        f"profile {costs.profile.name!r} has no time for a pass of {load[0]:g} tokens and"
        f" {load[1]:g} requests: {BEYOND}"
    )


def require_fixed_costs(costs: LaneCosts, load: NDArray[np.float64]) -> None:
    """Check that a profile has every policy-independent cost of a pass.

    Args:
        costs: lane costs.
        load: float64 [4], tokens, requests, summed context and rows of the LM head; [3] without
            the last for an event.

    Raises:
        ProfileError: a count lies outside the profiled range.
    """
    tokens, requests, context = load[:3]
    costs.dense_batch_us(tokens, requests, context / requests)
    for curve in (
        costs.embedding_us,
        costs.gate_us,
        costs.shared_expert_us,
        costs.merge_us,
        costs.dense_layer_us,
    ):
        curve(tokens)
    if len(load) > 3:
        costs.lm_head_us(load[3])


def _times(
    tables: CostTables, load: NDArray[np.float64], curves: tuple[int, ...]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return attention times, float64 [n], and those of some curves by tokens, [curves, n]."""
    return attention_us(tables, load), curve_us(tables, np.array(curves), load[:, 0].copy())


@kernel
def attention_us(tables, load):  # noqa: ANN001, ANN201
    """Return norms, attention and projections by tokens, requests, summed context: float64 [n]."""
    times = np.empty(len(load))
    for i in range(len(load)):
        tokens, requests, context = load[i, 0], load[i, 1], load[i, 2]
        if i > 0 and _same(load, i):  # as most layers of a pass are
            times[i] = times[i - 1]
        else:
            times[i] = dense_batch_us(tables, tokens, requests, context / requests)
    return times


@inlined
def _same(load, i):  # noqa: ANN001, ANN202
    """Whether row i is as the one before."""
    same = True
    for column in range(load.shape[1]):
        same = same and load[i, column] == load[i - 1, column]
    return same


@kernel
def curve_us(tables, curves, counts):  # noqa: ANN001, ANN201
    """Return the times of tables of one count: float64 [curves, n]."""
    times = np.empty((len(curves), len(counts)))
    for c in range(len(curves)):
        for i in range(len(counts)):
            if i > 0 and counts[i] == counts[i - 1]:
                times[c, i] = times[c, i - 1]
            else:
                times[c, i] = lookup(tables, curves[c], counts[i], 0.0)
    return times
