"""Points put together whose policies can be ranked: one cache, one data set, the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan

import numpy as np

from oled_sim.engine.averages import mean
from oled_sim.validation.measured import About, Cut, point_name
from oled_sim.validation.ranking import Contest, Ranking, rank
from oled_sim.validation.statistics import Comparison

Passes = tuple[tuple[Cut, ...], tuple[Cut, ...]]
"""Warm-up and measured requests of a point."""

Policies = dict[str, dict[Passes, Comparison]]
"""The points of a group, by policy."""


def rankings_of(
    comparisons: Sequence[Comparison], assumed_spread: float | None = None
) -> list[Ranking]:
    """Return the order of policies for every cache and data set with two or more of them.

    A policy's time is the mean over the points that all policies of the group have. Full residency
    and no cache stand in a group only if it has their cache size.

    Args:
        comparisons: all points.
        assumed_spread: relative spread of those that were run once; None leaves it unknown.
    """
    groups = _groups(comparisons)
    found = [_rank(where, policies, assumed_spread) for (where, _), policies in groups.items()]
    return [ranking for ranking in found if ranking is not None]


def unranked(comparisons: Sequence[Comparison]) -> str:
    """Return which points other policies could have been ranked with, but have no equal of.

    Empty without one. A policy that is alone with its cache on its data set is no such case.
    """
    names = [
        f"{point_name(comparison.point.about)} ({_up_to(measured)})"
        for policies in _groups(comparisons).values()
        for points in policies.values()
        for (warmup, measured), comparison in points.items()
        if (warmup, measured) not in _common(policies)
    ]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: left out of rankings, as not every policy of that cache and data set"
        " has a point with the same warm-up, requests and passes"
    )


def _up_to(measured: Sequence[Cut]) -> str:
    """Return how many decode passes of its requests a point has, in words."""
    numbers = dict.fromkeys(cut.decode_passes for cut in measured)
    return f"{', '.join('all' if n is None else str(n) for n in numbers)} decode passes"


def _groups(comparisons: Sequence[Comparison]) -> dict[tuple[str, str], Policies]:
    """Return the points that may be ranked together, by what they have in common."""
    groups: dict[tuple[str, str], Policies] = {}
    for comparison in comparisons:
        about = comparison.point.about
        # Two traces of one name are two data sets.
        policies = groups.setdefault((_where(about), about.trace.sha256), {})
        points = policies.setdefault(about.policy.label, {})
        points[about.warmup, about.measured] = comparison
    return groups


def _common(policies: Policies) -> set[Passes]:
    """Return the warm-up and measured requests of which every policy of a group has a point."""
    return set.intersection(*(set(points) for points in policies.values()))


def _rank(where: str, policies: Policies, assumed_spread: float | None) -> Ranking | None:
    """Rank the policies of a group by the points that all have; None without two policies."""
    common = _common(policies)
    if len(policies) < 2 or not common:
        return None
    contests = [
        _contest(policy, [c for passes, c in points.items() if passes in common], assumed_spread)
        for policy, points in policies.items()
    ]
    return rank(where, contests)


def _where(about: About) -> str:
    """Return what policies of one ranking have in common, in words."""
    rules = about.rules
    parts = [f"cache {about.cache}", about.trace_name]
    parts += [f"scope {rules.scope}"] if rules.scope != "layer" else []
    parts += [f"{rules.staging} staging slots"] if rules.staging != 16 else []
    parts += ["cold"] if rules.cold else []
    parts += [f"confidence {rules.confidence}"] if rules.confidence != "previous" else []
    return ", ".join(parts)


def _contest(policy: str, points: Sequence[Comparison], assumed_spread: float | None) -> Contest:
    measured = mean(np.array([c.times.measured.tpot_us for c in points]))
    spread = _spread_us(points)
    if spread != spread and assumed_spread is not None:
        spread = assumed_spread * measured
    predicted = mean(np.array([c.times.predicted.tpot_us for c in points]))
    return Contest(policy, predicted, measured, spread)


def _spread_us(points: Sequence[Comparison]) -> float:
    """Return the spread over repetitions of the mean over points; NaN with one repetition."""
    n = min(len(c.times.repetitions_us) for c in points)
    if n < 2:
        return nan
    runs = np.mean([c.times.repetitions_us[:n] for c in points], axis=0)
    return float(runs.max() - runs.min())
