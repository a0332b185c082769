"""What ``oled-sim reproduce`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from oled_sim.cli.tables import Row, print_notes, print_table, table_console
from oled_sim.scoreboard.claim import Judged
from oled_sim.scoreboard.text import (
    MARKS,
    counts,
    evidence_text,
    machines_of,
    stated_text,
    verdict_text,
)

NAMES = ("claim", "paper", "verdict", "synthetic", "real", "measured")


def print_board(board: Sequence[Judged]) -> None:
    """Print a row per claim, then how many came to each verdict; to stdout."""
    console, machines = table_console(), machines_of(board)
    rows: list[Row] = []
    for judged in board:
        found = [
            evidence_text(judged, e, machines, "\n") for e in ("synthetic", "real", "measured")
        ]
        stated = stated_text(judged.claim.stated, judged.claim.unit)
        rows.append([judged.claim.key, stated, verdict_text(judged, machines, "\n"), *found])
    print_table(console, NAMES, rows, left=NAMES)
    for machine in machines:
        found = counts(board, machine)
        totals = ", ".join(f"{number} {verdict.value}" for verdict, number in found.items())
        print_notes(console, [f"{machine or 'without costs'}: {totals}."])
    marks = ", ".join(f"{mark} {verdict.value}" for verdict, mark in MARKS.items())
    costs = " and ".join(machines)
    print_notes(console, [f"{marks}. Cells hold a figure under the costs of {costs}."])
