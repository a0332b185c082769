"""``oled-sim export``: turn a trace into a file for other tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
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

if TYPE_CHECKING:
    from oled_sim.exporting import Exporter

EPILOG = """\b
Examples:
  oled-sim export csv nano-gsm8k --out routes.csv.gz
  oled-sim export oracle-general nano-gsm8k --out nano.oracleGeneral.zst
  oled-sim export npz my-trace --requests 4 --out routed.npz
"""


def _command(form: str, exporter: Exporter) -> click.Command:
    """Return ``oled-sim export FORMAT`` of one exporter."""

    def run(trace: str, out: Path, **options: Any) -> None:
        _export(form, exporter, trace, out, options)

    parameters: list[click.Parameter] = [
        click.Argument(["trace"], metavar="PATH_OR_NAME"),
        click.Option(
            ["--out"],
            type=click.Path(path_type=Path),
            required=True,
            metavar="FILE",
            help="The file; compressed if its name ends in .gz, .xz or .zst.",
        ),
        *plugin_parameters(exporter),
        click.Option(
            ["--requests"],
            type=click.IntRange(min=1),
            metavar="N",
            help="Export only the first N requests.",
        ),
        click.Option(["--overwrite"], is_flag=True, help="Replace a file that is there."),
        click.Option(["--json", "as_json"], is_flag=True, help="Print the summary as JSON."),
    ]
    return PluginCommand(
        form,
        params=parameters,
        callback=run,
        help=f"Write a trace to a file of the format {form}.\n\n"
        "PATH_OR_NAME is a trace directory, or the name of a trace that ships with oled-sim."
        " docs/exporting.md says what the file holds.",
        epilog=examples_of(exporter, f"oled-sim export {form} nano-gsm8k --out FILE"),
    )


@click.command(
    "export", cls=PluginGroup, entry_points="oled_sim.exporters", build=_command, epilog=EPILOG
)
def export() -> None:
    """Turn a trace into a file for other tools.

    `oled-sim export FORMAT --help` lists what a format takes. Memory is bounded by the largest
    request. A file is written wholly or not at all.
    """


def _export(form: str, exporter: Exporter, source: str, out: Path, options: dict[str, Any]) -> None:
    from oled_sim.exporting import export_trace, first_requests
    from oled_sim.trace.reader import open_trace

    own = plugin_arguments(exporter, options)
    trace = first_requests(open_trace(source), options["requests"])
    with share_progress(f"Exporting {trace.label}") as on_progress:
        written = export_trace(
            exporter,
            trace,
            out,
            overwrite=options["overwrite"],
            on_progress=on_progress,
            on_note=lambda note: click.echo(f"{source}: {note}", err=True),
            **own,
        )
    if options["as_json"]:
        click.echo(json.dumps({"out": str(out), "format": form, "requests": len(trace), **written}))
    else:
        click.echo(_summary(source, out, len(trace), written))


def _summary(source: str, out: Path, requests: int, written: Mapping[str, int]) -> str:
    counts = [f"{requests:,} request{'s' if requests != 1 else ''}"]
    counts += [f"{n:,} {name.replace('_', ' ')}" for name, n in written.items() if name != "bytes"]
    return f"exported {', '.join(counts)} of {source} to {out} ({written['bytes'] / 1e6:.2f} MB)"
