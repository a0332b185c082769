"""``oled-sim sweep``: a grid of policies, capacities, links and batch sizes, on all cores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.options import (
    DEFAULT_TRACE,
    cache_bytes_option,
    cost_options,
    grid_options,
    policy_option,
    rule_options,
    traces_option,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oled_sim.cli.grids import GridRun

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

KEPT = (
    "nothing is kept, all combinations finish together; as an experiment of your own"
    " (docs/experiments.md) the grid goes on where it was stopped"
)

EPILOG = """\b
Examples:
  oled-sim sweep --policy lru --policy oled --policy ideal --cache 8:128:8 --plot sweep.png
  oled-sim sweep nano-gsm8k nano-humaneval --policy lru --cache 16,40 --h2d-gbs 12,25,50
  oled-sim sweep --policy oled --cache 40 --batch 1,2,4 --out sweep.parquet --jobs 4
"""


@click.command(epilog=EPILOG)
@click.argument("traces", nargs=-1, metavar="[TRACE]...")
@traces_option
@policy_option
@grid_options
@cache_bytes_option
@cost_options
@rule_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one row per trace, combination and request: .parquet or .csv.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw TPOT, utilization and hit rate against the cache size, as .png or .svg.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def sweep(
    traces: tuple[str, ...], named: tuple[str, ...], policies: tuple[str, ...],
    caches: tuple[str, ...], sizes: tuple[str, ...], links: str | None, batches: str,
    jobs: int | None, profile: str | None, geometry: str | None, extrapolate: bool, as_json: bool,
    out: Path | None, plot: Path | None, force: bool, **rules: Any,
) -> None:  # fmt: skip
    """Simulate every combination on every TRACE, by default on mini-gsm8k.

    Requests are read and made ready once for all combinations with the same batch size. What is
    printed and written does not depend on --jobs.
    """
    from oled_sim.cli.files import FIGURE, TABLE, check_files
    from oled_sim.cli.grids import grid_of, run_grids
    from oled_sim.cli.stopping import keeping
    from oled_sim.cli.traces import one_way
    from oled_sim.engine.rules import Rules
    from oled_sim.errors import UsageError
    from oled_sim.policy_spec import parse_policies

    sources = one_way(traces, named) or (DEFAULT_TRACE,)
    grid = grid_of(parse_policies(policies), caches, links, batches, sizes)
    settings = Rules(**rules)
    if plot is not None and sizes:
        raise UsageError("a figure's axis is slots per layer: give --cache, or leave out --plot")
    check_files(
        {"--out": out, "--plot": plot}, forms={"--out": TABLE, "--plot": FIGURE}, force=force
    )
    with keeping(lambda: KEPT):
        runs = run_grids(
            sources,
            grid,
            settings,
            model=(geometry, profile, extrapolate),
            jobs=jobs,
        )
    try:
        _write(out, plot, runs)
    finally:  # a disk that is full takes the file, not the results
        _print(runs, as_json=as_json)


def _write(out: Path | None, plot: Path | None, runs: Sequence[GridRun]) -> None:
    from oled_sim.cli.grids import write_out

    if out is not None:
        write_out(out, runs)
    if plot is not None:
        _draw(plot, runs)


def _draw(path: Path, runs: Sequence[GridRun]) -> None:
    from oled_sim.cli.grids import requests_of
    from oled_sim.plotting.results import draw_sweep
    from oled_sim.plotting.style import save

    save(draw_sweep(requests_of(runs).to_pandas()), path)


def _print(runs: Sequence[GridRun], *, as_json: bool) -> None:
    from oled_sim.cli.grids import encode, json_of
    from oled_sim.cli.run_table import print_results

    if as_json:
        click.echo(encode({"runs": json_of(runs)}))
        return
    for i, run in enumerate(runs):
        if i > 0:
            click.echo()
        print_results(run.header, run.results)
