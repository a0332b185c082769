"""Miss rates over the cache size, and how far those of two traces are apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from oled_sim.cli.simulating import costs_for, source_for
from oled_sim.comparison import LEVEL, RESAMPLES
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.policy_spec import parse_policies
from oled_sim.sweep import Grid, part_of, sweep
from oled_sim.trace import Trace


class Apart(NamedTuple):
    """Where two miss curves are farthest apart.

    ``cache``: experts per layer. ``difference``: of the miss rates there, second less first.
    ``low``, ``high``: its 95 % bootstrap interval over requests, NaN below two of them.
    """

    cache: int
    difference: float
    low: float
    high: float


def miss_counts(
    trace: Trace,
    policies: Sequence[str],
    caches: Sequence[int],
    *,
    requests: int | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> pd.DataFrame:
    """Run policies with every cache size, one pool per layer.

    One request warms up and all others count: no policy here learns from history.

    Args:
        trace: what is replayed; costs are those of what it stands for.
        policies: specifications.
        caches: experts per layer.
        requests: use only this many.
        jobs: runs at the same time. progress: called with (parts done, all of them).

    Returns:
        One row per policy, cache and counted request: ``policy``, ``cache``, ``request``,
        ``misses`` (Σ |A| - |R ∩ A| over decode passes), ``activations`` (Σ |A|).
    """
    parsed = parse_policies(policies)
    results = sweep(
        source_for(trace, parsed.values()),
        Grid(parsed, [Budget(cache=c) for c in caches]),
        costs_for(trace, None, None, extrapolate=True),
        Rules(history=0, requests=requests),
        jobs=jobs,
        progress=progress,
    )
    return pd.DataFrame(
        [
            (run.spec, run.budget.cache, r.request, r.activations - r.hits, r.activations)
            for run in results
            for r in run.requests
        ],
        columns=["policy", "cache", "request", "misses", "activations"],
    )


def rates(counts: pd.DataFrame, keys: Sequence[str]) -> pd.Series:
    """Return the miss rate, Σ misses / Σ activations, of the rows that share ``keys``."""
    sums = counts.groupby(list(keys), sort=False)[["misses", "activations"]].sum()
    return sums["misses"] / sums["activations"]


def farthest(first: pd.DataFrame, second: pd.DataFrame, *, seed: int = 0) -> Apart:
    """Return where the miss curves of one policy on two traces are farthest apart.

    The interval resamples the requests of both, each by itself, at that one cache size; that it is
    the largest of several differences the interval does not make up for.

    Args:
        first, second: rows of :func:`miss_counts`, of one policy and the same cache sizes.
        seed: of the resampling.
    """
    differences = rates(second, ["cache"]) - rates(first, ["cache"])
    cache = int(differences.index[int(np.argmax(np.abs(differences.to_numpy())))])
    rng = np.random.default_rng(seed)
    drawn = [_resampled(counts[counts["cache"] == cache], rng) for counts in (first, second)]
    low, high = np.quantile(drawn[1] - drawn[0], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Apart(cache, float(differences[cache]), float(low), float(high))


def _resampled(counts: pd.DataFrame, rng: np.random.Generator) -> NDArray[np.float64]:
    """Return the miss rate of ``RESAMPLES`` draws of as many requests, float64 [RESAMPLES]."""
    misses, activations = (counts[n].to_numpy(np.float64) for n in ("misses", "activations"))
    n = len(counts)
    if n < 2:
        return np.full(RESAMPLES, np.nan)
    drawn = rng.integers(0, n, (RESAMPLES, n))
    return misses[drawn].sum(axis=1) / activations[drawn].sum(axis=1)


def curves_of(
    traces: Mapping[str, Trace],
    policies: Sequence[str],
    caches: Sequence[int],
    *,
    requests: int | None = None,
    jobs: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> pd.DataFrame:
    """Return :func:`miss_counts` of several traces, with the columns ``trace`` and ``origin``.

    Args:
        traces: by name. All else: as there.
    """
    parts = []
    for i, (name, trace) in enumerate(traces.items()):
        counts = miss_counts(
            trace,
            policies,
            caches,
            requests=requests,
            jobs=jobs,
            progress=part_of(progress, i, len(traces)),
        )
        counts.insert(0, "trace", name)
        counts.insert(1, "origin", trace.manifest.origin)
        parts.append(counts)
    return pd.concat(parts, ignore_index=True)
