"""``oled-sim validate``: predictions of the simulator beside measurements on hardware."""

from __future__ import annotations

import os
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click

from oled_sim.cli.options import FloatRange

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from oled_sim.cli.validate_inputs import Inputs
    from oled_sim.validation.measured import Point
    from oled_sim.validation.report import Report

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim validate replayed
  oled-sim validate replayed --out validation --require
  oled-sim validate replayed --profile mine.toml --trace my-trace --json
  oled-sim validate first second --profile first.toml --profile second.toml
"""


@click.command(epilog=EPILOG)
@click.argument("roots", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--profile",
    "profiles",
    multiple=True,
    metavar="NAME_OR_FILE",
    help="A profile that was measured with; repeatable, every point finds its own. Default: the"
    " bundled one of that name.",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    metavar="PATH_OR_NAME",
    help="Where a replayed trace is now; repeatable. Default: where it was.",
)
@click.option(
    "--allow-other-hardware",
    is_flag=True,
    help="Predict by a profile that was measured on another machine.",
)
@click.option(
    "--spread",
    type=FloatRange(min=0),
    metavar="PERCENT",
    help="Run-to-run spread to assume where a point was run once. Default: unknown.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write summary.md, summary.json, points.parquet and parity.png there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option("--require", is_flag=True, help="Exit with 1 if a target is missed.")
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def validate(
    roots: tuple[Path, ...], profiles: tuple[str, ...], traces: tuple[str, ...],
    allow_other_hardware: bool, spread: float | None, out: Path | None, as_json: bool,
    require: bool, force: bool,
) -> None:  # fmt: skip
    """Compare what 'oled-sim replay' measured under ROOTS with what the simulator predicts.

    Every measured point is simulated with the same policy, warm-up and passes; decisions are
    compared event by event, times per point, per lane and in the order of policies.
    """
    from oled_sim.cli.validate_inputs import Inputs
    from oled_sim.errors import MeasurementError, UsageError
    from oled_sim.validation.measured import read_points, unfinished

    different = list(dict.fromkeys(os.path.realpath(root) for root in roots))
    if len(different) < len(roots):
        raise UsageError("a folder is given twice: give each once")
    points = [point for root in roots for point in read_points(root)]
    for folder in (folder for root in roots for folder in unfinished(root)):
        click.echo(f"Note: {folder} was never finished and is left out", err=True)
    inputs = Inputs(profiles, traces, other_hardware=allow_other_hardware)
    with nullcontext() if out is None else _checked(out, force=force):
        report = _compare(points, inputs, spread)
    try:
        if out is not None:
            _write(out, report)
    finally:  # a disk that is full takes the files, not the results
        _print(report, as_json=as_json)
    if require and report.missed:
        raise MeasurementError(f"targets are missed: {', '.join(report.missed)}")


def _compare(points: Sequence[Point], inputs: Inputs, spread: float | None) -> Report:
    from oled_sim.cli.progress import kernels_of, progress
    from oled_sim.validation.predicted import policy_of
    from oled_sim.validation.report import compare_all

    with progress(kernels_of(policy_of(point.about) for point in points)) as report:
        assumed = None if spread is None else spread / 100
        return compare_all(points, inputs.basis, assumed_spread=assumed, progress=report)


FILES = ("summary.md", "summary.json", "points.parquet", "parity.png")


@contextmanager
def _checked(folder: Path, *, force: bool) -> Iterator[None]:
    """Find out before the simulation whether results can be written into a folder."""
    from oled_sim.cli.files import folder_for
    from oled_sim.engine.output import refuse_existing

    with folder_for(folder):
        for name in FILES:
            refuse_existing(folder / name, force=force)
        yield


def _write(folder: Path, report: Report) -> None:
    import pandas as pd
    import pyarrow as pa

    from oled_sim.engine.results import write_table
    from oled_sim.plotting.parity import draw_parity
    from oled_sim.plotting.style import save
    from oled_sim.validation.report import point_row, to_plain
    from oled_sim.validation.text import markdown

    rows = [point_row(comparison) for comparison in report.comparisons]
    plain = to_plain(report)
    about = {name: value for name, value in plain.items() if name != "points"}
    _write_text(folder / "summary.md", markdown(report))
    _write_text(folder / "summary.json", _json(report, indent=2) + "\n")
    write_table(folder / "points.parquet", pa.Table.from_pylist(rows), about)
    save(draw_parity(pd.DataFrame(rows)), folder / "parity.png")


def _write_text(path: Path, text: str) -> None:
    from oled_sim.engine.output import NewFile

    with NewFile(path) as file:
        file.temporary.write_text(text, encoding="utf-8")


def _json(report: Report, indent: int = 0) -> str:
    import msgspec

    from oled_sim.validation.report import to_plain

    encoded = msgspec.json.encode(to_plain(report))
    return (msgspec.json.format(encoded, indent=indent) if indent else encoded).decode()


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        click.echo(_json(report))
        return
    from oled_sim.cli.tables import print_notes, print_table, table_console
    from oled_sim.validation.text import facts, sections

    console = table_console()
    for name, value in facts(report).items():
        console.print(f"{name:<10}{value}", soft_wrap=True, highlight=False, markup=False)
    for section in sections(report):
        if section.rows:
            console.print(f"\n{section.title}", style="bold")
            print_table(console, section.names, section.rows, left=section.left)
            print_notes(console, section.note.split("\n\n"))
