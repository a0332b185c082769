"""What the engine noted of a request as rows of a point's tables, predicted or measured alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES
from oled_sim.trace.schema import Kind
from oled_sim.validation.measured import EVENT_SCHEMA, LANE_COLUMNS, PASS_SCHEMA


def pass_rows(
    record: GroupRecord,
    *,
    repetition: int = 0,
    pass_us: NDArray[np.float64] | None = None,
    decide_us: NDArray[np.float64] | None = None,
    paused_us: NDArray[np.float64] | None = None,
) -> pa.Table:
    """Return a row per pass of a request, columns ``PASS_SCHEMA``.

    Args:
        record: what was noted of one request; I passes.
        repetition: number of the run.
        pass_us: float64 [I], time of each pass without decisions; by default from start to end as
            the record says.
        decide_us: float64 [I], time of the policy's decisions; NaN by default.
        paused_us: float64 [I], for how long they kept the lanes waiting; NaN by default.
    """
    course, trace = record.course, record.batch.members[0].trace
    start_us, end_us = course.pass_times[:, 0], course.pass_times[:, 1]
    unknown = np.full(trace.passes, np.nan)
    columns: dict[str, Any] = {
        "repetition": np.full(trace.passes, repetition),
        "request": np.full(trace.passes, trace.request),
        "pass_index": np.arange(trace.passes),
        "kind": [Kind(kind).name.lower() for kind in trace.kind],
        "tokens": np.diff(trace.token_offset),
        "context": trace.context,
        "pass_us": end_us - start_us if pass_us is None else pass_us,
        "decide_us": unknown if decide_us is None else decide_us,
        "paused_us": unknown if paused_us is None else paused_us,
    }
    times = dict(zip(PASS_TIMES, course.pass_times.T, strict=True))
    columns |= {name: times[name] for name in LANE_COLUMNS}
    columns |= zip(PASS_COUNTS, course.pass_counts.T, strict=True)
    return pa.table(columns).cast(PASS_SCHEMA)


def event_rows(record: GroupRecord, layers: Sequence[int], *, repetition: int = 0) -> pa.Table:
    """Return a row per event of a request, columns ``EVENT_SCHEMA``.

    Args:
        record: what was noted of one request.
        layers: the model's own indices of the MoE layers.
        repetition: number of the run.
    """
    course, request = record.course, record.batch.members[0].trace.request
    events = len(course.event_layer)
    columns: dict[str, Any] = {
        "repetition": np.full(events, repetition),
        "request": np.full(events, request),
        "pass_index": course.event_pass,
        "layer": np.array(layers)[course.event_layer],
    }
    columns |= zip(EVENT_COUNTS, course.counts.T, strict=True)
    columns |= zip(EVENT_TIMES, course.times.T, strict=True)
    return pa.table(columns).cast(EVENT_SCHEMA)
