"""The least work that the misses of one request can cause, with the costs of a profile."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.bounds.cost_flow import Uses, least_cost_us
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.tables import cpu_experts_us
from oled_sim.engine.batch import Batch


class ExpertCost(NamedTuple):
    """What an expert costs the CPU at least: ``fixed_us`` + tokens · ``per_token_us``."""

    fixed_us: float
    per_token_us: float


def least_expert_cost(costs: LaneCosts, tokens: float) -> ExpertCost:
    """Return costs of single experts that never sum to more than the workers' makespan.

    The makespan of m experts with t tokens each is linear in m and in t between the points of the
    profile, and so is m · (a + b · t): if that is no more at the points, it is nowhere. Of all
    such a and b ≥ 0 the ones are taken that give most for experts with ``tokens`` tokens.
    """
    grid = costs.profile.cpu_experts
    points = np.array(grid.columns, np.float64)
    each = np.array(
        [[cpu_experts_us(costs.tables, m, m * t) / m for t in grid.columns] for m in grid.rows]
    )
    known = ~np.isnan(each).all(axis=0)
    points, least = points[known], np.nanmin(each[:, known], axis=0)
    best = ExpertCost(float(least.min()), 0.0)
    for i in range(len(points)):
        for j in range(i + 1, len(points)):
            slope = (least[j] - least[i]) / (points[j] - points[i])
            fixed = float((least - slope * points).min())
            if slope > 0 and fixed + slope * tokens > best.fixed_us + best.per_token_us * tokens:
                best = ExpertCost(fixed, float(slope))
    return best


def least_work_us(
    batch: Batch, costs: LaneCosts, copy_us: NDArray[np.float64], slots: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the least that copies and CPU experts of each layer sum to, float64 [L].

    Args:
        batch: a request alone, starting with empty caches.
        costs: lane costs.
        copy_us: float64 [L], of one expert.
        slots: int64 [L].
    """
    course = batch.course
    if len(course.tokens) == 0:
        return np.zeros(len(slots))
    cost = least_expert_cost(costs, float(course.tokens.mean()))
    layer = np.repeat(course.event_layer, np.diff(course.offset))
    counts = np.diff(course.offset)
    found = np.zeros(len(slots))
    for i in range(len(slots)):
        here = layer == i
        offset = np.concatenate([[0], np.cumsum(counts[course.event_layer == i])])
        cpu_us = cost.fixed_us + cost.per_token_us * course.tokens[here]
        if len(offset) > 1:
            uses = Uses(
                offset.astype(np.int64),
                course.experts[here].astype(np.int64),
                np.maximum(cpu_us, 0.0),
            )
            found[i] = least_cost_us(uses, float(copy_us[i]), int(slots[i]))
    return found
