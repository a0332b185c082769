"""The figures of a run (spec §4), worked out by the engine from what its kernels noted.

*Decode passes* are denoise and commit passes; prefill is reported apart. 0/0 is NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.source import Source
from oled_sim.engine.state import (
    N_ACTIVATED,
    N_CAPACITY,
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
from oled_sim.trace.schema import Kind, RequestTrace

LANE_TIMES = PASS_TIMES[2:]
"""Busy and critical-path times of the lanes, in the columns of a pass."""

PERCENTILE_REQUESTS = 100
"""Percentiles over requests are given only from this many on."""


@dataclass(frozen=True)
class RequestFigures:
    """One counted request. Times in µs, sizes in bytes; in a batch, of the passes it was part of.

    Attributes:
        request: its number in the trace.
        output_tokens: generated tokens up to and including the first end of sequence.
        passes, commits: decode passes, and how many of them are commits.
        tpot_us: time of the decode passes / output tokens; commit_tpot_us: the commits' part.
        ttft_us: from its start to the end of the first pass that accepts a token.
        prefill_us, decode_us: time of its prefill and decode passes.
        utilization: mean over decode passes of the mean over layers of |R ∩ A| / C.
        hits, late, activations: Σ |R ∩ A|, late prefetches, Σ |A| over decode passes.
        demand_experts, demand_bytes: demand transfers. cpu_experts, cpu_bytes: computed there.
        cpu_hits: residents that were sent to the CPU (in ``cpu_experts`` too).
        prefetched, prefetched_bytes, useful, wasted: prefetches started, used, dropped unused.
        followed, reused: demand transfers with a next event, and those kept and used in it.
        gpu_busy_us, ...: time in which a lane works. gpu_critical_us, ...: its part of the
            chain that decides the length of the passes; the three sum to ``decode_us``.
        prefill_hits, prefill_activations, prefill_demand_experts: of the prefill passes.
    """

    request: int
    output_tokens: int
    passes: int
    commits: int
    tpot_us: float
    commit_tpot_us: float
    ttft_us: float
    prefill_us: float
    decode_us: float
    utilization: float
    hits: int
    late: int
    activations: int
    demand_experts: int
    demand_bytes: int
    cpu_experts: int
    cpu_bytes: int
    cpu_hits: int
    prefetched: int
    prefetched_bytes: int
    useful: int
    wasted: int
    followed: int
    reused: int
    gpu_busy_us: float
    h2d_busy_us: float
    cpu_busy_us: float
    gpu_critical_us: float
    h2d_critical_us: float
    cpu_critical_us: float
    prefill_hits: int
    prefill_activations: int
    prefill_demand_experts: int


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


def group_figures(
    record: GroupRecord, source: Source, *, scope: str, pool_slots: int
) -> GroupFigures:
    """Work out the figures of a group of requests.

    Args:
        record: what was measured.
        source: says how many tokens each request put out.
        scope: ``layer`` or ``global``, for the meaning of utilization.
        pool_slots: slots of the whole pool, under global scope.
    """
    passes = _PassTable(record, scope, pool_slots)
    requests = tuple(
        _request_figures(trace, passes, source.output_tokens(trace.request))
        for trace in record.batch.traces
    )
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


class _PassTable:
    """Event columns summed over each pass, and the utilization of each pass."""

    def __init__(self, record: GroupRecord, scope: str, pool_slots: int) -> None:
        course = record.course
        passes = len(course.pass_times)
        self.counts = np.zeros((passes, course.counts.shape[1]), np.int64)
        np.add.at(self.counts, course.event_pass, course.counts)
        self.pass_counts = course.pass_counts
        self.pass_times = course.pass_times
        self.time = course.pass_times[:, 1] - course.pass_times[:, 0]
        if scope == "global":
            slots = np.full(passes, pool_slots, np.float64)
            self.utilization = _ratio(self.counts[:, N_HITS].astype(np.float64), slots)
        else:
            self.utilization = _layer_utilization(course.counts, course.event_pass, passes)


def _layer_utilization(
    counts: NDArray[np.int64], event_pass: NDArray[np.int64], passes: int
) -> NDArray[np.float64]:
    """Return the mean over layers of |R ∩ A| / C per pass; layers without a slot are left out."""
    some = counts[:, N_CAPACITY] > 0
    share = counts[some, N_HITS] / counts[some, N_CAPACITY]
    total = np.bincount(event_pass[some], weights=share, minlength=passes)
    return _ratio(total, np.bincount(event_pass[some], minlength=passes).astype(float))


def _ratio(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    return np.divide(a, b, out=np.full(len(a), np.nan), where=b > 0)


def _request_figures(trace: RequestTrace, table: _PassTable, tokens: int) -> RequestFigures:
    own = slice(0, trace.passes)
    decode = trace.kind != Kind.PREFILL
    time = table.time[own]
    counts = table.counts[own][decode].sum(axis=0)
    prefill = table.counts[own][~decode].sum(axis=0)
    pass_counts = dict(zip(PASS_COUNTS, table.pass_counts[own][decode].sum(axis=0), strict=True))
    times = dict(zip(PASS_TIMES, table.pass_times[own][decode].sum(axis=0), strict=True))
    decode_us = float(time[decode].sum())
    commit_us = float(time[trace.kind == Kind.COMMIT].sum())
    return RequestFigures(
        request=trace.request,
        output_tokens=tokens,
        passes=int(decode.sum()),
        commits=int((trace.kind == Kind.COMMIT).sum()),
        tpot_us=ratio(decode_us, tokens),
        commit_tpot_us=ratio(commit_us, tokens),
        ttft_us=_first_token_us(trace, time),
        prefill_us=float(time[~decode].sum()),
        decode_us=decode_us,
        utilization=mean(table.utilization[own][decode]),
        hits=int(counts[N_HITS]),
        late=int(pass_counts["late"]),
        activations=int(counts[N_ACTIVATED]),
        demand_experts=int(counts[N_DEMAND]),
        demand_bytes=int(counts[N_DEMAND_BYTES]),
        cpu_experts=int(counts[N_CPU_MISSES] + counts[N_CPU_HITS]),
        cpu_bytes=int(counts[N_CPU_BYTES]),
        cpu_hits=int(counts[N_CPU_HITS]),
        prefetched=int(pass_counts["prefetched"]),
        prefetched_bytes=int(pass_counts["prefetched_bytes"]),
        useful=int(pass_counts["useful"]),
        wasted=int(pass_counts["wasted"]),
        followed=int(counts[N_FOLLOWED]),
        reused=int(counts[N_REUSED]),
        **{name: float(times[name]) for name in LANE_TIMES},
        prefill_hits=int(prefill[N_HITS]),
        prefill_activations=int(prefill[N_ACTIVATED]),
        prefill_demand_experts=int(prefill[N_DEMAND]),
    )  # fmt: skip


def _first_token_us(trace: RequestTrace, time: NDArray[np.float64]) -> float:
    accepts = np.flatnonzero(trace.accepted_count > 0)
    return float(time[: accepts[0] + 1].sum()) if len(accepts) else float("nan")


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


def sum_of(arrays: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """Return the sum of arrays of one shape."""
    return np.sum(np.stack(list(arrays)), axis=0)


def ratio(a: float, b: float) -> float:
    """Return a / b, NaN where b is 0."""
    return float(a) / float(b) if b else float("nan")


def mean(values: NDArray[np.float64]) -> float:
    """Return the mean of what is not NaN; NaN if nothing is left."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")


def percentile(values: NDArray[np.float64], q: float) -> float:
    """Return a percentile of what is not NaN, linearly interpolated; NaN if nothing is left."""
    known = values[~np.isnan(values)]
    return float(np.percentile(known, q)) if len(known) else float("nan")
