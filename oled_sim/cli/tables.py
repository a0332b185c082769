"""Tables on a console, in which no figure is ever shortened.

rich shrinks the columns of a table that is wider than the terminal, and cuts off digits. Here a
column is as wide as what it holds; columns that do not fit go into further tables below, each
with the first columns again, which say what a row is about.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.text import Text

GAP = 2
"""Spaces between columns."""

WIDTH_WITHOUT_TERMINAL = 1_000_000
"""A file or a pipe takes lines of any length: there a row is always one line."""

PROSE_WIDTH = 100

Row = Sequence[str] | None
"""The cells of a row, or None for an empty line between groups of rows."""


def table_console() -> Console:
    """Return a console on stdout; where there is no terminal its lines may be of any length."""
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    return Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def prose_console() -> Console:
    """Return a console on stdout for tables that hold prose, which folds to a line's length."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PROSE_WIDTH)


def print_table(
    console: Console,
    names: Sequence[str],
    rows: Sequence[Row],
    *,
    keys: int = 1,
    left: Collection[str] = (),
) -> None:
    """Print a table, or several below each other where the console is too narrow for one.

    Args:
        console: where to.
        names: of the columns, the most important ones first.
        rows: a cell per column, or None for an empty line. Names and cells may have several lines.
        keys: how many of the first columns say what a row is about; every table has them.
        left: names of columns with text, aligned left; others are figures.
    """
    widths = [
        max(cell_len(line) for cell in column for line in cell.split("\n"))
        for column in zip(names, *filter(None, rows), strict=True)
    ]
    for i, columns in enumerate(_parts(widths, keys, console.width)):
        if i > 0:
            console.print()
        lefts = [names[n] in left for n in columns]
        for k, row in enumerate([names, *rows]):
            for cells in _physical([] if row is None else [row[n] for n in columns], bottom=k == 0):
                line = _line(cells, [widths[n] for n in columns], lefts)
                console.print(Text(line, style="" if k else "bold"), soft_wrap=True)


def _parts(widths: Sequence[int], keys: int, width: int) -> list[list[int]]:
    """Return the columns of each table: as many as fit in ``width``, but at least one more."""
    first = list(range(keys))
    start = sum(widths[:keys]) + GAP * (keys - 1)
    parts, used = [first], start
    for n in range(keys, len(widths)):
        if used + GAP + widths[n] > width and len(parts[-1]) > keys:
            parts, used = [*parts, first], start
        parts[-1] = [*parts[-1], n]
        used += GAP + widths[n]
    return parts


def _physical(cells: Sequence[str], *, bottom: bool) -> list[list[str]]:
    """Return the lines of a row; a cell with fewer stands at the ``bottom``, or at the top."""
    lines = [cell.split("\n") for cell in cells]
    height = max(map(len, lines), default=1)
    blank = [[""] * (height - len(cell)) for cell in lines]
    whole = [b + c if bottom else c + b for b, c in zip(blank, lines, strict=True)]
    return [[cell[k] for cell in whole] for k in range(height)]


def _line(cells: Sequence[str], widths: Sequence[int], lefts: Sequence[bool]) -> str:
    padded = []
    for cell, width, left in zip(
        cells, widths if cells else (), lefts if cells else (), strict=True
    ):
        space = " " * (width - cell_len(cell))
        padded.append(cell + space if left else space + cell)
    return (" " * GAP).join(padded).rstrip()


def print_notes(console: Console, notes: Iterable[str]) -> None:
    """Print what explains a table, a paragraph per note, in lines that the eye can follow."""
    for note in notes:
        for line in textwrap.wrap(note, min(console.width, PROSE_WIDTH), break_long_words=False):
            console.print(Text(line, style="dim"), soft_wrap=True)


def print_whole(console: Console, blocks: Sequence[RenderableType]) -> None:
    """Print rich's own tables with every column that must not fold at its full width.

    A terminal that is narrower wraps the lines; a file or a pipe gets no blanks at their ends.
    """
    loose = console.options.update(width=WIDTH_WITHOUT_TERMINAL)
    needed = max(Measurement.get(console, loose, block).minimum for block in blocks)
    console.width = max(console.width, needed)
    with console.capture() as capture:
        for block in blocks:
            console.print(block)
    text = capture.get()
    if not console.is_terminal:
        text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
    console.file.write(text)
