"""Policies relative to a reference, with intervals over requests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.averages import mean, ratio
from oled_sim.engine.budget import Budget
from oled_sim.engine.request_figures import RequestFigures
from oled_sim.engine.runner import Result

LEVEL = 0.95
RESAMPLES = 10_000
AT_A_TIME = 500
"""Resamples drawn in one go, which bounds memory."""


@dataclass(frozen=True)
class Ratio:
    """A ratio of means over requests, and the interval that resampling gives.

    ``low``, ``high``: NaN below two requests. ``requests``: how many it rests on.
    """

    value: float
    low: float
    high: float
    requests: int


def paired_ratio(ours: NDArray[np.float64], theirs: NDArray[np.float64], *, seed: int = 0) -> Ratio:
    """Return mean(ours) / mean(theirs) with a 95 % percentile-bootstrap interval.

    Requests are resampled in pairs, ``RESAMPLES`` times, since what makes a request slow makes it
    slow under every policy. Pairs with a NaN are left out.

    Args:
        ours, theirs: float64 [n], figures of the same requests.
        seed: of the resampling.
    """
    known = ~(np.isnan(ours) | np.isnan(theirs))
    ours, theirs = ours[known], theirs[known]
    n = len(ours)
    value = ratio(float(ours.sum()), float(theirs.sum()))
    if n < 2:
        return Ratio(value, float("nan"), float("nan"), n)
    rng, found = np.random.default_rng(seed), []
    for _ in range(RESAMPLES // AT_A_TIME):
        drawn = rng.integers(0, n, (AT_A_TIME, n))
        found.append(ours[drawn].sum(axis=1) / theirs[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(found), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Ratio(value, float(low), float(high), n)


@dataclass(frozen=True)
class Row:
    """A policy beside the reference with one budget, batch size and link.

    Attributes:
        spec, causal: of the policy. budget, batch, link_gb_s: of the comparison.
        own_budget: whether the policy ran with another budget, the only one that it has.
        tpot_us, utilization: means over requests. hit_rate, effective_transfer_ratio: over the
            passes that requests were part of; in a batch a pass counts for each.
        tpot_ratio: its TPOT over that of the reference.
    """

    spec: str
    causal: bool
    budget: Budget
    batch: int
    link_gb_s: float
    own_budget: bool
    tpot_us: float
    tpot_ratio: Ratio
    utilization: float
    hit_rate: float
    effective_transfer_ratio: float


def compare(
    runs: Sequence[Sequence[Result]],
    reference: str,
    *,
    of_one_budget: Collection[str] = (),
    seed: int = 0,
) -> list[Row]:
    """Set the policies of one or more traces beside the reference, requests pooled over the traces.

    Args:
        runs: of every trace the results of the same grid, in the same order.
        reference: what results call the policy that all others are relative to; it must have run
            with every budget.
        of_one_budget: policies that run with one budget only, such as full residency; they are
            set beside the reference with all others.
        seed: of the intervals.

    Returns:
        By batch size, link and budget; in each, policies in the order of the results.
    """
    columns = [_Pooled(results) for results in zip(*runs, strict=True)]
    rows: list[Row] = []
    for base in (c for c in columns if c.first.spec == reference):
        for column in columns:
            if column.belongs_beside(base, any_budget=column.first.spec in of_one_budget):
                rows.append(column.beside(base, seed))
    return rows


class _Pooled:
    """What one combination came to on all traces."""

    def __init__(self, results: tuple[Result, ...]) -> None:
        self.first = results[0]
        self._results = results
        self._requests = tuple(chain.from_iterable(r.requests for r in results))

    def belongs_beside(self, base: _Pooled, *, any_budget: bool) -> bool:
        mine, theirs = self.first, base.first
        same = (mine.rules.batch, mine.link_gb_s) == (theirs.rules.batch, theirs.link_gb_s)
        return same and (any_budget or mine.budget == theirs.budget)

    def beside(self, base: _Pooled, seed: int) -> Row:
        mine = self.first
        return Row(
            spec=mine.spec,
            causal=mine.causal,
            budget=base.first.budget,
            batch=mine.rules.batch,
            link_gb_s=mine.link_gb_s,
            own_budget=mine.budget != base.first.budget,
            tpot_us=mean(self._column("tpot_us")),
            tpot_ratio=paired_ratio(self._column("tpot_us"), base._column("tpot_us"), seed=seed),
            utilization=mean(self._column("utilization")),
            hit_rate=self._share("hits", "activations"),
            effective_transfer_ratio=self._share("reused", "followed"),
        )

    def _column(self, name: str) -> NDArray[np.float64]:
        return np.array([getattr(r, name) for r in self._requests], np.float64)

    def _share(self, part: str, whole: str) -> float:
        return ratio(_total(self._requests, part), _total(self._requests, whole))


def _total(requests: Iterable[RequestFigures], name: str) -> int:
    return sum(getattr(r, name) for r in requests)


def sections(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yield rows with the same budget, batch size and link together."""
    section: list[Row] = []
    for row in rows:
        if section and _conditions(row) != _conditions(section[-1]):
            yield section
            section = []
        section.append(row)
    if section:
        yield section


def _conditions(row: Row) -> tuple[int, float, Budget]:
    return row.batch, row.link_gb_s, row.budget
