"""In which order a replay prefetched, as a table; and the simulator's decisions in that order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from oled_sim.engine.arrivals import Moment, RecordedPace, Step
from oled_sim.validation.measured import ORDER_SCHEMA
from oled_sim.validation.rows import event_rows, pass_rows

if TYPE_CHECKING:
    from oled_sim.engine.simulation import GroupRecord
    from oled_sim.validation.prepared import Prepared


def arrival_rows(
    moments: Sequence[Moment], record: GroupRecord, layers: Sequence[int], repetition: int
) -> pa.Table:
    """Return the steps of one request as rows, columns ``ORDER_SCHEMA``.

    Args:
        moments: in order, layers counted from 0.
        record: of the request. layers: the model's own indices.
        repetition: number of the run.
    """
    found = np.array(moments, np.int64).reshape(-1, 3)
    own = np.append(np.array(layers), -1)
    columns = {
        "repetition": np.full(len(found), repetition),
        "request": np.full(len(found), record.batch.members[0].trace.request),
        "step": found[:, 0],
        "layer": own[found[:, 1]],
        "expert": found[:, 2],
    }
    return pa.table(columns).cast(ORDER_SCHEMA)


def has_prefetches(order: pa.Table) -> bool:
    """Whether anything was prefetched."""
    return int(Step.START) in order["step"].unique().to_pylist()


def moments_of(
    order: pa.Table, repetition: int, request: int, layers: Sequence[int]
) -> list[Moment]:
    """Return the steps of one request in one repetition, layers counted from 0."""
    mine = (pc.field("repetition") == repetition) & (pc.field("request") == request)
    rows = order.filter(mine)
    number = {layer: i for i, layer in enumerate(layers)} | {-1: -1}
    return [
        Moment(step, number.get(layer, -1), expert)
        for step, layer, expert in zip(
            *(rows[name].to_pylist() for name in ("step", "layer", "expert")), strict=True
        )
    ]


@dataclass(frozen=True)
class InOrder:
    """What the simulator decides in the recorded order, as tables like the measured ones."""

    passes: pa.Table
    events: pa.Table


def decide_in_order(prepared: Prepared, order: pa.Table, repetitions: int, name: str) -> InOrder:
    """Run all repetitions of a point in the order in which hardware did things.

    Args:
        prepared: the point, ready to run.
        order: columns ``ORDER_SCHEMA``.
        repetitions: how many.
        name: of the point, for errors.

    Raises:
        MeasurementError: the order does not fit what is decided.
    """
    simulation, layers = prepared.simulation, prepared.cut.geometry.layers
    passes, events = [], []
    for repetition in range(repetitions):
        for group, batch in prepared.again():
            request = batch.members[0].trace.request
            moments = moments_of(order, repetition, request, layers)
            simulation.pace = pace = RecordedPace(moments, name)
            try:
                record = simulation.run_group(group, batch)
            finally:
                simulation.pace = None
            pace.leave()
            simulation.forget_copies()
            passes.append(pass_rows(record, repetition=repetition))
            events.append(event_rows(record, layers, repetition=repetition))
    return InOrder(pa.concat_tables(passes), pa.concat_tables(events))
