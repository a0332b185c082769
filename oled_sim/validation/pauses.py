"""Predictions of runs whose copies go on while a policy decides.

On hardware a decision at a gate keeps every lane waiting but the copy under way. Clocks leave that
time out, yet a policy that prefetches gains by it: more copies end before they are needed. So its
prediction is given the pauses of the measured run, off the clock as there.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from oled_sim.engine.simulation import GroupRecord
from oled_sim.policy import Policy
from oled_sim.validation.measured import Point
from oled_sim.validation.predicted import Basis, Prediction, predict, require_requests
from oled_sim.validation.prepared import prepare
from oled_sim.validation.rows import event_rows, pass_rows


def pause_us_of(point: Point) -> float:
    """Return for how long a decision at a gate kept the lanes waiting, mean of a point, µs.

    It is 0 for policies that copy on demand only, whose copies have ended at every gate, and where
    it was not measured.
    """
    if not point.about.arrivals_recorded:
        return 0.0
    paused_us = point.passes["paused_us"].to_numpy()
    return float(np.nan_to_num(paused_us).sum()) / len(point.events)


def predict_point(point: Point, basis: Basis, policy: Policy) -> Prediction:
    """Simulate what a point measured, with its pauses in the measured requests.

    Raises:
        As :func:`oled_sim.validation.predicted.predict`.
    """
    pause_us = pause_us_of(point)
    if pause_us == 0:
        return predict(point.about, basis, policy)
    require_requests(point.about, basis.source)
    prepared = prepare(point.about, basis.source, policy, basis.costs)
    records = []
    for group, batch in prepared.again():
        batch.course.dense_us[:] += pause_us  # before the gate, where nothing but copies runs
        records.append(prepared.simulation.run_group(group, batch))
    layers = prepared.cut.geometry.layers
    return Prediction(
        passes=pa.concat_tables([_without_pauses(record, pause_us) for record in records]),
        events=pa.concat_tables([event_rows(record, layers) for record in records]),
        tokens={request: prepared.cut.output_tokens(request) for request in point.about.requests},
        prefetched=True,
    )


def _without_pauses(record: GroupRecord, pause_us: float) -> pa.Table:
    """Return the rows of passes; in the simulation pauses are the GPU's."""
    rows = pass_rows(record)
    paused_us = np.diff(record.course.pass_event) * pause_us
    for name in ("pass_us", "gpu_busy_us", "gpu_critical_us"):
        at = rows.schema.get_field_index(name)
        rows = rows.set_column(at, name, pa.array(rows[name].to_numpy() - paused_us))
    return rows
