"""``oled-sim import``: turn another tool's recording into a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.plugin_group import (
    PluginCommand,
    PluginGroup,
    examples_of,
    plugin_arguments,
    plugin_parameters,
)
from oled_sim.cli.share_progress import share_progress
from oled_sim.cli.stopping import keeping

if TYPE_CHECKING:
    from oled_sim.importing import Importer
    from oled_sim.trace.manifest import Manifest

EPILOG = """\b
Examples:
  oled-sim import route-csv qwen.route.csv.xz --out qwen
  oled-sim trace info qwen
  oled-sim import csv --help
"""


def _command(form: str, importer: Importer) -> click.Command:
    """Return ``oled-sim import FORMAT`` of one importer."""

    def run(file: Path, out: Path, **options: Any) -> None:
        _import(importer, file, out, options)

    parameters: list[click.Parameter] = [
        click.Argument(["file"], type=click.Path(exists=True, dir_okay=False, path_type=Path)),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            required=True,
            metavar="DIR",
            help="Directory of the trace.",
        ),
        *plugin_parameters(importer),
        click.Option(
            ["--stands-for"],
            metavar="GEOMETRY",
            help="Published model whose costs results use by default [default: none].",
        ),
        click.Option(["--overwrite"], is_flag=True, help="Replace a trace that is there."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the summary as JSON."),
    ]
    return PluginCommand(
        form,
        params=parameters,
        callback=run,
        help=f"Turn FILE, a recording of the format {form}, into a trace.\n\n"
        "docs/importing.md says what becomes what, and what is refused.",
        epilog=examples_of(importer, f"oled-sim import {form} FILE --out trace"),
    )


@click.command(
    "import", cls=PluginGroup, entry_points="oled_sim.importers", build=_command, epilog=EPILOG
)
def import_() -> None:
    """Turn another tool's recording of routing into a trace.

    `oled-sim import FORMAT --help` lists what a format takes. Memory is bounded by the largest
    request, not by the file.
    """


def _import(importer: Importer, file: Path, out: Path, options: dict[str, Any]) -> None:
    from oled_sim.geometry import find_geometry
    from oled_sim.importing import check_out

    stands_for: str | None = options["stands_for"]
    if stands_for is not None:
        find_geometry(stands_for)
    own = plugin_arguments(importer, options)
    check_out(out, overwrite=options["overwrite"], flag="--overwrite")
    before = _seal(out)
    with (
        keeping(lambda: _imported(file, out, before)),
        share_progress(f"Importing {file.name}") as on_progress,
    ):
        manifest = importer(
            file,
            out,
            stands_for=stands_for,
            overwrite=options["overwrite"],
            on_progress=on_progress,
            on_note=lambda note: click.echo(f"{file}: {note}", err=True),
            **own,
        )
    _print_summary(manifest, out, options["as_json"])


def _seal(out: Path) -> bytes:
    """Return what tells one trace from another; nothing if none is there."""
    found = out / "manifest.json"
    return found.read_bytes() if found.is_file() else b""


def _imported(file: Path, out: Path, before: bytes) -> str:
    if _seal(out) != before:
        return f"{out} may hold a part of {file} only, import it with --overwrite"
    as_it_was = f", the trace {out} is as it was" if before else ""
    return f"nothing of {file} was imported{as_it_was}"


def _print_summary(manifest: Manifest, out: Path, as_json: bool) -> None:
    from oled_sim.importing import counted

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
        f"imported {counted(values['requests'], 'request')} of {model.name}"
        f" ({len(model.layers)} MoE layers, {model.experts} experts, top-{model.top_k}):"
        f" {values['prompt_tokens']:,} prompt and {values['output_tokens']:,} output tokens,"
        f" {counted(values['passes'], 'pass', 'passes')}, {counted(values['events'], 'event')}"
    )
    click.echo(
        f"trace: {out} ({values['trace_bytes'] / 1e6:.2f} MB);"
        f" look into it with: oled-sim trace info {out}"
    )
