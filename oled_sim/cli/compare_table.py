"""The tables that ``oled-sim compare`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from oled_sim.cli.run_table import NOT_CAUSAL, milliseconds, percent, print_facts
from oled_sim.cli.tables import Row as Cells
from oled_sim.cli.tables import print_notes, print_table, table_console
from oled_sim.comparison import RESAMPLES, Row, sections

FEW = 20
"""With fewer requests an interval is rough, and the table says so."""


def print_comparison(
    headers: Mapping[str, dict[str, Any]],
    found: Mapping[str, Sequence[Row]],
    reference: str,
    seed: int,
) -> None:
    """Print what was run, then a table per trace and one for all together.

    Args:
        headers: by trace, what its results must say.
        found: rows by trace, or by what several traces are called together.
        reference: what the rows are relative to.
        seed: of the intervals.
    """
    console = table_console()
    for i, (name, rows) in enumerate(found.items()):
        if i > 0:
            console.print()
        if name in headers:
            print_facts(console, headers[name])
        else:
            pooled = f"{name}: requests of {', '.join(headers)} pooled"
            console.print(Text(pooled), soft_wrap=True)
        _print_rows(console, rows, reference)
        print_notes(console, [_interval(rows, seed)])
    print_notes(console, _legend(found, reference))


def _print_rows(console: Console, rows: Sequence[Row], reference: str) -> None:
    varied = _varied(rows)
    names = ["policy", "cache", *varied, "TPOT", f"× {reference}", "95 % interval", "util", "hit"]
    cells: list[Cells] = []
    for i, section in enumerate(sections(rows)):
        cells += [None] if i > 0 else []
        cells += [_cells(row, varied, reference) for row in section]
    names.append("reused")
    print_table(console, names, cells, keys=2 + len(varied), left=("policy",))


def _cells(row: Row, varied: Sequence[str], reference: str) -> list[str]:
    extra = [str(row.batch)] * ("batch" in varied)
    extra += [f"{row.link_gb_s:.3g}"] * ("GB/s" in varied)
    return [
        row.spec + ("" if row.causal else NOT_CAUSAL),
        f"{row.budget.cache}{' †' if row.own_budget else ''}",
        *extra,
        milliseconds(row.tpot_us),
        f"{row.tpot_ratio.value:.3f}",
        "" if row.spec == reference else _range(row),
        percent(row.utilization),
        percent(row.hit_rate, 2),
        percent(row.effective_transfer_ratio),
    ]


def _varied(rows: Sequence[Row]) -> list[str]:
    batches, links = {row.batch for row in rows}, {row.link_gb_s for row in rows}
    return ["batch"] * (len(batches) > 1) + ["GB/s"] * (len(links) > 1)


def _range(row: Row) -> str:
    low, high = row.tpot_ratio.low, row.tpot_ratio.high
    return "n/a" if low != low else f"{low:.3f} to {high:.3f}"


def _interval(rows: Sequence[Row], seed: int) -> str:
    """Say how many requests the intervals rest on."""
    requests = min(row.tpot_ratio.requests for row in rows)
    if requests < 2:
        return f"Intervals need two requests or more; here is {requests}."
    rough = "; so few make it rough" if requests < FEW else ""
    return (
        f"Interval: bootstrap over {requests} requests in pairs, {RESAMPLES:,} resamples, seed"
        f" {seed}{rough}."
    )


def _legend(found: Mapping[str, Sequence[Row]], reference: str) -> list[str]:
    lines = [
        f"cache: slots per MoE layer on average. TPOT: ms, mean over requests; × {reference}: over"
        f" that of {reference} with this cache. util: |R ∩ A| / slots; hit: |R ∩ A| / |A|; reused:"
        " demand transfers that are kept and activated in the layer's next event (effective"
        " transfer ratio)."
    ]
    if not all(row.causal for rows in found.values() for row in rows):
        lines.append(f"{NOT_CAUSAL} sees what is known only later; not achievable.")
    if any(row.own_budget for rows in found.values() for row in rows):
        lines.append("† ran with a budget of its own, and is compared with this cache.")
    return lines
