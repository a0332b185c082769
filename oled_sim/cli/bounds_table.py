"""The tables that ``oled-sim bounds`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oled_sim.bounds.report import LRU, Comparison, Row, gap
from oled_sim.cli.run_table import WIDTH_WITHOUT_TERMINAL, _number, facts, milliseconds, percent
from oled_sim.engine.budget import Budget
from oled_sim.engine.metrics import ratio

PROMISES = {
    "residency": "residents chosen anew, free, before every layer: most hits and least time",
    "hits": "most hits without prefetching; its TPOT is no bound",
    "split": "most hits with fixed shares of the total",
    "policy": "",
}
LEGEND = """\
TPOT: ms, mean over requests. hit, hit all: |R ∩ A| / |A| of decode and of all passes. util: |R ∩ A|
/ slots. H2D, CPU: experts per decode pass. Gaps: hit rate that a policy lacks, in points, and its
TPOT as a multiple of the bound's. A policy that moves slots between layers is bounded by one pool
and by what shares the total; one that prefetches by none of the hit bounds (docs/bounds.md)."""


def print_bounds(header: dict[str, Any], comparisons: Sequence[Comparison]) -> None:
    """Print, for every budget, bounds and policies, and then the gaps between them."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_WITHOUT_TERMINAL)
    for name, value in facts(header).items():
        console.print(Text(f"{name:<9}{value}"), soft_wrap=True, highlight=False)
    for comparison in comparisons:
        console.print()
        console.print(Text(f"Cache {_budget(comparison.budget)}", style="bold"))
        console.print(_figures(comparison))
        if comparison.most_hits_in_one_pool is not None:
            _print_fractional(console, comparison, comparison.most_hits_in_one_pool)
        if comparison.policies:
            console.print(_gaps(comparison))
        if comparison.least_work_us is not None:
            _print_work(console, comparison, comparison.least_work_us)
    console.print(Text(LEGEND), style="dim", highlight=False)


def _budget(budget: Budget) -> str:
    if budget.size_bytes is None:
        return f"{budget.cache} experts per layer"
    return f"{budget.size_bytes / 2**20:.4g} MiB"


def _figures(comparison: Comparison) -> Table:
    table = Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("bound or policy")
    for name in ("hit", "hit all", "util", "TPOT", "H2D", "CPU"):
        table.add_column(name, justify="right")
    table.add_column("what it is")
    for rows in (comparison.bounds, comparison.policies):
        for row in rows:
            table.add_row(*map(Text, _cells(row)))
        table.add_row()
    return table


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
            console.print(Text(text), highlight=False)
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
        _number(summary.demand_per_pass, 1),
        _number(summary.cpu_per_pass, 1),
        what,
    )


def _gaps(comparison: Comparison) -> Table:
    table = Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("gap to")
    for row in comparison.policies:
        table.add_column(row.name, justify="right")
    for bound in comparison.bounds:
        gaps = (gap(row, bound) for row in comparison.policies)
        cells = (f"{_number(100 * g.hit_rate, 2)} pt  ×{_number(g.tpot, 2)}" for g in gaps)
        table.add_row(Text(bound.name), *map(Text, cells))
    table.add_row()
    return table


def _print_work(console: Console, comparison: Comparison, least_us: float) -> None:
    """Print what copies and CPU experts of the request add up to, beside the least possible."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("work for misses, ms")
    for name in ("copies", "CPU", "sum", "× least"):
        table.add_column(name, justify="right")
    rows = [r for r in comparison.bounds if r.kind == "hits" and r.result.rules.scope == "layer"]
    table.add_row("least possible", "", "", milliseconds(least_us), "")
    for row in (*rows, *comparison.policies):
        times = (row.copies_us, row.cpu_us, row.work_us)
        table.add_row(
            Text(row.name), *map(milliseconds, times), _number(ratio(row.work_us, least_us), 2)
        )
    console.print(table)
    console.print(
        Text("Least possible: with one pool per layer and equal shares, from an empty cache."),
        style="dim",
    )
