"""``oled-sim reproduce``: every quantitative claim of the paper beside what is found here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.measuring import results_options

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pandas as pd

    from oled_sim.scoreboard.claim import Claim, Judged
    from oled_sim.scoreboard.text import Coverage

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim reproduce --quick
  oled-sim reproduce --out results/full --jobs 8
  oled-sim reproduce --out results/full --no-run --json
"""

PAGE, TABLE = "reproduction.md", "reproduction.parquet"


QUICK = (
    "A quick run: few requests of the traces that ship. It shows that everything works; figures and"
    " verdicts of the whole grids are others (docs/reproduction.md, where claims are explained)."
)


@click.command(epilog=EPILOG)
@click.option("--quick", is_flag=True, help="The quick experiments: bundled traces, few requests.")
@results_options
@click.option("--no-run", is_flag=True, help="Judge by the tables that are there; run nothing.")
@click.option(
    "--measured",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Replays, as `oled-sim validate` wrote them. Default: those in benchmarks/results of a"
    " checkout.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Of the resampling that intervals come from.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def reproduce(
    quick: bool, out: Path | None, jobs: int | None, no_run: bool, measured: Path | None,
    seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Judge every quantitative claim of the OLED-MoE paper.

    Runs the experiments that claims are read from, as far as they are not there yet, and sets our
    figures with their intervals beside the paper's. The rule of the verdicts is in
    docs/reproduction.md. Writes reproduction.md and reproduction.parquet into the folder.
    """
    from oled_sim.cli.measuring import measure, size_and_folder
    from oled_sim.engine.output import NewFile
    from oled_sim.engine.results import write_table
    from oled_sim.errors import UsageError
    from oled_sim.scoreboard.board import judge_all, load_claims
    from oled_sim.scoreboard.table import board_table
    from oled_sim.scoreboard.text import markdown

    size, folder = size_and_folder(quick, out)
    claims = load_claims()
    replays = _replays(measured)
    if not no_run:
        measure(_experiments_of(claims), size, folder, jobs)
    tables = _tables(claims, folder)
    if not tables:
        raise UsageError(
            f"{folder} holds no table of an experiment: leave --no-run out, or name the folder of"
            " another run with --out"
        )
    tables |= replays
    board = judge_all(claims, tables, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_table(folder / TABLE, board_table(board), {"size": size, "seed": seed})
    with NewFile(folder / PAGE) as file:
        text = QUICK + "\n\n" if quick else ""
        text += markdown(board, _coverage(tables, folder, size))
        file.temporary.write_text(text, encoding="utf-8")
    _print(board, as_json=as_json)
    if quick and not as_json:
        click.echo(QUICK)


def _experiments_of(claims: Iterable[Claim]) -> list[str]:
    """Return the names of the experiments that claims are read from, in the paper's order."""
    from oled_sim.experiment import experiment_names

    wanted = {claim.experiment for claim in claims}
    return [name for name in experiment_names() if name in wanted]


def _tables(claims: Iterable[Claim], folder: Path) -> dict[str, pd.DataFrame]:
    """Return the experiments' tables that are there."""
    import pandas as pd

    names = dict.fromkeys(claim.experiment for claim in claims if claim.experiment)
    files = {name: folder / f"{name}.parquet" for name in names}
    return {name: pd.read_parquet(file) for name, file in files.items() if file.is_file()}


def _coverage(names: Iterable[str], folder: Path, size: Any) -> list[Coverage]:
    """Return how much of each experiment's grid the tables hold, as their manifests say."""
    import json

    from oled_sim.experiment import load_experiment
    from oled_sim.scoreboard.text import Coverage

    found = []
    for name in names:
        manifest = folder / f"{name}.manifest.json"
        if manifest.is_file():
            points = json.loads(manifest.read_text(encoding="utf-8"))["points"]
            found.append(Coverage(name, len(points), len(load_experiment(name).grid(size))))
    return found


def _replays(folder: Path | None) -> dict[str, pd.DataFrame]:
    """Return the replayed points of the newest validation of each profile, if there are any."""
    import pandas as pd

    from oled_sim.planning.accuracy import find_validations
    from oled_sim.scoreboard.board import replay_table
    from oled_sim.scoreboard.claim import REPLAYS

    newest = {}
    for path, summary in find_validations(folder):
        newest[summary["profile"]["name"]] = pd.read_parquet(path / "points.parquet")
    return {REPLAYS: replay_table(list(newest.items()))} if newest else {}


def _print(board: Sequence[Judged], *, as_json: bool) -> None:
    from oled_sim.scoreboard.table import board_table
    from oled_sim.scoreboard.text import machines_of

    if as_json:
        from oled_sim.cli.grids import encode

        verdicts = {
            machine: {judged.claim.key: judged.verdict(machine).value for judged in board}
            for machine in machines_of(board)
        }
        click.echo(encode({"verdicts": verdicts, "rows": board_table(board).to_pylist()}))
        return
    from oled_sim.cli.reproduce_table import print_board

    print_board(board)
