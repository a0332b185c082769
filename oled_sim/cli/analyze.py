"""``oled-sim analyze``: how local the routing of traces is, beside the paper's figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

# pandas, matplotlib and the readers are imported where they are used, so that --help is fast.
if TYPE_CHECKING:
    import pandas as pd

    from oled_sim.trace.reader import Trace

PAPER = ("traces", "paper")
"""What the comparison with the paper is made from."""

EPILOG = """\b
Examples:
  oled-sim analyze my-trace
  oled-sim analyze mini-gsm8k mini-humaneval mini-science --paper
  oled-sim analyze real-trace synthetic-trace --out analysis --plots
  oled-sim analyze my-trace --json | jq .tables.paper
"""


@click.command(epilog=EPILOG)
@click.argument("sources", metavar="TRACE...", nargs=-1, required=True)
@click.option("--out", metavar="DIR", type=click.Path(path_type=Path), help="Write every table.")
@click.option("--plots", is_flag=True, help="Draw the figures too, as PNG beside the tables.")
@click.option("--paper", is_flag=True, help="Print only the comparison with the paper.")
@click.option("--markdown", is_flag=True, help="Print only that comparison, as Markdown.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--force", is_flag=True, help="Replace what an earlier analyze wrote to DIR.")
@click.option("--requests", type=click.IntRange(1), help="Read this many requests of each trace.")
@click.option("--cold", is_flag=True, help="Measure reuse within requests only.")
def analyze(
    sources: Sequence[str],
    out: Path | None,
    plots: bool,
    paper: bool,
    markdown: bool,
    as_json: bool,
    force: bool,
    requests: int | None,
    cold: bool,
) -> None:
    """Report the locality of one or more traces, and plot it.

    TRACE is a trace directory, or the name of a trace that ships with oled-sim. Several are set
    side by side, marked real, synthetic or imported: first beside figures 4, 7 and 10 of the
    OLED-MoE paper. docs/analyze.md defines every figure.
    """
    from oled_sim.analysis.output import refuse_existing, write_figures, write_tables
    from oled_sim.cli.files import require_folder
    from oled_sim.cli.simulating import note_few
    from oled_sim.cli.traces import open_traces
    from oled_sim.errors import UsageError

    if plots and out is None:
        raise UsageError("--plots needs a place to write to: add --out DIR")
    if markdown and as_json:
        raise UsageError("--markdown and --json are two forms of one output: give one of them")
    traces = open_traces(sources)
    note_few(traces, requests)
    if out is not None:
        refuse_existing(out, force=force)
        require_folder(out)
    tables = _tables(traces, requests, cold)
    written: list[Path] = []
    if out is not None:
        written += write_tables(out, tables, force=force)
        written += write_figures(out, tables) if plots else []
    shown = {name: tables[name] for name in PAPER} if paper or markdown else tables
    _print(shown, as_json=as_json, markdown=markdown)
    if out is not None and not (as_json or markdown):
        click.echo(f"Written to {out}: {', '.join(file.name for file in written)}")


def _tables(traces: dict[str, Trace], requests: int | None, cold: bool) -> dict[str, pd.DataFrame]:
    """Read and analyze, under a progress bar on a terminal's stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from oled_sim.analysis.report import analyze_traces

    console = Console(stderr=True)
    total = sum(len(trace.requests[:requests]) for trace in traces.values())
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Analyzing", total=total)
        return analyze_traces(
            traces, requests=requests, cold=cold, on_request=lambda: progress.advance(task)
        )


def _print(tables: dict[str, pd.DataFrame], *, as_json: bool, markdown: bool) -> None:
    from oled_sim.analysis.output import encode_json
    from oled_sim.analysis.text import print_analysis
    from oled_sim.cli.paper_table import markdown_beside_paper, print_beside_paper
    from oled_sim.cli.tables import table_console

    if as_json:
        click.echo(encode_json(tables))
    elif markdown:
        click.echo(markdown_beside_paper(tables))
    else:
        print_beside_paper(table_console(), tables)
        if len(tables) > len(PAPER):
            click.echo()
            print_analysis(tables)
