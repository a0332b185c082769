"""``oled-sim import``: turn another tool's recording into a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oled_sim.errors import OledSimError

if TYPE_CHECKING:
    from oled_sim.trace.manifest import Manifest

EPILOG = """\b
Examples:
  oled-sim import route-csv qwen.route.csv.xz --out qwen
  oled-sim trace info qwen
  oled-sim import route-csv session.csv --stands-for llada2.0-mini --out session
"""


@click.command("import", epilog=EPILOG)
@click.argument("form", metavar="FORMAT")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Directory of the trace.",
)
@click.option("--overwrite", is_flag=True, help="Replace a trace that is there.")
@click.option(
    "--stands-for",
    metavar="GEOMETRY",
    help="Published model whose costs results use by default [default: none].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def import_(
    form: str, file: Path, out: Path, overwrite: bool, stands_for: str | None, as_json: bool
) -> None:
    """Turn FILE, a recording of routing by another tool, into a trace.

    FORMAT is route-csv (a routing trace of BigMoeOnEdge, plain, .xz or .gz), or the name of an
    importer plug-in. Memory is bounded by the largest request, not by the file.
    """
    from oled_sim import plugins
    from oled_sim.geometry import find_geometry
    from oled_sim.importing import Importer, check_out

    importer: Importer = plugins.load(plugins.IMPORTERS, form)
    if stands_for is not None:
        find_geometry(stands_for)
    check_out(out, overwrite=overwrite)
    with _progress(file.name) as on_progress:
        try:
            manifest = importer(
                file,
                out,
                stands_for=stands_for,
                overwrite=overwrite,
                on_progress=on_progress,
                on_note=lambda note: click.echo(f"{file}: {note}", err=True),
            )
        except KeyboardInterrupt:
            raise OledSimError(_interrupted(file, out)) from None
    _print_summary(manifest, out, as_json)


@contextmanager
def _progress(label: str) -> Iterator[Callable[[float], None]]:
    """Show the share of the work done on a terminal's standard error."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(escape(f"Importing {label}"), total=1.0)
        yield lambda done: progress.update(task, completed=done)


def _interrupted(file: Path, out: Path) -> str:
    if (out / "manifest.json").exists():
        return f"interrupted: {out} may hold a part of {file} only, import it with --overwrite"
    return f"interrupted: nothing of {file} was imported"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _print_summary(manifest: Manifest, out: Path, as_json: bool) -> None:
    requests = manifest.requests
    values = {
        "requests": len(requests),
        "prompt_tokens": sum(r.prompt_tokens for r in requests),
        "output_tokens": sum(r.output_tokens for r in requests),
        "passes": sum(r.passes for r in requests),
        "events": sum(r.events for r in requests),
        "trace_bytes": sum(f.size_bytes for f in manifest.files.values()),
    }
    if as_json:
        click.echo(json.dumps({"out": str(out), **values}))
        return
    model = manifest.model
    click.echo(
        f"imported {_counted(values['requests'], 'request')} of {model.name}"
        f" ({len(model.layers)} MoE layers, {model.experts} experts, top-{model.top_k}):"
        f" {values['prompt_tokens']:,} prompt and {values['output_tokens']:,} output tokens,"
        f" {_counted(values['passes'], 'pass', 'passes')}, {_counted(values['events'], 'event')}"
    )
    click.echo(
        f"trace: {out} ({values['trace_bytes'] / 1e6:.2f} MB);"
        f" look into it with: oled-sim trace info {out}"
    )
