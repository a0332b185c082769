"""What a validation must reach, and whether it does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oled_sim.validation.ranking import Ranking
from oled_sim.validation.statistics import Comparison, Errors

MEDIAN_ERROR = 0.05
WORST_ERROR = 0.10
SIGNED_MEAN = 0.03
PREFETCHING = 0.02
DECISION_US = 1000.0


@dataclass(frozen=True)
class Target:
    """``met`` is None where nothing was measured that could tell; ``found`` says what was."""

    name: str
    limit: str
    found: str
    met: bool | None


def targets_of(
    comparisons: Sequence[Comparison], errors: Errors, rankings: Sequence[Ranking]
) -> list[Target]:
    """Return every target with what was found."""
    signed = errors.signed_mean
    return [
        Target(
            "median |TPOT error|",
            f"≤ {MEDIAN_ERROR:.0%}",
            f"{errors.median_abs:.2%}",
            errors.median_abs <= MEDIAN_ERROR,
        ),
        Target(
            "worst |TPOT error|",
            f"≤ {WORST_ERROR:.0%}",
            f"{errors.worst_abs:.2%} ({errors.worst})",
            errors.worst_abs <= WORST_ERROR,
        ),
        Target(
            "signed mean TPOT error",
            f"within ±{SIGNED_MEAN:.0%}",
            f"{signed:+.2%}",
            abs(signed) <= SIGNED_MEAN,
        ),
        _ranking(rankings),
        _demand_only(comparisons),
        _in_order(comparisons),
        _prefetching(comparisons),
        _decision_time(comparisons),
        _lossless(comparisons),
    ]


def _ranking(rankings: Sequence[Ranking]) -> Target:
    separated = sum(r.separated for r in rankings)
    swapped = sum(len(r.swapped) for r in rankings)
    unknown = sum(r.unknown for r in rankings)
    found = f"{separated - swapped} of {separated} pairs in the same order"
    found += f", {unknown} pairs were run once and cannot tell" if unknown else ""
    met = None if swapped == 0 and (unknown or not separated) else not swapped
    limit = "same order wherever hardware separates two policies by more than its spread"
    return Target("ranking", limit, found, met)


def _demand_only(comparisons: Sequence[Comparison]) -> Target:
    mine = [c for c in comparisons if not c.decisions.prefetching]
    same = sum(c.decisions.identical for c in mine)
    events = sum(c.decisions.events for c in mine)
    found = f"{same} of {len(mine)} points identical, {events:,} events"
    met = same == len(mine) if mine else None
    return Target("decisions, demand-only policies", "equal event by event", found, met)


def _in_order(comparisons: Sequence[Comparison]) -> Target:
    mine = [c.decisions for c in comparisons if c.decisions.in_order is not None]
    name = "decisions, prefetching policies, in the recorded order of arrivals"
    same = sum(bool(d.in_order) for d in mine)
    events = sum(d.events for d in mine)
    found = f"{same} of {len(mine)} points identical, {events:,} events"
    met = same == len(mine) if mine else None
    return Target(name, "equal event by event", found if mine else "no order recorded", met)


def _prefetching(comparisons: Sequence[Comparison]) -> Target:
    mine = [c.decisions for c in comparisons if c.decisions.prefetching]
    limit = f"hits and bytes within {PREFETCHING:.0%}"
    name = "decisions, prefetching policies, free-running"
    if not mine:
        return Target(name, limit, "no such point", None)
    hits = max(abs(d.hits_error) for d in mine)
    copied = max(abs(d.bytes_error) for d in mine)
    found = f"{len(mine)} points, worst {hits:.2%} of hits and {copied:.2%} of bytes"
    return Target(name, limit, found, max(hits, copied) <= PREFETCHING)


def _decision_time(comparisons: Sequence[Comparison]) -> Target:
    name, limit = "decision time per forward", f"≤ {DECISION_US / 1e3:g} ms, mean of a point"
    times = np.array([c.times.decide_us[0] for c in comparisons])
    if np.isnan(times).all():
        return Target(name, limit, "not measured", None)
    worst = int(np.nanargmax(times))
    policy = comparisons[worst].point.about.policy.label
    found = f"{times[worst] / 1e3:.3g} ms ({policy})"
    return Target(name, limit, found, bool(times[worst] <= DECISION_US))


def _lossless(comparisons: Sequence[Comparison]) -> Target:
    name, limit = "outputs of layers", "as with full residency, within the tolerance of the dtype"
    checks = [c.point.about.lossless for c in comparisons]
    known = [check for check in checks if check is not None and check.events_checked]
    if not known:
        return Target(name, limit, "not checked", None)
    worst = max(known, key=lambda check: check.worst_relative_error / check.tolerance)
    found = (
        f"worst relative error {worst.worst_relative_error:.2g} of {worst.tolerance:.2g} allowed,"
        f" {sum(check.events_checked for check in known):,} events of {len(known)} points"
    )
    return Target(name, limit, found, worst.worst_relative_error <= worst.tolerance)
