"""Tables for tests of the cost model."""

from __future__ import annotations

from oled_sim.costs.profile import Grid


def grid(axes: tuple[str, str], rows: list[int], columns: list[int], times: list) -> Grid:
    """A table whose spread is its median; nan becomes a cell that was not measured."""
    repeats = [[0 if t != t else 1 for t in row] for row in times]
    return Grid(
        axes=axes,
        rows=rows,
        columns=columns,
        median_us=times,
        p10_us=times,
        p90_us=times,
        repeats=repeats,
    )
