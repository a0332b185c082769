"""Tables of a profile, filled point by point."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from oled_sim.costs.profile import AXES, Curve, Grid
from oled_sim.hardware.measuring.timing import Clock, spread

Key = tuple[int, ...]
TimeAt = Callable[..., list[float]]
Progress = Callable[[str, int, int], None]
"""Told (what is measured, points done, points in all)."""
TIMES = ("median_us", "p10_us", "p90_us")


@dataclass
class Sweep:
    """The tables of one profile by name; they fill up as they are measured.

    A table that is measured again pools the samples of all times: what disturbs a machine for
    seconds then meets one of them. Points that take long are measured the first time alone.

    Attributes:
        clock: how points are timed.
        on_progress: called after every point.
        seconds: how long each step took, all times together.
    """

    clock: Clock
    on_progress: Progress = lambda *_: None
    tables: dict[str, Curve | Grid] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    _samples: dict[str, dict[Key, list[float]]] = field(default_factory=dict)

    def curve(self, name: str, points: Sequence[int], time_at: TimeAt) -> None:
        """Measure a table of one count; ``time_at(point)`` returns samples in µs."""
        found = self.visit(name, [(p,) for p in points], time_at)
        self.keep_curve(name, {p: found[(p,)] for p in points})

    def grid(
        self, name: str, rows: Sequence[int], columns: Sequence[int], time_at: TimeAt,
        rounds: int | None = None,
    ) -> None:  # fmt: skip
        """Measure a table of two counts; ``time_at(row, column)`` returns samples, or none.

        ``rounds``: over all points, by default the clock's.
        """
        found = self.visit(name, [(r, c) for r in rows for c in columns], time_at, rounds)
        self.keep_grid(name, rows, columns, found)

    def visit(
        self, name: str, keys: Sequence[Key], time_at: TimeAt, rounds: int | None = None
    ) -> dict[Key, list[float]]:
        """Visit all points in several rounds, and pool the samples of each."""
        first = len(keys) if name not in self._samples else 0
        samples = self._samples.setdefault(name, {key: [] for key in keys})
        rounds = rounds or self.clock.rounds
        with self.step(name):
            for i, key in enumerate([*keys] * rounds):
                found = samples[key]
                if i < first or self.clock.wants(found):
                    found += time_at(*key)
                self.on_progress(name, i + 1, len(keys) * rounds)
        return samples

    def keep_curve(self, name: str, samples: dict[int, list[float]]) -> None:
        """Make a table of samples by point, µs."""
        cells = [spread(found) for found in samples.values()]
        self.tables[name] = Curve(
            AXES[name][0],
            list(samples),
            [c.median for c in cells],
            [c.p10 for c in cells],
            [c.p90 for c in cells],
            [c.repeats for c in cells],
        )

    def keep_grid(
        self, name: str, rows: Sequence[int], columns: Sequence[int],
        samples: Mapping[Key, list[float]],
    ) -> None:  # fmt: skip
        """Make a table of samples by row and column, µs; cells without samples are nan."""
        cells = [[spread(s) if (s := samples[r, c]) else None for c in columns] for r in rows]
        first, second = AXES[name]
        self.tables[name] = Grid(
            (first, second),
            list(rows),
            list(columns),
            [[c.median if c else math.nan for c in row] for row in cells],
            [[c.p10 if c else math.nan for c in row] for row in cells],
            [[c.p90 if c else math.nan for c in row] for row in cells],
            [[c.repeats if c else 0 for c in row] for row in cells],
        )

    def fill_between_rows(self, name: str, between: Callable[[int, int], bool]) -> None:
        """Give the cells that ``between(row, column)`` is true of what lies between those measured.

        That is what a lookup would find there if the row were missing; they keep 0 repeats. Beyond
        the last row measured in a column they stay nan.
        """
        table = self.tables[name]
        assert isinstance(table, Grid)
        self.tables[name] = msgspec.structs.replace(
            table, **{of: _filled(table, getattr(table, of), between) for of in TIMES}
        )

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Note how long a step takes, and free the GPU's memory after it."""
        start = time.perf_counter()
        yield
        taken = self.seconds.get(name, 0.0) + time.perf_counter() - start
        self.seconds[name] = round(taken, 2)
        if self.clock.cuda:
            torch.cuda.empty_cache()


def _filled(
    table: Grid, cells: list[list[float]], between: Callable[[int, int], bool]
) -> list[list[float]]:
    """Return the cells of a grid with those between the rows of a column filled."""
    rows, times = np.array(table.rows, np.float64), np.array(cells)
    for j, column in enumerate(table.columns):
        known = ~np.isnan(times[:, j])
        for i in np.flatnonzero([between(row, column) for row in table.rows]):
            if known[i:].any():
                found = np.interp(rows[i], rows[known], times[known, j])
                times[i, j] = round(float(found), 3)
    return times.tolist()
