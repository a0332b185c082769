"""Whether hardware and simulator decided the same: event by event, or in sum where times decide.

What a policy that copies on demand only decides depends on no time, so every count must agree. What
a prefetching one finds at a gate depends on what has arrived by then: given the recorded order of
arrivals every count must agree, too, and of a run of its own the sums are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from oled_sim.engine.averages import ratio
from oled_sim.engine.state import EVENT_COUNTS, PASS_COUNTS
from oled_sim.validation.checks import EVENT_KEYS, PASS_KEYS
from oled_sim.validation.measured import Point
from oled_sim.validation.order import InOrder
from oled_sim.validation.predicted import Prediction

TIMED = ("staging_peak", "free_bytes")
"""Counts of an event that depend on when copies and kernels end, whatever was decided."""

EXACT = tuple(name for name in EVENT_COUNTS if name not in TIMED)


@dataclass(frozen=True)
class Decisions:
    """What was decided in a point's measured passes, prefill included.

    Attributes:
        prefetching: whether either side prefetched anything; then exact equality is not expected.
        events: compared, all repetitions. differing: of these, how many differ in a count.
        first_difference: where and what, empty if there is none.
        hits_error, bytes_error: (predicted - measured) / measured, of resident activated experts
            and of copied bytes; 0 where both are 0. Measured is the mean over repetitions.
        late_predicted, late_measured: prefetches in flight at the gate that needed them, as a share
            of activated experts.
        in_order: whether every count agrees in the recorded order of arrivals; None if nothing was
            prefetched, or no order recorded. first_out_of_order: where and what not.
    """

    prefetching: bool
    events: int
    differing: int
    first_difference: str
    hits_error: float
    bytes_error: float
    late_predicted: float
    late_measured: float
    in_order: bool | None = None
    first_out_of_order: str = ""

    @property
    def identical(self) -> bool:
        """Whether no count of any event or pass differs."""
        return not self.first_difference


def compare_decisions(
    point: Point, found: Prediction, in_order: InOrder | None = None
) -> Decisions:
    """Compare what was decided; the tables must have passed ``checks.check_tables``.

    ``in_order``: what the simulator decides in the recorded order of arrivals.
    """
    free = compare_tables(point.passes, point.events, found, point.about.repetitions)
    if in_order is None:
        return free
    _, of_events = _compared(in_order.events, point.events, EXACT, EVENT_KEYS)
    _, of_passes = _compared(in_order.passes, point.passes, PASS_COUNTS, PASS_KEYS)
    first = of_events or of_passes
    return replace(free, in_order=not first, first_out_of_order=first)


def compare_tables(
    passes: pa.Table, events: pa.Table, found: Prediction, repetitions: int = 1
) -> Decisions:
    """Compare measured tables, rows of ``repetitions`` runs in each, with a prediction."""
    n = repetitions
    differing, first = _compared(_repeated(found.events, n), events, EXACT, EVENT_KEYS)
    _, of_passes = _compared(_repeated(found.passes, n), passes, PASS_COUNTS, PASS_KEYS)
    hits = _sum(events, "hits") / n
    copied = _sum(passes, "copied_bytes") / n
    return Decisions(
        prefetching=found.prefetched or bool(_sum(passes, "prefetched")),
        events=len(events),
        differing=differing,
        first_difference=first or of_passes,
        hits_error=_error(_sum(found.events, "hits"), hits),
        bytes_error=_error(_sum(found.passes, "copied_bytes"), copied),
        late_predicted=ratio(_sum(found.events, "late"), _sum(found.events, "activated")),
        late_measured=ratio(_sum(events, "late"), _sum(events, "activated")),
    )


def _compared(
    predicted: pa.Table, measured: pa.Table, columns: Sequence[str], keys: Sequence[str]
) -> tuple[int, str]:
    """Return how many rows differ in some column, and the first difference."""
    order = [(key, "ascending") for key in keys]
    mine, theirs = predicted.sort_by(order), measured.sort_by(order)
    differs = _differs(mine, theirs, columns)
    return int(differs.any(axis=0).sum()), _first(mine, theirs, differs, columns, keys)


def _repeated(once: pa.Table, repetitions: int) -> pa.Table:
    """Return a prediction once per repetition."""
    number = once.schema.get_field_index("repetition")
    field = once.schema.field(number)
    return pa.concat_tables(
        [
            once.set_column(number, field, pa.array(np.full(len(once), i), field.type))
            for i in range(repetitions)
        ]
    )


def _differs(predicted: pa.Table, measured: pa.Table, columns: Sequence[str]) -> np.ndarray:
    """Return which counts differ, bool [columns, rows]."""
    return np.stack([predicted[c].to_numpy() != measured[c].to_numpy() for c in columns])


def _first(
    predicted: pa.Table,
    measured: pa.Table,
    differs: np.ndarray,
    columns: Sequence[str],
    keys: Sequence[str],
) -> str:
    rows = np.flatnonzero(differs.any(axis=0))
    if not len(rows):
        return ""
    row = int(rows[0])
    column = columns[int(np.argmax(differs[:, row]))]
    where = ", ".join(f"{_WORDS.get(k, k)} {measured[k][row].as_py()}" for k in keys)
    mine, theirs = predicted[column][row].as_py(), measured[column][row].as_py()
    return f"{where}: {column} {mine} predicted, {theirs} measured"


_WORDS = {"pass_index": "pass"}


def _sum(table: pa.Table, column: str) -> int:
    return int(table[column].to_numpy().sum())


def _error(predicted: float, measured: float) -> float:
    return 0.0 if predicted == measured else ratio(predicted - measured, measured)
