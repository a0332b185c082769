"""The scoreboard as a table: one row per claim, evidence and machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa

from oled_sim.scoreboard.claim import Judged

SCHEMA = pa.schema(
    [
        ("key", pa.string()),
        ("section", pa.string()),
        ("claim", pa.string()),
        ("unit", pa.string()),
        ("paper_text", pa.string()),
        ("paper_low", pa.float64()),
        ("paper_high", pa.float64()),
        ("no_effect", pa.float64()),
        ("evidence", pa.string()),
        ("machine", pa.string()),
        ("value", pa.float64()),
        ("low", pa.float64()),
        ("high", pa.float64()),
        ("requests", pa.int64()),
        ("verdict", pa.string()),
        ("why", pa.string()),
    ]
)


def board_table(board: Iterable[Judged]) -> pa.Table:
    """Return every reading, and a row without evidence for a claim that has none."""
    return pa.Table.from_pylist([row for judged in board for row in _rows(judged)], schema=SCHEMA)


def _rows(judged: Judged) -> Iterator[dict[str, Any]]:
    claim = judged.claim
    about = {
        "key": claim.key,
        "section": claim.section,
        "claim": claim.text,
        "unit": claim.unit,
        "paper_text": claim.stated.text,
        "paper_low": claim.stated.low,
        "paper_high": claim.stated.high,
        "no_effect": claim.stated.no_effect,
        "why": judged.why,
    }
    for reading in judged.readings:
        found = reading.estimate
        yield about | {
            "evidence": reading.evidence,
            "machine": reading.machine,
            "value": found.value,
            "low": found.low,
            "high": found.high,
            "requests": found.requests,
            "verdict": reading.verdict.value,
        }
    if not judged.readings:
        yield about | {"verdict": judged.verdict("").value}
