"""A whole validation: every point compared, and what it comes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import nan
from typing import Any

import msgspec

from oled_sim.policy import Policy
from oled_sim.validation.checks import check_tables, check_together
from oled_sim.validation.decisions import compare_decisions
from oled_sim.validation.groups import rankings_of, unranked
from oled_sim.validation.measured import Machine, Point, ProfileUsed, point_name
from oled_sim.validation.order import InOrder, decide_in_order
from oled_sim.validation.pauses import predict_point
from oled_sim.validation.predicted import Basis, policy_of
from oled_sim.validation.prepared import prepare
from oled_sim.validation.ranking import Ranking
from oled_sim.validation.speed import host_speed
from oled_sim.validation.statistics import (
    Comparison,
    Correlation,
    Errors,
    LaneErrors,
    correlation_of,
    errors_by,
    errors_of,
    lane_errors,
)
from oled_sim.validation.targets import Target, targets_of
from oled_sim.validation.times import PERCENTILES, compare_times


@dataclass(frozen=True)
class Report:
    """What a validation comes to.

    Attributes:
        comparisons: every point, by data set, cache and policy.
        errors: over all of them; by_regime, by_policy, by_state: over some. The last go by what
            the machine was like beside its profile.
        lanes: errors by column, such as ``h2d_busy_us``.
        rankings: one per cache and data set. unranked: which points had to be left out of them,
            empty without one. correlation: over all points.
        targets: what had to be reached.
    """

    comparisons: tuple[Comparison, ...]
    errors: Errors
    by_regime: dict[str, Errors]
    by_policy: dict[str, Errors]
    by_state: dict[str, Errors]
    lanes: dict[str, LaneErrors]
    rankings: tuple[Ranking, ...]
    unranked: str
    correlation: Correlation
    targets: tuple[Target, ...]

    @property
    def missed(self) -> list[str]:
        """Names of targets that were missed."""
        return [target.name for target in self.targets if target.met is False]


def compare_all(
    points: Sequence[Point],
    basis_for: Callable[[Point, Policy], Basis],
    *,
    assumed_spread: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Predict every point and compare.

    Args:
        points: at least one, all of one kind of machine and one geometry.
        basis_for: finds trace and costs of a point, checked to be the right ones.
        assumed_spread: relative run-to-run spread of points that were run once, for rankings.
        progress: called with (points done, all of them).

    Raises:
        MeasurementError: they cannot be compared.
    """
    check_together(points)
    found = []
    for i, point in enumerate(sorted(points, key=_order)):
        found.append(_compare(point, basis_for))
        if progress is not None:
            progress(i + 1, len(points))
    return report_of(found, assumed_spread)


def _order(point: Point) -> tuple[str, int, str, tuple[int, ...]]:
    about = point.about
    return about.trace_name, about.cache, about.policy.label, about.requests


def _compare(point: Point, basis_for: Callable[[Point, Policy], Basis]) -> Comparison:
    policy = policy_of(point.about)
    basis = basis_for(point, policy)
    prediction = predict_point(point, basis, policy)
    check_tables(point, prediction)
    in_order = _in_order(point, basis)
    decisions = compare_decisions(point, prediction, in_order)
    speed = host_speed(point.about, basis.costs)
    return Comparison(point, compare_times(point, prediction), decisions, speed)


def _in_order(point: Point, basis: Basis) -> InOrder | None:
    """Return what is decided in the order of arrivals that was recorded, if one was."""
    about = point.about
    if point.order is None:
        return None
    prepared = prepare(about, basis.source, policy_of(about), basis.costs)
    return decide_in_order(prepared, point.order, about.repetitions, point.name)


def report_of(comparisons: Sequence[Comparison], assumed_spread: float | None = None) -> Report:
    """Return what comparisons come to."""
    errors, rankings = errors_of(comparisons), rankings_of(comparisons, assumed_spread)
    return Report(
        comparisons=tuple(comparisons),
        errors=errors,
        by_regime=errors_by(comparisons, lambda c: c.times.regime),
        by_policy=errors_by(comparisons, lambda c: c.point.about.policy.label),
        by_state=errors_by(comparisons, lambda c: c.state),
        lanes=lane_errors(comparisons),
        rankings=tuple(rankings),
        unranked=unranked(comparisons),
        correlation=correlation_of(comparisons),
        targets=tuple(targets_of(comparisons, errors, rankings)),
    )


def point_row(comparison: Comparison) -> dict[str, Any]:
    """Return a point as flat columns: what it is, then figures; times in µs, errors as shares."""
    about, times = comparison.point.about, comparison.times
    row: dict[str, Any] = {
        "point": point_name(about),
        "policy": about.policy.label,
        "cache": about.cache,
        "trace": about.trace_name,
        "requests": "-".join(map(str, about.requests)),
        "machine": about.machine.identity,
        "profile": about.profile.name,
        "scope": about.rules.scope,
        "regime": times.regime,
        "decode_passes": times.decode_passes,
        "output_tokens": times.output_tokens,
        "repetitions": about.repetitions,
        "predicted_tpot_us": times.predicted.tpot_us,
        "measured_tpot_us": times.measured.tpot_us,
        "measured_fastest_us": min(times.repetitions_us),
        "measured_slowest_us": max(times.repetitions_us),
        "spread": times.spread,
        "error": times.error,
    }
    sides = {"predicted": times.predicted, "measured": times.measured}
    for side, latency in sides.items():
        row[f"{side}_prefill_us"] = latency.prefill_us
        row |= {
            f"{side}_pass_p{q}_us": value
            for q, value in zip(PERCENTILES, latency.pass_us, strict=True)
        }
        row |= {f"{side}_{name}": value for name, value in latency.lanes.items()}
    decide = zip(("mean", "median", "max"), times.decide_us, strict=True)
    row |= {f"decide_{name}_us": value for name, value in decide}
    speed = comparison.speed
    row |= {"cpu_job_drift": nan if speed is None else speed.cpu_job}
    row |= {"launch_drift": nan if speed is None else speed.launch, "state": comparison.state}
    return row | asdict(comparison.decisions) | {"identical": comparison.decisions.identical}


def _counted(used: Sequence[Machine] | Sequence[ProfileUsed]) -> list[dict[str, Any]]:
    """Return what points used, each once in the order of points, with how many used it."""
    plain = [msgspec.to_builtins(one) for one in used]
    different = [one for i, one in enumerate(plain) if one not in plain[:i]]
    return [one | {"points": plain.count(one)} for one in different]


def to_plain(report: Report) -> dict[str, Any]:
    """Return a report as plain data for JSON; what was run and where comes first.

    ``machine``, ``software`` and ``profile`` are those of the first point; ``machines`` and
    ``profiles`` are all there are, with the number of their ``points``.
    """
    about = report.comparisons[0].point.about
    rest = {
        name: getattr(report, name)
        for name in (
            "errors",
            "by_regime",
            "by_policy",
            "lanes",
            "rankings",
            "unranked",
            "correlation",
        )
    }
    return {
        "machine": msgspec.to_builtins(about.machine),
        "machines": _counted([c.point.about.machine for c in report.comparisons]),
        "software": msgspec.to_builtins(about.software),
        "geometry": msgspec.to_builtins(about.geometry),
        "profile": msgspec.to_builtins(about.profile),
        "profiles": _counted([c.point.about.profile for c in report.comparisons]),
        "traces": sorted({c.point.about.trace_name for c in report.comparisons}),
        "targets": [asdict(target) for target in report.targets],
        "missed": report.missed,
        **msgspec.to_builtins(rest),
        "points": [point_row(c) for c in report.comparisons],
    }
