"""Whether hardware and simulator decided the same: event by event, or in sum where times decide.

What a policy that copies on demand only decides depends on no time, so every count must agree. What
a prefetching one finds at a gate depends on what has arrived by then; its sums are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from oled_sim.engine.averages import ratio
from oled_sim.engine.state import EVENT_COUNTS, PASS_COUNTS
from oled_sim.validation.checks import EVENT_KEYS, PASS_KEYS
from oled_sim.validation.measured import Point
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
    """

    prefetching: bool
    events: int
    differing: int
    first_difference: str
    hits_error: float
    bytes_error: float
    late_predicted: float
    late_measured: float

    @property
    def identical(self) -> bool:
        """Whether no count of any event or pass differs."""
        return not self.first_difference


def compare_decisions(point: Point, found: Prediction) -> Decisions:
    """Compare what was decided; the tables must have passed ``checks.check_tables``."""
    return compare_tables(point.passes, point.events, found, point.about.repetitions)


def compare_tables(
    passes: pa.Table, events: pa.Table, found: Prediction, repetitions: int = 1
) -> Decisions:
    """Compare measured tables, rows of ``repetitions`` runs in each, with a prediction."""
    n = repetitions
    predicted = _repeated(found.events, n, EVENT_KEYS)
    measured = events.sort_by([(key, "ascending") for key in EVENT_KEYS])
    differs = _differs(predicted, measured, EXACT)
    first = _first(predicted, measured, differs, EXACT, EVENT_KEYS)
    of_passes = _of_passes(passes, found, n)
    hits = _sum(events, "hits") / n
    copied = _sum(passes, "copied_bytes") / n
    return Decisions(
        prefetching=found.prefetched or bool(_sum(passes, "prefetched")),
        events=len(measured),
        differing=int(differs.any(axis=0).sum()),
        first_difference=first or of_passes,
        hits_error=_error(_sum(found.events, "hits"), hits),
        bytes_error=_error(_sum(found.passes, "copied_bytes"), copied),
        late_predicted=ratio(_sum(found.events, "late"), _sum(found.events, "activated")),
        late_measured=ratio(_sum(events, "late"), _sum(events, "activated")),
    )


def _of_passes(passes: pa.Table, found: Prediction, repetitions: int) -> str:
    predicted = _repeated(found.passes, repetitions, PASS_KEYS)
    measured = passes.sort_by([(key, "ascending") for key in PASS_KEYS])
    differs = _differs(predicted, measured, PASS_COUNTS)
    return _first(predicted, measured, differs, PASS_COUNTS, PASS_KEYS)


def _repeated(table: pa.Table, repetitions: int, keys: Sequence[str]) -> pa.Table:
    """Return a prediction once per repetition, sorted by its keys."""
    once = table.sort_by([(key, "ascending") for key in keys])
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
