"""``oled-sim trace``: look into a trace, or check every byte of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.bar import Bar
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from oled_sim.cli.share_progress import share_progress
from oled_sim.cli.tables import print_whole, prose_console
from oled_sim.errors import TraceError
from oled_sim.importing import counted
from oled_sim.plugin_options import MOST_NUMBER
from oled_sim.trace.manifest import Manifest
from oled_sim.trace.reader import Trace, open_trace
from oled_sim.trace.reblock import reblock_trace
from oled_sim.trace.stats import TraceStatistics, trace_statistics

BAR_WIDTH = 32

INFO_EPILOG = """\b
Examples:
  oled-sim trace info my-trace
  oled-sim trace info my-trace --json | python -m json.tool
"""

VALIDATE_EPILOG = """\b
Example:
  oled-sim trace validate my-trace
"""

REBLOCK_EPILOG = """\b
Example:
  oled-sim trace reblock qwen --as-blocks 16 --out qwen-blocks
"""


@click.group()
def trace() -> None:
    """Look into a trace, or check it."""


@trace.command(epilog=INFO_EPILOG)
@click.argument("source", metavar="PATH_OR_NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def info(source: str, as_json: bool) -> None:
    """Show what a trace holds and how local its routing is.

    PATH_OR_NAME is a trace directory, or the name of a trace that ships with oled-sim.
    """
    found = open_trace(source)
    with _progress("Reading", found) as requests:
        statistics = trace_statistics(requests, found.geometry)
    if as_json:
        click.echo(msgspec.json.encode(_as_json(found, statistics)))
    else:
        _print_info(prose_console(), found, statistics)


@trace.command(epilog=VALIDATE_EPILOG)
@click.argument("source", metavar="PATH_OR_NAME")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def validate(source: str, as_json: bool) -> None:
    """Check checksums, columns and every rule of the format, over all requests.

    Exit code 0: the trace is whole. Exit code 1: it is not; every damaged request is listed.
    """
    found = open_trace(source)
    problems = _problems(found)
    if as_json:
        report = {"path": str(found.path), "ok": not problems, "problems": problems}
        click.echo(msgspec.json.encode(report))
    else:
        click.echo("".join(f"{problem}\n" for problem in problems), nl=False)
    if problems:
        raise TraceError(f"{found.label}: {len(problems)} of {len(found)} requests damaged")
    if not as_json:
        requests = counted(len(found), "request")
        click.echo(f"{found.label}: {requests}, {_size(found.manifest)}, no problem")


@trace.command(epilog=REBLOCK_EPILOG)
@click.argument("source", metavar="PATH_OR_NAME")
@click.option(
    "--as-blocks",
    "length",
    type=click.IntRange(2, MOST_NUMBER),
    required=True,
    metavar="N",
    help="Tokens of a block.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Directory of the new trace.",
)
@click.option("--overwrite", is_flag=True, help="Replace a trace that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def reblock(source: str, length: int, out: Path, overwrite: bool, as_json: bool) -> None:
    """Put the passes of an autoregressive trace together to blocks of N tokens.

    A pass then activates the union of its tokens' experts, as one of a diffusion model does.
    docs/importing.md says what such a trace can show.
    """
    found = open_trace(source)
    with share_progress(f"Cutting {found.label} into blocks") as on_progress:
        made = reblock_trace(found, out, length, overwrite=overwrite, on_progress=on_progress)
    passes = sum(r.passes for r in made.requests)
    if as_json:
        values = {"out": str(out), "requests": len(made.requests), "passes": passes}
        click.echo(msgspec.json.encode(values))
    else:
        requests = counted(len(made.requests), "request")
        click.echo(f"{out}: {requests} in {counted(passes, 'pass', 'passes')}, {_size(made)}")


def _problems(found: Trace) -> list[str]:
    problems = []
    with _progress("Checking", found, read=False) as numbers:
        for number in numbers:
            try:
                found.read(number)
            except TraceError as error:
                problems.append(str(error))
    return problems


@contextmanager
def _progress(label: str, found: Trace, *, read: bool = True) -> Iterator[Iterator[Any]]:
    """Yield requests, or their numbers, under a progress bar on a terminal's stderr."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        numbers = progress.track(found.requests, description=label)
        yield (found.read(number) for number in numbers) if read else iter(numbers)


def _print_info(console: Console, found: Trace, statistics: TraceStatistics) -> None:
    tables = [
        _facts_table(found),
        _passes_table(statistics),
        _activated_table(found, statistics),
        _locality_table(statistics),
    ]
    if "token_state" in found.signals:
        tables.append(_stability_table(statistics))
    for table in tables:
        for column in table.columns:
            column.no_wrap = table is not tables[0]  # figures stay whole; facts are prose
    print_whole(console, tables)


def _facts_table(found: Trace) -> Table:
    table = Table(title=Text(found.label), show_header=False, title_justify="left")
    for name, value in _facts(found.manifest).items():
        table.add_row(name, Text(value))  # names may hold markup
    return table


def _facts(manifest: Manifest) -> dict[str, str]:
    model, requests = manifest.model, manifest.requests
    layers = f"{len(model.layers)} MoE layers ({model.layers[0]}..{model.layers[-1]})"
    facts = {
        "origin": f"{manifest.origin}, recorded by {manifest.runtime.name}",
        "model": model.name,
        "routing geometry": f"{layers}, {model.experts} experts, top-{model.top_k}",
        "stands for": manifest.stands_for or "-",
        "decoding": _decoding(manifest),
        "signals": ", ".join(manifest.signals) + (" (ragged)" if manifest.ragged else ""),
        "prompts": manifest.prompts.source or "-",
        "requests": f"{len(requests)}, {sum(r.prompt_tokens for r in requests):,} prompt and"
        f" {sum(r.output_tokens for r in requests):,} output tokens",
        "hardware": ", ".join(filter(None, (manifest.runtime.device, manifest.runtime.hardware))),
        "size": _size(manifest),
    }
    return facts | ({"notes": manifest.notes} if manifest.notes else {})


def _decoding(manifest: Manifest) -> str:
    decode = manifest.decode
    if decode is None:
        return "-"
    threshold = "" if decode.threshold is None else f", threshold {decode.threshold:g}"
    return f"rule {decode.rule}, block length {decode.block_length}{threshold}"


def _passes_table(statistics: TraceStatistics) -> Table:
    table = Table("pass", title="Forward passes", title_justify="left")
    table.add_column("number", justify="right")
    table.add_column("tokens per pass", justify="right")
    for kind, number in statistics.passes.items():
        table.add_row(kind, f"{number:,}", _number(statistics.tokens_per_pass[kind], 1))
    return table


def _activated_table(found: Trace, statistics: TraceStatistics) -> Table:
    experts = found.geometry.experts
    title = f"Activated experts of {experts}, denoise passes"
    table = Table("layer", title=title, title_justify="left")
    table.add_column("mean", justify="right")
    table.add_column("range", justify="right")
    table.add_column(f"0 to {experts}", width=BAR_WIDTH)
    for layer, spread in statistics.activated.items():
        bar = Bar(experts, 0, 0 if spread.mean != spread.mean else spread.mean, width=BAR_WIDTH)
        extent = f"{_number(spread.low, 0)}..{_number(spread.high, 0)}"
        table.add_row(str(layer), _number(spread.mean, 1), extent, bar)
    return table


def _locality_table(statistics: TraceStatistics) -> Table:
    table = Table("figure", title="Locality", title_justify="left")
    table.add_column("mean", justify="right")
    rows = {
        "activated experts per layer": _number(statistics.activated_mean, 1),
        "expert set kept by the next pass of the block": _share(statistics.adjacent_overlap),
        "expert set kept across a block boundary": _share(statistics.boundary_overlap),
        "tokens accepted per denoise pass": _number(statistics.accepted_per_denoise, 2),
        "confidence of masked tokens": _number(statistics.confidence_masked, 3),
        "confidence of accepted tokens": _number(statistics.confidence_accepted, 3),
    }
    for row in rows.items():
        table.add_row(*row)
    return table


def _stability_table(statistics: TraceStatistics) -> Table:
    title = "Route stability: experts of a token that its next pass keeps"
    table = Table("token", title=title, title_justify="left")
    for column in ("transitions", "kept", "correlation with confidence"):
        table.add_column(column, justify="right")
    labels = {
        "masked": "still masked",
        "accepted": "just accepted",
        "decoded": "decoded",
        "edited": "just edited",
        "all": "all",
    }
    for name, label in labels.items():
        row = statistics.stability[name]
        if row.transitions or name == "all":
            correlation = _number(row.correlation, 2)
            table.add_row(label, f"{row.transitions:,}", _share(row.kept), correlation)
    return table


def _as_json(found: Trace, statistics: TraceStatistics) -> dict[str, Any]:
    manifest = msgspec.to_builtins(found.manifest)
    requests = [{k: v for k, v in r.items() if k != "files"} for r in manifest["requests"]]
    return {
        "path": str(found.path),
        "manifest": manifest | {"requests": requests},
        "size_bytes": sum(f.size_bytes for f in found.manifest.files.values()),
        "statistics": statistics,
    }


def _size(manifest: Manifest) -> str:
    return f"{sum(f.size_bytes for f in manifest.files.values()) / 1e6:.2f} MB"


def _number(value: float, digits: int) -> str:
    return "-" if value != value else f"{value:,.{digits}f}"


def _share(value: float) -> str:
    return "-" if value != value else f"{100 * value:.1f} %"
