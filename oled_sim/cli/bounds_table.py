"""The tables that ``oled-sim bounds`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from oled_sim.bounds.report import LRU, Comparison, Row, gap
from oled_sim.cli.run_table import (
    budget_text,
    copies_per_pass,
    milliseconds,
    number,
    percent,
    print_facts,
)
from oled_sim.cli.tables import Row as Cells
from oled_sim.cli.tables import print_notes, print_table, table_console
from oled_sim.engine.budget import Budget
from oled_sim.engine.metrics import ratio

PROMISES = {
    "residency": "residents chosen anew, free, before every layer: most hits and least time",
    "hits": "most hits without prefetching; its TPOT is no bound",
    "split": "most hits with fixed shares of the total",
    "policy": "",
}
LEGEND = (
    "TPOT: ms, mean over requests. hit, hit all: |R ∩ A| / |A| of decode and of all passes. util:"
    " |R ∩ A| / slots. H2D: experts copied per decode pass, on demand or ahead; CPU: experts"
    " computed there. Gaps: hit rate that a policy lacks, in points, and its TPOT as a multiple of"
    " the bound's. A policy that moves slots between layers is bounded by one pool and by what"
    " shares the total; one that prefetches by none of the hit bounds (docs/bounds.md)."
)


def print_bounds(
    header: dict[str, Any], comparisons: Sequence[Comparison], console: Console | None = None
) -> None:
    """Print, for every budget, bounds and policies, then the gaps; by default to stdout."""
    console = console or table_console()
    print_facts(console, header)
    for comparison in comparisons:
        console.print()
        console.print(Text(f"Cache {_budget(comparison.budget)}", style="bold"))
        _print_figures(console, comparison)
        if comparison.most_hits_in_one_pool is not None:
            _print_fractional(console, comparison, comparison.most_hits_in_one_pool)
        if comparison.policies:
            _print_gaps(console, comparison)
        if comparison.least_work_us is not None:
            _print_work(console, comparison, comparison.least_work_us)
    print_notes(console, [LEGEND])


def _budget(budget: Budget) -> str:
    return budget_text(budget) + (" experts per layer" if budget.size_bytes is None else "")


def _print_figures(console: Console, comparison: Comparison) -> None:
    rows: list[Cells] = []
    for some in (comparison.bounds, comparison.policies):
        rows += [*map(_cells, some), None]
    names = ["bound or policy", "hit", "hit all", "util", "TPOT", "H2D", "CPU", "what it is"]
    print_table(console, names, rows, left=(names[0], names[-1]))


def _print_fractional(console: Console, comparison: Comparison, most: int) -> None:
    """Print what one pool can hit at most, where Belady's rule is a heuristic for it."""
    for row in comparison.bounds:
        if row.kind == "hits" and row.result.rules.scope == "global":
            hits, activations = row.work.hits, row.work.activations
            text = (
                f"Experts differ in size, so {row.name!r} is a heuristic: it hits {hits:,} of"
                f" {activations:,} in the whole run ({percent(ratio(hits, activations), 2)}); no"
                f" policy without prefetching can hit more than {most:,}"
                f" ({percent(ratio(most, activations), 2)}, a fractional bound)."
            )
            print_notes(console, [text])
            console.print()


def _cells(row: Row) -> tuple[str, ...]:
    summary = row.result.summary
    what = PROMISES[row.kind]
    if row.name == LRU:
        what = "best fixed shares for LRU, chosen with hindsight; no bound for others"
    return (
        row.name,
        percent(summary.hit_rate, 2),
        percent(summary.hit_rate_with_prefill, 2),
        percent(summary.utilization, 1),
        milliseconds(summary.tpot_us),
        number(copies_per_pass(summary), 1),
        number(summary.cpu_per_pass, 1),
        what,
    )


def _print_gaps(console: Console, comparison: Comparison) -> None:
    rows: list[Cells] = []
    for bound in comparison.bounds:
        gaps = (gap(row, bound) for row in comparison.policies)
        cells = (f"{number(100 * g.hit_rate, 2)} pt  ×{number(g.tpot, 2)}" for g in gaps)
        rows.append([bound.name, *cells])
    names = ["gap to", *(row.name for row in comparison.policies)]
    print_table(console, names, [*rows, None], left=("gap to",))


def _print_work(console: Console, comparison: Comparison, least_us: float) -> None:
    """Print what copies and CPU experts of the request add up to, beside the least possible."""
    own = [r for r in comparison.bounds if r.kind == "hits" and r.result.rules.scope == "layer"]
    rows = [["least possible", "", "", milliseconds(least_us), ""]]
    for row in (*own, *comparison.policies):
        times = map(milliseconds, (row.copies_us, row.cpu_us, row.work_us))
        rows.append([row.name, *times, number(ratio(row.work_us, least_us), 2)])
    names = ["work for misses, ms", "copies", "CPU", "sum", "× least"]
    print_table(console, names, rows, left=names[:1])
    what = "Least possible: with one pool per layer and equal shares, from an empty cache."
    print_notes(console, [what])
