"""What OLED's open constants decide: each varied by itself, around the defaults.

The paper names no values for them; ``policies/oled.py`` says what each means. To run it::

    python -m oled_sim.experiments.oled_sensitivity --cache 8,16,40,80

docs/oled-sensitivity.md holds the table of the bundled traces, and what it shows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import click
import pyarrow as pa

from oled_sim.cli.grids import GridRun, check_files, encode, grid_of, run_grids
from oled_sim.comparison import Ratio, Row, compare
from oled_sim.engine.output import NewFile
from oled_sim.engine.results import write_table
from oled_sim.engine.rules import Rules
from oled_sim.errors import OledSimError
from oled_sim.policy_spec import load_policy, parse_policy

DEFAULT = "oled"
VARIATIONS = (
    *("psi=square", "psi=sqrt", "psi=one"),
    *("stale=last_priority", "stale=id"),
    *("allocate_every=1", "allocate_every=20", "smoothing=0.1", "smoothing=1", "allocate=uniform"),
    *("mean_tokens=1", "mean_tokens=4", "mean_tokens=16"),
    *("swaps=0", "swaps=1", "swaps=32"),
    *("slack=0", "slack=0.25", "slack=0.5", "slack=100", "slack=100,swaps=32"),
    *("reuse_weight=0", "reuse_weight=0.25", "reuse_weight=4"),
    *("dispatch=transfer", "dispatch=load", "dispatch=exact"),
    *("dispatch=exact,reuse_weight=0", "dispatch=exact,reuse_weight=4"),
)
"""Parameters that differ from the defaults. ``mean_tokens`` sets ρ: an event's own mean otherwise.
A slack of 100 lets swaps leave ρ|M| altogether."""

CONFIDENCE = ("end", "current")
"""Rules for the confidence that the policy sees, besides ``previous``."""

TRACES = ("nano-gsm8k", "nano-humaneval")
CACHES = ("8,16,40,80",)


class Sensitivity(NamedTuple):
    """What was measured.

    ``headers``: by trace, what its results must say. ``rows``: by trace, by cache, variations in
    order, each relative to the defaults with this cache.
    """

    headers: dict[str, dict[str, Any]]
    rows: dict[str, list[Row]]


def measure(
    traces: Sequence[str] = TRACES,
    caches: Sequence[str] = CACHES,
    variations: Sequence[str] = VARIATIONS,
    confidence: Sequence[str] = CONFIDENCE,
    *,
    requests: int | None = None,
    jobs: int | None = 1,
) -> Sensitivity:
    """Run the defaults and every variation.

    Args:
        traces: names or folders.
        caches: experts per layer, as on a command line.
        variations: parameters of the policy. confidence: rules besides ``previous``.
        requests: use only this many of each trace.
        jobs: runs at the same time, None as many as cores; the results are the same.

    Raises:
        UsageError, TraceError: as ``oled-sim compare``.
    """
    asked: dict[str, dict[str, str]] = {"previous": {DEFAULT: DEFAULT}}
    asked["previous"] |= {variation: f"{DEFAULT}:{variation}" for variation in variations}
    asked |= {mode: {f"confidence={mode}": DEFAULT} for mode in confidence}
    modes = [_run(traces, caches, mode, specs, requests, jobs) for mode, specs in asked.items()]
    rows = {runs[0].trace: _beside(runs) for runs in zip(*modes, strict=True)}
    return Sensitivity({run.trace: run.header for run in modes[0]}, rows)


def _beside(runs: Sequence[GridRun]) -> list[Row]:
    """Set the runs of a trace under all rules beside the defaults."""
    return compare([[*chain.from_iterable(run.results for run in runs)]], DEFAULT)


def _run(
    traces: Sequence[str],
    caches: Sequence[str],
    mode: str,
    specs: Mapping[str, str],
    requests: int | None,
    jobs: int | None,
) -> list[GridRun]:
    policies = {label: parse_policy(spec) for label, spec in specs.items()}
    grid, rules = grid_of(policies, caches, None, "1"), Rules(confidence=mode, requests=requests)
    return run_grids(traces, grid, rules, model=(None, None, False), jobs=jobs)


def tidy(found: Sensitivity) -> pa.Table:
    """Return one row per trace, variation and cache: times in µs, shares from 0 to 1."""
    return pa.Table.from_pylist(
        [
            {
                "trace": trace,
                "variation": row.spec,
                "cache": row.budget.cache,
                "causal": row.causal,
                "tpot_us": row.tpot_us,
                "tpot_ratio": row.tpot_ratio.value,
                "low": row.tpot_ratio.low,
                "high": row.tpot_ratio.high,
                "requests": row.tpot_ratio.requests,
                "hit_rate": row.hit_rate,
                "utilization": row.utilization,
            }
            for trace, rows in found.rows.items()
            for row in rows
        ]
    )


def markdown(found: Sensitivity) -> str:
    """Return the defaults, and a table per trace."""
    defaults = ", ".join(f"`{name}={value}`" for name, value in _defaults().items())
    parts = [f"Defaults: {defaults}, `confidence=previous`."]
    for trace, rows in found.rows.items():
        profile = found.headers[trace]["profile"]["name"]
        experts = found.headers[trace]["routing_geometry"]["experts"]
        counted = rows[0].tpot_ratio.requests
        parts.append(
            f"**{trace}**: {experts} experts per layer, {counted} counted requests, profile"
            f" {profile}.\n\n" + "\n".join(_lines(rows))
        )
    return "\n\n".join([*parts, LEGEND]) + "\n"


LEGEND = r"""TPOT of the first row in ms, of the others relative to it, with the 95 % bootstrap
interval over requests in pairs; below it hit rate and utilization, in %. \* sees what is known only
later."""


def _defaults() -> Mapping[str, Any]:
    return load_policy(DEFAULT)().describe()


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a table: a row per variation, a column per cache."""
    caches = list(dict.fromkeys(row.budget.cache for row in rows))
    cells = {(row.spec, row.budget.cache): cell(row) for row in rows}
    yield "| | " + " | ".join(f"C = {cache}" for cache in caches) + " |"
    yield "|---" + "|---:" * len(caches) + "|"
    for name, mark in {row.spec: "" if row.causal else r" \*" for row in rows}.items():
        yield f"| `{name}`{mark} | " + " | ".join(cells[name, c] for c in caches) + " |"


def cell(row: Row) -> str:
    """Return what a table says of a variation with one cache."""
    shares = f"{row.hit_rate:.1%}, {row.utilization:.1%}".replace("%", "")
    time = f"{row.tpot_us / 1000:.2f} ms" if row.spec == DEFAULT else _interval(row.tpot_ratio)
    return f"{time}<br>{shares}"


def _interval(ratio: Ratio) -> str:
    known = ratio.low == ratio.low
    return f"{ratio.value:.3f}" + (f" ({ratio.low:.3f}–{ratio.high:.3f})" if known else "")


EPILOG = """\b
Examples:
  python -m oled_sim.experiments.oled_sensitivity
  python -m oled_sim.experiments.oled_sensitivity --trace nano-gsm8k --cache 40 --out table.csv
"""


@click.command(epilog=EPILOG)
@click.option("--trace", "traces", multiple=True, metavar="TRACE", help="Default: both bundled.")
@click.option("--cache", "caches", multiple=True, metavar="C", help="Default: 8,16,40,80.")
@click.option("--requests", type=click.IntRange(min=1), metavar="N", help="Only so many.")
@click.option("--jobs", type=click.IntRange(min=1), metavar="N", help="Default: as many as cores.")
@click.option("--json", "as_json", is_flag=True, help="Print rows as JSON instead of tables.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the tables as .md, or a row per trace, variation and cache as .csv or .parquet.",
)
@click.option("--force", is_flag=True, help="Overwrite a file that exists.")
def main(
    traces: tuple[str, ...], caches: tuple[str, ...], requests: int | None, jobs: int | None,
    as_json: bool, out: Path | None, force: bool,
) -> None:  # fmt: skip
    """Vary OLED's open constants one at a time, and print what each changes."""
    try:
        check_files(out, figure=None, force=force)
        found = measure(traces or TRACES, caches or CACHES, requests=requests, jobs=jobs)
        if out is not None:
            _write(out, found)
    except OledSimError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    if as_json:
        rows = tidy(found).to_pylist()
        click.echo(encode({"runs": found.headers, "defaults": _defaults(), "rows": rows}))
    else:
        click.echo(markdown(found), nl=False)


def _write(path: Path, found: Sensitivity) -> None:
    if path.suffix == ".md":
        with NewFile(path) as file:
            file.temporary.write_text(markdown(found), encoding="utf-8")
    else:
        write_table(path, tidy(found), {"runs": found.headers})


if __name__ == "__main__":
    main()
