"""``oled-sim experiment``: figures of the paper, measured once, resumed and kept."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.measuring import results_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oled_sim.experiment import Experiment, Finished

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

ALL = "all"
FIGURE_SUFFIX = ".png"

EPILOG = """\b
Examples:
  oled-sim experiment fig12 --quick
  oled-sim experiment all --out results/full --jobs 4
  oled-sim experiment --list
"""


@click.command(epilog=EPILOG)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--quick", is_flag=True, help="Bundled traces only, under a minute each.")
@results_options
@click.option("--list", "listing", is_flag=True, help="List the experiments, and run none.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def experiment(
    names: tuple[str, ...], quick: bool, out: Path | None, jobs: int | None, listing: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run experiments by NAME, such as fig12, or all of them.

    Each writes a tidy table NAME.parquet with one row per request, NAME.manifest.json with
    everything it came from, and the figure NAME.png. What is already there and unchanged is kept:
    run the same command again after an interrupt.
    """
    from oled_sim.cli.measuring import measure, size_and_folder
    from oled_sim.errors import UsageError
    from oled_sim.experiment import experiment_names, load_experiment

    known = experiment_names()
    if listing:
        _list([load_experiment(name) for name in names or known], as_json=as_json)
        return
    if not names:
        raise UsageError(f"no experiment to run: name some of {', '.join(known)}, or {ALL}")
    wanted = known if ALL in names else list(dict.fromkeys(names))
    size, folder = size_and_folder(quick, out)
    _check_figures(wanted, folder)
    finished = measure(wanted, size, folder, jobs)
    _report(finished, [_draw(f) for f in finished], as_json=as_json)


def _check_figures(names: Sequence[str], folder: Path) -> None:
    """Find out before anything is measured whether its figures can be written."""
    from oled_sim.experiment import load_experiment
    from oled_sim.places import require_place

    for name in names:
        figure = folder / f"{load_experiment(name).name}{FIGURE_SUFFIX}"
        require_place(figure, "an experiment's figure")


def _draw(finished: Finished) -> Path:
    import pandas as pd

    from oled_sim.plotting.style import save

    path = finished.table.with_suffix(FIGURE_SUFFIX)
    save(finished.experiment.plot(pd.read_parquet(finished.table)), path, colours=256)
    return path


def _list(experiments: Sequence[Experiment], *, as_json: bool) -> None:
    rows = [{"name": e.name, "section": e.section, "title": e.title} for e in experiments]
    _print(rows, as_json=as_json)


def _report(finished: Sequence[Finished], figures: Sequence[Path], *, as_json: bool) -> None:
    rows = [
        {
            "name": f.experiment.name,
            "points": f.points,
            "measured": f.measured,
            "table": str(f.table),
            "figure": str(figure),
        }
        for f, figure in zip(finished, figures, strict=True)
    ]
    _print(rows, as_json=as_json)


def _print(rows: Sequence[dict[str, Any]], *, as_json: bool) -> None:
    import json

    from oled_sim.cli.tables import print_table, table_console

    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False))
        return
    names = list(rows[0]) if rows else []
    texts = [[str(value) for value in row.values()] for row in rows]
    left = {name for name in names if rows and isinstance(rows[0][name], str)}
    print_table(table_console(), names, texts, left=left)
