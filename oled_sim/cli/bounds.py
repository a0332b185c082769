"""``oled-sim bounds``: policies beside what none of them can do better."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from oled_sim.cli.options import (
    batch_option,
    cache_bytes_option,
    cache_option,
    cost_options,
    policy_option,
    rule_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oled_sim.bounds.report import Comparison, Row

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim bounds nano-gsm8k --cache 40 --policy lru --policy oled
  oled-sim bounds nano-gsm8k --cache 40 --policy oled --request 4
  oled-sim bounds my-trace --cache 16 --cache 40 --policy ./mine.py --json
"""


@click.command(epilog=EPILOG)
@click.argument("trace", metavar="TRACE")
@policy_option
@cache_option
@cache_bytes_option
@cost_options
@batch_option
@rule_options
@click.option(
    "--request",
    type=int,
    metavar="N",
    help="Run request N alone, from an empty cache, and show the least work of its misses.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def bounds(
    trace: str, policies: tuple[str, ...], caches: tuple[str, ...], sizes: tuple[str, ...],
    profile: str | None, geometry: str | None, extrapolate: bool, request: int | None,
    as_json: bool, **rules: Any,
) -> None:  # fmt: skip
    """Show what no policy can do better on a trace, and how far policies are from it.

    TRACE is a trace directory, or one that ships with oled-sim. docs/bounds.md says what each bound
    does and does not promise; above all, the most hits are not the least time.
    """
    from oled_sim.bounds.report import Bounds, OneRequest, installed_bounds
    from oled_sim.cli.progress import kernels_of, progress
    from oled_sim.cli.simulating import (
        ALWAYS_READ,
        asked_for,
        costs_for,
        describe,
        expert_bytes_of,
        note_few,
        note_moot,
    )
    from oled_sim.engine.rules import Rules, split_requests
    from oled_sim.engine.source import TraceSource
    from oled_sim.errors import UsageError
    from oled_sim.trace import open_trace

    if not caches and not sizes:
        raise UsageError("no cache size: give --cache, such as --cache 40, or --cache-bytes")
    known = installed_bounds()
    parsed, budgets = asked_for(policies or tuple(known), caches, sizes)
    settings = Rules(**(rules if request is None else _alone(rules)))
    opened = open_trace(trace)
    note_moot(settings, [settings.batch])
    note_few({trace: opened}, settings.requests)
    costs = costs_for(opened, geometry, profile, extrapolate)
    used = [*known.values(), *parsed.values()]
    source = TraceSource(
        opened, frozenset().union(*(p.needs | p.wants for p in used)) | ALWAYS_READ
    )
    if request is not None:
        source = OneRequest(source, request)
    header = describe(opened, costs, settings) | {
        "splits": asdict(split_requests(source.requests, settings))
    }
    expert_bytes = expert_bytes_of(opened, costs)
    with progress(kernels_of(used)) as note:
        runs = Bounds(source, costs, settings, expert_bytes, known)
        found = runs.compare(parsed if policies else {}, budgets, note)
    if as_json:
        click.echo(to_json(header, found))
    else:
        from oled_sim.cli.bounds_table import print_bounds

        print_bounds(header, found)


def _alone(rules: dict[str, Any]) -> dict[str, Any]:
    """Return the rules for one request alone."""
    from oled_sim.errors import UsageError

    if any(rules[name] is not None for name in ("warmup", "history", "requests")):
        raise UsageError(
            "--request runs one request alone: leave out --warmup, --history and --requests"
        )
    return rules | {"warmup": 0, "history": 0}


def to_json(header: dict[str, Any], comparisons: Sequence[Comparison]) -> str:
    """Return header and comparisons as one JSON object; NaN (0/0) becomes null."""
    import msgspec

    document = header | {"comparisons": [_comparison(c) for c in comparisons]}
    return msgspec.json.encode(document).decode()


def _comparison(comparison: Comparison) -> dict[str, Any]:
    from oled_sim.bounds.report import gap

    return {
        "cache": comparison.budget.cache,
        "cache_bytes": comparison.budget.size_bytes,
        "least_work_us": comparison.least_work_us,
        "most_hits_in_one_pool": comparison.most_hits_in_one_pool,
        "bounds": [_row(row) for row in comparison.bounds],
        "policies": [
            _row(row) | {"gaps": {b.name: gap(row, b)._asdict() for b in comparison.bounds}}
            for row in comparison.policies
        ],
    }


def _row(row: Row) -> dict[str, Any]:
    result = row.result
    return {
        "name": row.name,
        "kind": row.kind,
        "scope": result.rules.scope,
        "layer_slots": result.budget.slots,
        "run": row.work._asdict(),
        **result.to_dict(),
    }
