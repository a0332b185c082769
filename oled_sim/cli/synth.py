"""``oled-sim synth``: synthetic traces at the scale of the paper, and how well they fit."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from oled_sim.synthesis.report import Line
    from oled_sim.synthesis.request import Recipe
    from oled_sim.trace.manifest import Manifest

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

COUPLINGS = ("measured", "none", "positive")

EPILOG = """\b
Examples:
  oled-sim synth --model llada2.0-mini --dataset gsm8k --requests 100 --out mini-gsm8k
  oled-sim run --trace mini-gsm8k/measured --policy lru --policy oled --cache 40
  oled-sim synth --model fitted --dataset gsm8k --report
"""


@click.command(epilog=EPILOG)
@click.option(
    "--model",
    default="llada2.0-mini",
    show_default=True,
    metavar="NAME",
    help="llada2.0-mini, llada2.0-flash, llada2.1-mini, llada2.1-flash (decoding with editing), or"
    " fitted: of the size of the trace that was fitted.",
)
@click.option(
    "--dataset",
    default="gsm8k",
    show_default=True,
    metavar="NAME_OR_FILE",
    help="Data set whose routing was fitted, or a .toml file of parameters.",
)
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="[default: 10]")
@click.option("--output-tokens", type=click.IntRange(min=1), default=1024, show_default=True,
              metavar="N", help="Output tokens of every request.")  # fmt: skip
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--coupling",
    type=click.Choice([*COUPLINGS, "all"]),
    default="all",
    show_default=True,
    help="How confidence bears on route stability: as measured, not at all, or strongly, as the"
    " paper says. all writes one trace for each, in a folder of that name.",
)
@click.option("--full-gate", is_flag=True, help="Generate the mean gate over all experts.")
@click.option("--embedding", is_flag=True, help="Generate the mean input embedding.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Where traces go.")
@click.option("--overwrite", is_flag=True, help="Replace traces that are there.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="[default: all cores]")
@click.option("--report", is_flag=True, help="Write nothing; print target, achieved, tolerance.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def synth(
    model: str, dataset: str, requests: int | None, output_tokens: int, seed: int, coupling: str,
    full_gate: bool, embedding: bool, out: Path | None, overwrite: bool, jobs: int | None,
    report: bool, as_json: bool,
) -> None:  # fmt: skip
    """Generate traces of block-diffusion routing at the scale of the paper.

    Parameters were fitted to traces of real models; docs/synthetic-traces.md says how well, and
    what such traces cannot show. The same seed gives the same bytes on any number of processes.
    """
    from oled_sim.errors import UsageError
    from oled_sim.synthesis.generate import make_recipe
    from oled_sim.synthesis.parameters import load_data_set

    flags = {"full_gate": full_gate, "embedding": embedding}
    data = load_data_set(dataset)
    recipes = {
        name: make_recipe(
            data,
            model,
            coupling=name,
            output_tokens=output_tokens,
            seed=seed,
            signals=tuple(signal for signal, wanted in flags.items() if wanted),
        )
        for name in (COUPLINGS if coupling == "all" else (coupling,))
    }
    if not report and out is None:
        raise UsageError("no place for the traces: give --out DIR, or --report to write none")
    _say_if_compiling()
    if out is None or report:
        _report(recipes, requests, as_json)
        return
    if coupling == "all" and (out / "manifest.json").exists():
        raise UsageError(f"{out} is a trace, and three are written below it: give another folder")
    folders = {name: out / name if coupling == "all" else out for name in recipes}
    _write(recipes, folders, requests or 10, jobs or _cores(), overwrite, as_json)


def _say_if_compiling() -> None:
    from oled_sim.cli.progress import say_if_compiling
    from oled_sim.synthesis.routing import route_layer

    say_if_compiling([route_layer])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _write(
    recipes: dict[str, Recipe], folders: dict[str, Path], requests: int, jobs: int,
    overwrite: bool, as_json: bool,
) -> None:  # fmt: skip
    from oled_sim.importing import check_out

    for folder in folders.values():
        check_out(folder, overwrite=overwrite, flag="--overwrite")
    began, summaries = time.perf_counter(), []
    with _progress(requests * len(recipes)) as advance:
        for name, recipe in recipes.items():
            manifest = _write_one(folders[name], recipe, requests, jobs, overwrite, advance)
            summaries.append(_summary(name, folders[name], manifest))
    seconds = time.perf_counter() - began
    if as_json:
        click.echo(json.dumps({"traces": summaries, "seconds": round(seconds, 3)}))
        return
    for summary in summaries:
        click.echo(
            "synthetic, relation {coupling}: {requests:,} requests, {passes:,} passes,"
            " {events:,} events, {megabytes:.1f} MB in {out}".format(**summary)
        )
    events = sum(s["events"] for s in summaries)
    click.echo(f"{seconds:.1f} s with {jobs} processes, {events / seconds:,.0f} events/s")


def _write_one(
    folder: Path, recipe: Recipe, requests: int, jobs: int, overwrite: bool,
    advance: Callable[[], None],
) -> Manifest:  # fmt: skip
    from oled_sim.cli.interrupted import contents, recorded
    from oled_sim.cli.stopping import keeping
    from oled_sim.synthesis.generate import write_synthetic

    before = contents(folder)
    with keeping(lambda: recorded(folder, before, requests, ", all readable")):
        return write_synthetic(
            folder, recipe, requests, jobs=jobs, overwrite=overwrite, on_request=advance
        )


def _summary(name: str, out: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "out": str(out),
        "origin": manifest.origin,
        "coupling": name,
        "requests": len(manifest.requests),
        "passes": sum(r.passes for r in manifest.requests),
        "events": sum(r.events for r in manifest.requests),
        "megabytes": sum(f.size_bytes for f in manifest.files.values()) / 1e6,
    }


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """Show requests done on a terminal's standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)


def _report(recipes: dict[str, Recipe], requests: int | None, as_json: bool) -> None:
    found = {name: _lines(recipe, requests) for name, recipe in recipes.items()}
    first = next(iter(recipes.values()))
    if as_json:
        lines = {
            name: [line._asdict() | {"within": line.within} for line in report]
            for name, report in found.items()
        }
        click.echo(json.dumps({"fitted_on": first.data.fitted_on, "couplings": lines}))
        return
    click.echo(
        f"Data set {first.data.name}, fitted on {first.data.fitted_on}; model {first.model},"
        f" {len(first.geometry.layers)} layers × {first.geometry.experts} experts"
    )
    for name, report in found.items():
        _print_report(name, report)


def _lines(recipe: Recipe, requests: int | None) -> list[Line]:
    """Return the report of a recipe; against its own trace, on requests as long as that one's."""
    from dataclasses import replace

    from oled_sim.synthesis.report import fit_report

    own = recipe.model == recipe.data.fitted_on
    number = requests or (recipe.data.requests if own else 2)
    tokens = recipe.data.output_tokens if own else recipe.output_tokens
    return fit_report(replace(recipe, output_tokens=tokens, signals=("full_gate",)), number)


WIDTH = 110
"""Columns that a report takes at least: names of statistics are never cut."""


def _print_report(name: str, lines: Sequence[Line]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Confidence-stability relation: {name}", title_justify="left")
    for column in ("statistic", "", "source"):
        table.add_column(column, no_wrap=column == "statistic", overflow="fold")
    for column in ("target", "achieved", "tolerance"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for line in lines:
        numbers = (f"{v:.3f}" for v in (line.target, line.achieved, line.tolerance))
        mark = "" if line.within or line.kind in ("set otherwise", "not fitted") else "off"
        table.add_row(line.statistic, line.kind, line.source, *numbers, mark)
    console = Console()
    console.width = max(console.width, WIDTH)
    console.print(table)
