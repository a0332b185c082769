"""The figures of a run (spec §4), worked out by the engine from what its kernels noted.

*Decode passes* are denoise and commit passes; prefill is reported apart. 0/0 is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.averages import mean, percentile, ratio, sum_of
from oled_sim.engine.request_figures import (
    LANE_TIMES,
    PassTable,
    RequestCourse,
    RequestFigures,
    course_of,
    joined,
    request_figures,
)
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.source import Source
from oled_sim.engine.state import (
    N_ACTIVATED,
    N_CPU_BYTES,
    N_CPU_HITS,
    N_CPU_MISSES,
    N_DEMAND,
    N_DEMAND_BYTES,
    N_FOLLOWED,
    N_HITS,
    N_REUSED,
    PASS_COUNTS,
    PASS_TIMES,
)

PERCENTILE_REQUESTS = 100
"""Percentiles over requests are given only from this many on."""


@dataclass(frozen=True)
class GroupFigures:
    """What a group of requests that ran together adds to the totals of a run.

    ``decode_passes_us``: float64, time of each decode pass. ``decode_us``: from the end of
    prefill to the last pass. ``tokens``: output tokens of all its requests. ``counts``: sums of
    the event columns over decode passes, ``all_counts`` over all passes.
    ``pass_counts``, ``pass_times``: sums of the pass columns over decode passes.
    """

    requests: tuple[RequestFigures, ...]
    decode_passes_us: NDArray[np.float64]
    decode_us: float
    tokens: int
    counts: NDArray[np.int64]
    all_counts: NDArray[np.int64]
    pass_counts: NDArray[np.int64]
    pass_times: NDArray[np.float64]
    kept_tokens: int


class Ledger:
    """Takes groups of requests one by one, and works out their figures.

    Args:
        source: says how many tokens each request put out.
        scope: ``layer`` or ``global``, for the meaning of utilization.
    """

    def __init__(self, source: Source, scope: str) -> None:
        self._source = source
        self._scope = scope
        self._open: dict[int, list[RequestCourse]] = {}

    def add(self, record: GroupRecord, pool_slots: int) -> GroupFigures:
        """Return the figures of a group, with those of the requests that end in it.

        Args:
            record: what was measured.
            pool_slots: slots of the whole pool, under global scope.
        """
        passes = PassTable(record, self._scope, pool_slots)
        for member in record.batch.members:
            courses = self._open.setdefault(member.whole.request, [])
            courses.append(course_of(member, passes))
        return _group_figures(record, passes, tuple(map(self._close, record.group.ends)))

    def _close(self, request: int) -> RequestFigures:
        course = joined(self._open.pop(request))
        return request_figures(request, course, self._source.output_tokens(request))


def _group_figures(
    record: GroupRecord, passes: PassTable, requests: tuple[RequestFigures, ...]
) -> GroupFigures:
    decode = record.course.decode
    return GroupFigures(
        requests=requests,
        decode_passes_us=passes.time[decode],
        decode_us=float(passes.time[decode].sum()),
        tokens=sum(r.output_tokens for r in requests),
        counts=passes.counts[decode].sum(axis=0),
        all_counts=passes.counts.sum(axis=0),
        pass_counts=record.course.pass_counts[decode].sum(axis=0),
        pass_times=record.course.pass_times[decode].sum(axis=0),
        kept_tokens=int(record.batch.context_tokens.max(initial=0)),
    )


@dataclass(frozen=True)
class Summary:
    """The figures of a run: what the table shows. Units as in :class:`RequestFigures`.

    Attributes:
        requests: counted requests. output_tokens: of all of them.
        passes: decode passes of the batches.
        tpot_us, commit_tpot_us, ttft_us, utilization: means over requests.
        tpot_p50_us, tpot_p90_us, tpot_p99_us: over requests, NaN below 100 of them.
        pass_p50_us, pass_p90_us, pass_p99_us: over decode passes.
        batch_tpot_us: decode time of the batches / all output tokens.
        hit_rate: Σ |R ∩ A| / Σ |A| of decode passes; hit_rate_with_prefill: of all
            passes.
        effective_transfer_ratio: Σ reused / Σ followed.
        demand_per_pass, cpu_per_pass: experts per decode pass.
        gpu_busy_us, ..., gpu_critical_us, ...: per decode pass.
        pass_us: mean time of a decode pass.
        peak_gpu_bytes: weights besides the routed experts, budget, staging and the largest KV
            cache. peak_resident_bytes: the most that was resident. host_bytes: every expert.
    """

    requests: int
    output_tokens: int
    passes: int
    tpot_us: float
    commit_tpot_us: float
    tpot_p50_us: float
    tpot_p90_us: float
    tpot_p99_us: float
    batch_tpot_us: float
    ttft_us: float
    pass_us: float
    pass_p50_us: float
    pass_p90_us: float
    pass_p99_us: float
    utilization: float
    hit_rate: float
    hit_rate_with_prefill: float
    effective_transfer_ratio: float
    demand_per_pass: float
    cpu_per_pass: float
    demand_bytes: int
    cpu_bytes: int
    prefetched: int
    useful: int
    late: int
    wasted: int
    gpu_busy_us: float
    h2d_busy_us: float
    cpu_busy_us: float
    gpu_critical_us: float
    h2d_critical_us: float
    cpu_critical_us: float
    peak_gpu_bytes: int
    peak_resident_bytes: int
    host_bytes: int


def summarize(
    groups: Sequence[GroupFigures],
    *,
    peak_gpu_bytes: int,
    peak_resident_bytes: int,
    host_bytes: int,
) -> Summary:
    """Return the figures of a run from those of its counted groups."""
    requests = [r for g in groups for r in g.requests]
    passes = np.concatenate([g.decode_passes_us for g in groups])
    counts = sum_of([g.counts for g in groups])
    all_counts = sum_of([g.all_counts for g in groups])
    pass_counts = dict(zip(PASS_COUNTS, sum_of([g.pass_counts for g in groups]), strict=True))
    times = dict(zip(PASS_TIMES, sum_of([g.pass_times for g in groups]), strict=True))
    tpot = np.array([r.tpot_us for r in requests])
    enough = len(requests) >= PERCENTILE_REQUESTS
    n = len(passes)
    tokens = sum(g.tokens for g in groups)
    return Summary(
        requests=len(requests),
        output_tokens=tokens,
        passes=n,
        tpot_us=mean(tpot),
        commit_tpot_us=mean(np.array([r.commit_tpot_us for r in requests])),
        tpot_p50_us=percentile(tpot, 50) if enough else float("nan"),
        tpot_p90_us=percentile(tpot, 90) if enough else float("nan"),
        tpot_p99_us=percentile(tpot, 99) if enough else float("nan"),
        batch_tpot_us=ratio(sum(g.decode_us for g in groups), tokens),
        ttft_us=mean(np.array([r.ttft_us for r in requests])),
        pass_us=mean(passes),
        pass_p50_us=percentile(passes, 50),
        pass_p90_us=percentile(passes, 90),
        pass_p99_us=percentile(passes, 99),
        utilization=mean(np.array([r.utilization for r in requests])),
        hit_rate=ratio(counts[N_HITS], counts[N_ACTIVATED]),
        hit_rate_with_prefill=ratio(all_counts[N_HITS], all_counts[N_ACTIVATED]),
        effective_transfer_ratio=ratio(counts[N_REUSED], counts[N_FOLLOWED]),
        demand_per_pass=ratio(counts[N_DEMAND], n),
        cpu_per_pass=ratio(counts[N_CPU_MISSES] + counts[N_CPU_HITS], n),
        demand_bytes=int(counts[N_DEMAND_BYTES]),
        cpu_bytes=int(counts[N_CPU_BYTES]),
        prefetched=int(pass_counts["prefetched"]),
        useful=int(pass_counts["useful"]),
        late=int(pass_counts["late"]),
        wasted=int(pass_counts["wasted"]),
        **{name: ratio(times[name], n) for name in LANE_TIMES},
        peak_gpu_bytes=peak_gpu_bytes,
        peak_resident_bytes=peak_resident_bytes,
        host_bytes=host_bytes,
    )  # fmt: skip
