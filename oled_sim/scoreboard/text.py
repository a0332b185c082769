"""The scoreboard in Markdown."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from oled_sim.scoreboard.claim import Evidence, Judged, Reading
from oled_sim.scoreboard.verdict import Stated, Verdict

MARKS = {
    Verdict.REPRODUCED: "●",
    Verdict.IN_DIRECTION: "◐",
    Verdict.NOT_REPRODUCED: "○",
    Verdict.BY_CONSTRUCTION: "□",
    Verdict.NOT_TESTABLE: "–",
}

HEAD = (
    "| § | claim | paper | synthetic | real | measured | verdict | why |",
    "|---|---|---|---|---|---|---|---|",
)


def machines_of(board: Sequence[Judged]) -> list[str]:
    """Return the machines whose costs were used, in order of appearance; at least one."""
    found = (r.machine for judged in board for r in judged.readings if r.machine)
    return list(dict.fromkeys(found)) or [""]


def counts(board: Sequence[Judged], machine: str) -> dict[Verdict, int]:
    """Return how many claims came to each verdict under a machine's costs."""
    found = Counter(judged.verdict(machine) for judged in board)
    return {verdict: found[verdict] for verdict in Verdict}


class Coverage(NamedTuple):
    """How much of an experiment a table holds: its ``points``, ``of`` so many of the whole grid."""

    experiment: str
    points: int
    of: int


def markdown(board: Sequence[Judged], coverage: Iterable[Coverage] = ()) -> str:
    """Return the scoreboard: how many of each verdict, a row per claim, what it was read from.

    Cells hold a figure per machine, in the order of the first table.
    """
    machines = machines_of(board)
    lines = [*_summary(board, machines), "", *HEAD, *_rows(board, machines)]
    return "\n".join([*lines, *_coverage(coverage)]) + "\n"


def _coverage(coverage: Iterable[Coverage]) -> Iterator[str]:
    """Yield which part of each grid had been measured."""
    found = [f"{c.experiment} {c.points:,} of {c.of:,}" for c in coverage]
    if found:
        yield ""
        yield f"Points that had been measured, of the grids: {', '.join(found)}."


def _summary(board: Sequence[Judged], machines: Sequence[str]) -> Iterator[str]:
    yield "| costs of | " + " | ".join(f"{mark} {v.value}" for v, mark in MARKS.items()) + " |"
    yield "|---|" + "---:|" * len(MARKS)
    for machine in machines:
        found = counts(board, machine)
        yield f"| {machine or '-'} | " + " | ".join(str(found[v]) for v in MARKS) + " |"


def _rows(board: Sequence[Judged], machines: Sequence[str]) -> Iterator[str]:
    for judged in board:
        claim = judged.claim
        cells = [
            claim.section,
            claim.text,
            stated_text(claim.stated, claim.unit),
            *(evidence_text(judged, e, machines) for e in ("synthetic", "real", "measured")),
            verdict_text(judged, machines),
            judged.why,
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def verdict_text(judged: Judged, machines: Sequence[str], separator: str = "<br>") -> str:
    """Return the verdicts by machine, one if they agree."""
    found = list(dict.fromkeys(judged.verdict(machine) for machine in machines))
    if len(found) == 1:
        return found[0].value
    return separator.join(f"{judged.verdict(m).value} ({m})" for m in machines)


def evidence_text(
    judged: Judged, evidence: Evidence, machines: Sequence[str], separator: str = "<br>"
) -> str:
    """Return our figures on some evidence, one per machine; one if no machine has a part."""
    found = [judged.of(evidence, machine) for machine in machines]
    kept = list(dict.fromkeys(r for r in found if r is not None))
    return separator.join(reading_text(r, judged.claim.unit) for r in kept)


def reading_text(reading: Reading, unit: str) -> str:
    """Return a figure with its interval and the mark of its verdict."""
    found = reading.estimate
    interval = ""
    if not math.isnan(found.low):
        between = " to " if found.low < 0 else "–"
        interval = f" ({figure(found.low)}{between}{figure(found.high)})"
    return f"{figure(found.value)}{_with(unit)}{interval} {MARKS[reading.verdict]}"


def stated_text(stated: Stated, unit: str) -> str:
    """Return what the paper states."""
    if stated.text:
        return stated.text
    if stated.low == stated.high:
        return f"{figure(stated.low)}{_with(unit)}"
    if math.isinf(stated.low):
        return f"≤ {figure(stated.high)}{_with(unit)}"
    if math.isinf(stated.high):
        return f"> {figure(stated.low)}{_with(unit)}"
    return f"{figure(stated.low)}–{figure(stated.high)}{_with(unit)}"


def _with(unit: str) -> str:
    return unit if unit in ("", "×") else f" {unit}"


def figure(value: float) -> str:
    """Return a number with three significant digits, and a true minus sign."""
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2
    text = f"{size:.{digits}f}"
    return f"−{text}" if value < 0 and float(text) != 0 else text
