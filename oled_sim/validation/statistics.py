"""Errors over points: of time per output token, by regime and policy, and of the lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan

import numpy as np

from oled_sim.engine.averages import mean
from oled_sim.engine.state import LANES
from oled_sim.validation.decisions import Decisions
from oled_sim.validation.measured import Point, point_name
from oled_sim.validation.ranking import pearson
from oled_sim.validation.speed import HostSpeed
from oled_sim.validation.times import Times


@dataclass(frozen=True)
class Comparison:
    """A measured point beside its prediction. ``speed``: of the host, None if not measured."""

    point: Point
    times: Times
    decisions: Decisions
    speed: HostSpeed | None = None

    @property
    def state(self) -> str:
        """What the machine was like beside its profile."""
        return "not measured" if self.speed is None else self.speed.state


@dataclass(frozen=True)
class Errors:
    """Relative errors of TPOT over some points, (predicted - measured) / measured.

    Attributes:
        points: how many.
        median_abs, worst_abs, mean_abs: of the errors' sizes; ``mean_abs`` is the MAPE.
        signed_mean: of the errors.
        worst: the point with the largest error.
        median_spread, worst_spread: of the hardware from run to run, relative to its median run;
            NaN where points were run once.
    """

    points: int
    median_abs: float
    worst_abs: float
    mean_abs: float
    signed_mean: float
    worst: str
    median_spread: float
    worst_spread: float


def errors_of(comparisons: Sequence[Comparison]) -> Errors:
    """Return the errors over at least one point."""
    signed = np.array([c.times.error for c in comparisons])
    spread = np.array([c.times.spread for c in comparisons])
    known = spread[~np.isnan(spread)]
    worst = int(np.argmax(np.abs(signed)))
    return Errors(
        points=len(comparisons),
        median_abs=float(np.median(np.abs(signed))),
        worst_abs=float(np.abs(signed).max()),
        mean_abs=float(np.abs(signed).mean()),
        signed_mean=float(signed.mean()),
        worst=point_name(comparisons[worst].point.about),
        median_spread=float(np.median(known)) if len(known) else nan,
        worst_spread=float(known.max()) if len(known) else nan,
    )


def errors_by(
    comparisons: Sequence[Comparison], key: Callable[[Comparison], str]
) -> dict[str, Errors]:
    """Return the errors of each group of points, groups by name."""
    groups: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault(key(comparison), []).append(comparison)
    return {name: errors_of(groups[name]) for name in sorted(groups)}


@dataclass(frozen=True)
class LaneErrors:
    """Errors of the time that a lane works or is what the pass waits for, over points.

    ``points``: those in which it was measured and did something. The others as in :class:`Errors`;
    NaN without such a point. ``predicted_us``, ``measured_us``: mean per decode pass over these.
    """

    points: int
    median_abs: float
    worst_abs: float
    signed_mean: float
    predicted_us: float
    measured_us: float


def lane_errors(comparisons: Sequence[Comparison]) -> dict[str, LaneErrors]:
    """Return errors by column, such as ``h2d_busy_us``."""
    columns = [f"{lane}_{what}_us" for what in ("busy", "critical") for lane in LANES]
    return {column: _lane_errors(comparisons, column) for column in columns}


def _lane_errors(comparisons: Sequence[Comparison], column: str) -> LaneErrors:
    errors = np.array([c.times.lane_error(column) for c in comparisons])
    known = ~np.isnan(errors)
    signed = errors[known]
    said = np.array([c.times.predicted.lanes[column] for c in comparisons])[known]
    seen = np.array([c.times.measured.lanes[column] for c in comparisons])[known]
    return LaneErrors(
        points=len(signed),
        median_abs=float(np.median(np.abs(signed))) if len(signed) else nan,
        worst_abs=float(np.abs(signed).max()) if len(signed) else nan,
        signed_mean=mean(signed),
        predicted_us=mean(said),
        measured_us=mean(seen),
    )


@dataclass(frozen=True)
class Correlation:
    """Pearson's r of predicted and measured TPOT over all points, and of their logarithms."""

    linear: float
    logarithmic: float


def correlation_of(comparisons: Sequence[Comparison]) -> Correlation:
    """Return how far predictions and measurements go together."""
    said = np.array([c.times.predicted.tpot_us for c in comparisons])
    seen = np.array([c.times.measured.tpot_us for c in comparisons])
    return Correlation(pearson(said, seen), pearson(np.log(said), np.log(seen)))
