"""Every registered policy beside the ideal cache.

To run it::

    python -m oled_sim.experiments.all_policies --cache 16,40,80

docs/policies.md holds the tables of the bundled traces, and what they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from oled_sim import plugins
from oled_sim.cli.grids import grid_of, run_grids
from oled_sim.comparison import Row, compare
from oled_sim.engine.rules import Rules
from oled_sim.policy_spec import load_policy, parse_policies

from ._tables import Measured, run_script, sections, table_options

REFERENCE = "ideal"
MORE = (
    *("lru:dispatch=load", "oled:dispatch=load", "oled:slack=0.5"),
    *("ktransformers:placement=frequency", "moe-infinity:protect=list", "finemoe:protect=list"),
)
"""Rows besides the defaults and the variants of every policy."""


def specifications() -> list[str]:
    """Return what is compared: every policy, its variants but those that change nothing, more."""
    found: list[str] = []
    for name in sorted(plugins.names(plugins.POLICIES)):
        variants = load_policy(name).variants
        found += [name, *(f"{name}:{variant}" for variant, values in variants.items() if values)]
    return [*found, *MORE]


def measure(
    traces: Sequence[str],
    caches: Sequence[str],
    specs: Sequence[str] | None = None,
    *,
    requests: int | None = None,
    jobs: int | None = 1,
) -> Measured:
    """Run all policies and set them beside the reference, which must be among them.

    Args:
        traces: names or folders.
        caches: experts per layer, as on a command line.
        specs: policies; by default :func:`specifications`.
        requests: use only this many of each trace.
        jobs: runs at the same time, None as many as cores; the results are the same.

    Raises:
        UsageError, TraceError: as ``oled-sim compare``.
    """
    policies = parse_policies(specs or specifications())
    lone = [label for label, policy in policies.items() if policy.residency != "budget"]
    grid, rules = grid_of(policies, caches, None, "1"), Rules(requests=requests)
    runs = run_grids(traces, grid, rules, model=(None, None, False), jobs=jobs)
    rows = {
        run.trace: _fastest_first(compare([run.results], REFERENCE, of_one_budget=lone))
        for run in runs
    }
    return Measured({run.trace: run.header for run in runs}, rows)


def _fastest_first(rows: Sequence[Row]) -> list[Row]:
    """Sort the policies by the sum of their ratios over all caches, caches as they are."""
    total: dict[str, float] = {}
    for row in rows:
        total[row.spec] = total.get(row.spec, 0.0) + row.tpot_ratio.value
    caches = list(dict.fromkeys(row.budget.cache for row in rows))
    return sorted(rows, key=lambda row: (caches.index(row.budget.cache), total[row.spec]))


LEGEND = r"""TPOT of the ideal cache in ms, of the others relative to it, with the 95 % bootstrap
interval over requests in pairs; below it hit rate and utilization, in %. Policies stand in order of
the sum of their ratios. `full` and `no-cache` have one budget only. \* sees what is known only
later."""


def markdown(found: Measured) -> str:
    """Return a table per trace."""
    return "\n\n".join([*sections(found, REFERENCE), LEGEND]) + "\n"


EPILOG = """\b
Examples:
  python -m oled_sim.experiments.all_policies
  python -m oled_sim.experiments.all_policies --trace nano-gsm8k --cache 40 --out table.csv
"""


@click.command(epilog=EPILOG)
@table_options("16,40,80")
def main(**asked: Any) -> None:
    """Set every registered policy, with its variants, beside the ideal cache."""
    run_script(measure, markdown, **asked)


if __name__ == "__main__":
    main()
