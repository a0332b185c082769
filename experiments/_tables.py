"""What tables of policies have in common: as Markdown, as data, and on a command line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import pyarrow as pa

from oled_sim.cli.files import TABLE, check_files
from oled_sim.cli.grids import encode
from oled_sim.cli.options import options
from oled_sim.comparison import Row
from oled_sim.engine.output import NewFile
from oled_sim.engine.results import write_table
from oled_sim.errors import OledSimError

TRACES = ("nano-gsm8k", "nano-humaneval")
NOT_CAUSAL = r" \*"


class Measured(NamedTuple):
    """What was measured.

    ``headers``: by trace, what its results must say. ``rows``: by trace, by cache, policies in the
    order asked for, each relative to the same reference with this cache.
    """

    headers: dict[str, dict[str, Any]]
    rows: dict[str, list[Row]]


def tidy(found: Measured) -> pa.Table:
    """Return one row per trace, policy and cache: times in µs, shares from 0 to 1."""
    return pa.Table.from_pylist(
        [
            {
                "trace": trace,
                "policy": row.spec,
                "cache": row.budget.cache,
                "causal": row.causal,
                "own_budget": row.own_budget,
                "tpot_us": row.tpot_us,
                "tpot_ratio": row.tpot_ratio.value,
                "low": row.tpot_ratio.low,
                "high": row.tpot_ratio.high,
                "requests": row.tpot_ratio.requests,
                "hit_rate": row.hit_rate,
                "utilization": row.utilization,
            }
            for trace, rows in found.rows.items()
            for row in rows
        ]
    )


def sections(found: Measured, reference: str) -> list[str]:
    """Return Markdown for each trace: what was run, and a table of policies by cache."""
    return [
        f"**{trace}**: {found.headers[trace]['routing_geometry']['experts']} experts per layer,"
        f" {rows[0].tpot_ratio.requests} counted requests, profile"
        f" {found.headers[trace]['profile']['name']}.\n\n{_table(rows, reference)}"
        for trace, rows in found.rows.items()
    ]


def _table(rows: Sequence[Row], reference: str) -> str:
    caches = list(dict.fromkeys(row.budget.cache for row in rows))
    cells = {(row.spec, row.budget.cache): time_and_shares(row, reference) for row in rows}
    names = {row.spec: "" if row.causal else NOT_CAUSAL for row in rows}
    lines = ["| | " + " | ".join(f"C = {c}" for c in caches) + " |", "|---" * len(caches) + "|---|"]
    lines += [
        f"| `{name}`{mark} | " + " | ".join(cells[name, c] for c in caches) + " |"
        for name, mark in names.items()
    ]
    return "\n".join(lines)


def time_and_shares(row: Row, reference: str) -> str:
    """Return TPOT, of the reference in ms and else relative to it, above hit rate and utilization.

    Relative ones have the interval over requests; shares are in %.
    """
    ratio = row.tpot_ratio
    time = f"{ratio.value:.3f}"
    if ratio.low == ratio.low:  # not NaN
        time += f" ({ratio.low:.3f}–{ratio.high:.3f})"
    if row.spec == reference:
        time = f"{row.tpot_us / 1000:.2f} ms"
    without_slots = row.utilization != row.utilization
    utilization = "–" if without_slots else f"{row.utilization * 100:.1f}"
    return f"{time}<br>{row.hit_rate * 100:.1f}, {utilization}"


def table_options(caches: str) -> Callable[[Any], Any]:
    """Return a decorator that adds what a script of a table can be asked for."""
    return options(
        click.option(
            "--trace",
            "traces",
            multiple=True,
            default=TRACES,
            show_default=True,
            metavar="TRACE",
            help="Name or folder; repeatable.",
        ),
        click.option(
            "--cache",
            "caches",
            multiple=True,
            default=[caches],
            show_default=True,
            metavar="C",
            help="Experts per layer; repeatable.",
        ),
        click.option(
            "--requests",
            type=click.IntRange(min=1),
            metavar="N",
            help="Only the first N of each trace.",
        ),
        click.option(
            "--jobs",
            type=click.IntRange(min=1),
            metavar="N",
            help="Runs at the same time. Default: as many as cores.",
        ),
        click.option("--json", "as_json", is_flag=True, help="Print rows as JSON, not tables."),
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Write the tables as .md, or all rows as .csv or .parquet.",
        ),
        click.option("--force", is_flag=True, help="Overwrite a file that exists."),
    )


def run_script(
    measure: Callable[..., Measured],
    markdown: Callable[[Measured], str],
    *,
    as_json: bool,
    out: Path | None,
    force: bool,
    **asked: Any,
) -> None:
    """Measure, write and print; a user's mistake ends it with one sentence and its exit code."""
    try:
        check_files({"--out": out}, forms={"--out": (*TABLE, ".md")}, force=force)
        found = measure(**asked)
        if out is not None:
            _write(out, found, markdown)
    except OledSimError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    if as_json:
        click.echo(encode({"runs": found.headers, "rows": tidy(found).to_pylist()}))
    else:
        click.echo(markdown(found), nl=False)


def _write(path: Path, found: Measured, markdown: Callable[[Measured], str]) -> None:
    if path.suffix == ".md":
        with NewFile(path) as file:
            file.temporary.write_text(markdown(found), encoding="utf-8")
    else:
        write_table(path, tidy(found), {"runs": found.headers})
