"""The figures of one request (spec §4), from what the passes of its batch measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.averages import mean, ratio
from oled_sim.engine.jit import kernel
from oled_sim.engine.members import Member
from oled_sim.engine.simulation import GroupRecord
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
from oled_sim.trace.schema import Kind

LANE_TIMES = PASS_TIMES[2:]
"""Busy and critical-path times of the lanes, in the columns of a pass."""


@dataclass(frozen=True)
class RequestFigures:
    """One counted request. Times in µs, sizes in bytes; in a batch, of the passes it was part of.

    Where a request sits out passes of its batch (``--batch-mode barrier``) they are part of its
    times, as it waits for its next token, but not of its counts.

    Attributes:
        request: its number in the trace.
        output_tokens: generated tokens up to and including the first end of sequence.
        passes, commits: decode passes, and how many of them are commits.
        tpot_us: time of the decode passes / output tokens; commit_tpot_us: the commits' part.
        ttft_us: from its start to the end of the first pass that accepts a token.
        prefill_us, decode_us: time of its prefill and decode passes. waited_us: the part of
            ``decode_us`` that it sat out.
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
    waited_us: float
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


class PassTable:
    """Event columns summed over each pass, and the utilization of each pass."""

    def __init__(self, record: GroupRecord, scope: str, pool_slots: int) -> None:
        course = record.course
        self.counts, self.utilization = sum_by_pass(course.counts, course.pass_event)
        self.pass_counts = course.pass_counts
        self.pass_times = course.pass_times
        self.time = course.pass_times[:, 1] - course.pass_times[:, 0]
        if scope == "global":
            slots = float(pool_slots) if pool_slots > 0 else np.nan
            self.utilization = self.counts[:, N_HITS] / slots


@kernel
def sum_by_pass(counts, pass_event):  # noqa: ANN001, ANN201
    """Return event columns summed over each pass.

    Args:
        counts: int64 [V, n], one row per event in execution order.
        pass_event: int64 [P + 1], first event of each pass.

    Returns:
        int64 [P, n], and the mean over layers of |R ∩ A| / C, float64 [P]: layers without a slot
        are left out, and it is NaN where all are.
    """
    total = np.zeros((len(pass_event) - 1, counts.shape[1]), np.int64)
    utilization = np.full(len(total), np.nan)
    for p in range(len(total)):
        layers, share = 0, 0.0
        for v in range(pass_event[p], pass_event[p + 1]):
            for column in range(counts.shape[1]):
                total[p, column] += counts[v, column]
            if counts[v, N_CAPACITY] > 0:
                layers += 1
                share += counts[v, N_HITS] / counts[v, N_CAPACITY]
        if layers > 0:
            utilization[p] = share / layers
    return total, utilization


WAITS = 255
"""Stands for the kind of a pass that a request sits out."""


class RequestCourse(NamedTuple):
    """The passes of a batch from a request's first to its last, or a stretch of them; [I] each.

    ``kind``: its own, or ``WAITS``. ``accepts``: whether it accepts a token. The others are those
    of :class:`PassTable`.
    """

    kind: NDArray[np.uint8]
    accepts: NDArray[np.bool_]
    time: NDArray[np.float64]
    utilization: NDArray[np.float64]
    counts: NDArray[np.int64]
    pass_counts: NDArray[np.int64]
    pass_times: NDArray[np.float64]


def course_of(member: Member, table: PassTable) -> RequestCourse:
    """Return what the passes of a batch were to one of its requests."""
    trace, at = member.trace, member.at
    span = slice(int(at[0]), int(at[-1]) + 1)
    kind = np.full(span.stop - span.start, WAITS, np.uint8)
    accepts = np.zeros(len(kind), np.bool_)
    kind[at - at[0]], accepts[at - at[0]] = trace.kind, trace.accepted_count > 0
    return RequestCourse(
        kind,
        accepts,
        table.time[span],
        table.utilization[span],
        table.counts[span],
        table.pass_counts[span],
        table.pass_times[span],
    )


def joined(courses: Sequence[RequestCourse]) -> RequestCourse:
    """Return the stretches of a request as one."""
    if len(courses) == 1:
        return courses[0]
    return RequestCourse(*(np.concatenate(columns) for columns in zip(*courses, strict=True)))


def request_figures(request: int, course: RequestCourse, tokens: int) -> RequestFigures:
    """Work out the figures of a request that put out so many ``tokens``."""
    kind, time = course.kind, course.time
    decode = (kind == Kind.DENOISE) | (kind == Kind.COMMIT)
    after_prefill = kind != Kind.PREFILL
    counts = course.counts[decode].sum(axis=0)
    prefill = course.counts[~after_prefill].sum(axis=0)
    pass_counts = dict(zip(PASS_COUNTS, course.pass_counts[decode].sum(axis=0), strict=True))
    times = dict(zip(PASS_TIMES, course.pass_times[after_prefill].sum(axis=0), strict=True))
    decode_us = float(time[after_prefill].sum())
    commit_us = float(time[kind == Kind.COMMIT].sum())
    return RequestFigures(
        request=request,
        output_tokens=tokens,
        passes=int(decode.sum()),
        commits=int((kind == Kind.COMMIT).sum()),
        tpot_us=ratio(decode_us, tokens),
        commit_tpot_us=ratio(commit_us, tokens),
        ttft_us=_first_token_us(course),
        prefill_us=float(time[~after_prefill].sum()),
        decode_us=decode_us,
        waited_us=float(time[kind == WAITS].sum()),
        utilization=mean(course.utilization[decode]),
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


def _first_token_us(course: RequestCourse) -> float:
    accepts = np.flatnonzero(course.accepts)
    return float(course.time[: accepts[0] + 1].sum()) if len(accepts) else float("nan")
