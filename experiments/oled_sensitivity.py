"""What OLED's open constants decide: each varied by itself, around the defaults.

The paper names no values for them; ``policies/oled.py`` says what each means. To run it::

    python -m oled_sim.experiments.oled_sensitivity --cache 8,16,40,80

docs/oled-sensitivity.md holds the table of the bundled traces, and what it shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import click

from oled_sim.cli.grids import GridRun, grid_of, run_grids
from oled_sim.comparison import Row, compare
from oled_sim.engine.rules import Rules
from oled_sim.policy_spec import load_policy, parse_policy

from ._tables import Measured, run_script, sections, table_options

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


def measure(
    traces: Sequence[str],
    caches: Sequence[str],
    variations: Sequence[str] = VARIATIONS,
    confidence: Sequence[str] = CONFIDENCE,
    *,
    requests: int | None = None,
    jobs: int | None = 1,
) -> Measured:
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
    return Measured({run.trace: run.header for run in modes[0]}, rows)


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


def markdown(found: Measured) -> str:
    """Return the defaults, and a table per trace."""
    defaults = load_policy(DEFAULT)().describe()
    said = ", ".join(f"`{name}={value}`" for name, value in defaults.items())
    first = f"Defaults: {said}, `confidence=previous`."
    return "\n\n".join([first, *sections(found, DEFAULT), LEGEND]) + "\n"


LEGEND = r"""TPOT of the first row in ms, of the others relative to it, with the 95 % bootstrap
interval over requests in pairs; below it hit rate and utilization, in %. \* sees what is known only
later."""


EPILOG = """\b
Examples:
  python -m oled_sim.experiments.oled_sensitivity
  python -m oled_sim.experiments.oled_sensitivity --trace nano-gsm8k --cache 40 --out table.csv
"""


@click.command(epilog=EPILOG)
@table_options("8,16,40,80")
def main(**asked: Any) -> None:
    """Vary OLED's open constants one at a time, and print what each changes."""
    run_script(measure, markdown, **asked)


if __name__ == "__main__":
    main()
