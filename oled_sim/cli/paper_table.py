"""The paper's figures 4, 7 and 10 beside traces: one table, for people or as Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import pandas as pd
from rich.console import Console
from rich.text import Text

from oled_sim.analysis.paper import why_missing
from oled_sim.analysis.text import style_value
from oled_sim.cli.tables import Row, print_notes, print_table

NAME_WIDTH = 10
"""Longer names of traces go over several lines, so that three traces fit 80 columns."""

LEGEND = (
    "paper: OLED-MoE, of LLaDA2.0-mini and flash; a word where it prints no number, - where it"
    " prints nothing. Experts, FLOPs, activated experts: means over denoise passes. Cosine, experts"
    " kept: means over pairs of passes of one block, prefill left out; next block: of the last"
    " pass of a block, those that the first of the next activates. Correlation: Pearson, of a"
    " token's confidence with the share of its experts that its next pass keeps, by what happened"
    " to the token in between; kept, confidence: that share. Definitions: docs/analyze.md."
)


class Line(NamedTuple):
    """One quantity. ``figure``: its letter too. ``cells``: mini, flash, then each trace."""

    figure: str
    section: str
    quantity: str
    cells: tuple[str, ...]


def traces_of(tables: dict[str, pd.DataFrame]) -> list[tuple[str, str]]:
    """Return name and origin of each trace, of the tables of ``analyze_traces``."""
    traces = tables["traces"]
    return list(zip(traces["trace"], traces["origin"], strict=True))


def lines(tables: dict[str, pd.DataFrame]) -> Iterator[Line]:
    """Yield every quantity, in the order of the paper; a value that is missing says why."""
    signals = dict(zip(tables["traces"]["trace"], tables["traces"]["signals"], strict=True))
    for key, rows in tables["paper"].groupby("key", sort=False):
        first = rows.iloc[0]
        values = (
            style_value(row["value"], row["style"])
            if pd.notna(row["value"])
            else why_missing(str(key), row["origin"], signals[row["trace"]].split())
            for row in rows.to_dict("records")
        )
        printed = (first["paper_mini"], first["paper_flash"])
        figure, section = first["source"].removeprefix("fig. ").split(", ")
        cells = (*("-" if pd.isna(p) else p for p in printed), *values)
        yield Line(figure, section, first["quantity"], cells)


def print_beside_paper(console: Console, tables: dict[str, pd.DataFrame]) -> None:
    """Print the table and its legend.

    Args:
        console: where to; traces that do not fit go into a further table below.
        tables: ``traces`` and ``paper`` of :func:`~oled_sim.analysis.report.analyze_traces`.
    """
    heads = ["\n".join([*textwrap.wrap(t, NAME_WIDTH), origin]) for t, origin in traces_of(tables)]
    rows: list[Row] = []
    for number, found in groupby(lines(tables), lambda line: line.figure.rstrip("abc")):
        group = list(found)
        sections = ", ".join(dict.fromkeys(line.section for line in group))
        rows += [None] * bool(rows)
        rows.append([f"Figure {number} ({sections})", *[""] * len(group[0].cells)])
        rows += [[f" {line.quantity}", *map(_folded, line.cells)] for line in group]
    names = ["", "paper\nmini", "paper\nflash", *heads]
    console.print(Text("Beside the paper", style="bold"), soft_wrap=True)
    print_table(console, names, rows, left=("",))
    print_notes(console, [LEGEND])


def _folded(cell: str) -> str:
    """Break the widest cells, those that say why there is no value."""
    return cell.replace("not ", "not\n")


def markdown_beside_paper(tables: dict[str, pd.DataFrame]) -> str:
    """Return the table as Markdown, without its legend; ``tables`` as above."""
    heads = [f"{trace} ({origin})" for trace, origin in traces_of(tables)]
    names = ["figure", "quantity", "paper, mini", "paper, flash", *heads]
    rows = [names, ["---"] * len(names)]
    rows += [
        [f"{line.figure}, {line.section}", line.quantity, *line.cells] for line in lines(tables)
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
