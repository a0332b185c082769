"""``oled-sim compare``: policies relative to the ideal cache, with intervals over requests."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.options import (
    cost_options,
    grid_options,
    policy_option,
    rule_options,
    traces_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from oled_sim.comparison import Row

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim compare nano-gsm8k --policy lru --policy oled --cache 16,40
  oled-sim compare nano-gsm8k nano-humaneval --policy lru --policy full --cache 40 --plot ratio.png
  oled-sim compare nano-gsm8k --policy oled --policy oled:priority --against lru --cache 16 --json
"""


@click.command(epilog=EPILOG)
@click.argument("traces", nargs=-1, metavar="TRACE...")
@traces_option
@policy_option
@click.option(
    "--against",
    default="ideal",
    show_default=True,
    metavar="SPEC",
    help="The policy that all others are relative to; it is run too.",
)
@grid_options
@cost_options
@rule_options
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Of the resampling that intervals come from.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the ratios against the cache size, as .png or .svg.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def compare(
    traces: tuple[str, ...], named: tuple[str, ...], policies: tuple[str, ...], against: str,
    caches: tuple[str, ...], links: str | None, batches: str, jobs: int | None,
    profile: str | None, geometry: str | None, extrapolate: bool, seed: int, as_json: bool,
    plot: Path | None, force: bool, **rules: Any,
) -> None:  # fmt: skip
    """Set policies beside the ideal cache (or another) on every TRACE, and on all together.

    The interval is the 95 % bootstrap interval of the ratio of mean TPOTs, resampling requests in
    pairs. It covers the choice of requests, not errors of costs or of the simulation.
    """
    from oled_sim.cli.files import FIGURE, check_files
    from oled_sim.cli.grids import encode, grid_of, reference_of, run_grids
    from oled_sim.cli.traces import one_way
    from oled_sim.comparison import compare as set_beside
    from oled_sim.engine.rules import Rules
    from oled_sim.errors import UsageError

    sources = one_way(traces, named)
    if not sources:
        raise UsageError("no trace to compare policies on: name at least one, such as nano-gsm8k")
    parsed, reference = reference_of(policies, against)
    grid, settings = grid_of(parsed, caches, links, batches), Rules(**rules)
    check_files({"--plot": plot}, forms={"--plot": FIGURE}, force=force)
    runs = run_grids(sources, grid, settings, model=(geometry, profile, extrapolate), jobs=jobs)
    lone = [label for label, policy in parsed.items() if policy.residency != "budget"]
    groups = {run.trace: [run.results] for run in runs}
    if len(runs) > 1:
        groups["all traces"] = [run.results for run in runs]
    found = {
        name: set_beside(results, reference, of_one_budget=lone, seed=seed)
        for name, results in groups.items()
    }
    if plot is not None:
        _draw(plot, found, reference)
    if as_json:
        headers = [run.header for run in runs]
        rows = {name: [_plain(row) for row in rows] for name, rows in found.items()}
        click.echo(encode({"runs": headers, "against": reference, "seed": seed, "rows": rows}))
        return
    from oled_sim.cli.compare_table import print_comparison

    print_comparison({run.trace: run.header for run in runs}, found, reference, seed)


def _plain(row: Row) -> dict[str, Any]:
    """Return a row as plain data."""
    from dataclasses import asdict

    found = asdict(row)
    del found["budget"], found["tpot_ratio"]
    return found | {
        "cache": row.budget.cache,
        "tpot_ratio": row.tpot_ratio.value,
        "low": row.tpot_ratio.low,
        "high": row.tpot_ratio.high,
        "requests": row.tpot_ratio.requests,
    }


def _draw(path: Path, found: Mapping[str, Sequence[Row]], reference: str) -> None:
    import pandas as pd

    from oled_sim.plotting.results import draw_ratios
    from oled_sim.plotting.style import save

    table = pd.DataFrame(
        {
            "run": f"{name}, batch {row.batch}, link {row.link_gb_s:.3g} GB/s",
            "policy": row.spec,
            "cache": row.budget.cache,
            "ratio": row.tpot_ratio.value,
            "low": row.tpot_ratio.low,
            "high": row.tpot_ratio.high,
        }
        for name, rows in found.items()
        for row in rows
        if row.spec != reference
    )
    save(draw_ratios(table, reference), path)
