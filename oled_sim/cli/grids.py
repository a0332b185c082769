"""What ``sweep`` and ``compare`` have in common: grids over traces, and their results as files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from oled_sim.cli.progress import kernels_of, progress
from oled_sim.cli.simulating import (
    budgets_for,
    costs_for,
    describe,
    expert_bytes_of,
    note_ample,
    note_few,
    note_moot,
    source_for,
)
from oled_sim.cli.traces import open_traces
from oled_sim.engine.results import about_policies, request_table, write_table
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Result
from oled_sim.errors import UsageError
from oled_sim.policy import Policy
from oled_sim.policy_spec import parse_policies
from oled_sim.sweep import Grid, sweep


class GridRun(NamedTuple):
    """The results of one trace. ``header``: what they must say."""

    trace: str
    header: dict[str, Any]
    results: list[Result]


def grid_of(
    policies: dict[str, Policy],
    caches: Sequence[str],
    links: str | None,
    batches: str,
    sizes: Sequence[str] = (),
) -> Grid:
    """Return the grid that the options of a command line mean.

    Raises:
        UsageError: one of them means nothing.
    """
    return Grid(
        policies,
        budgets_for(policies, caches, sizes),
        _numbers(links, float, "--h2d-gbs 12,25,50") if links is not None else [None],
        _numbers(batches, int, "--batch 1,2,4"),
    )


def _numbers(text: str, kind: Callable[[str], Any], example: str) -> list[Any]:
    try:
        return list(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise UsageError(f"{text!r} is no list of numbers: give for example {example}") from None


def run_grids(
    traces: Sequence[str],
    grid: Grid,
    rules: Rules,
    *,
    model: tuple[str | None, str | None, bool],
    jobs: int | None,
) -> list[GridRun]:
    """Run a grid over every trace.

    Args:
        traces: names or folders.
        grid: what to run.
        rules: but for the batch.
        model: geometry, profile, and whether to extrapolate.
        jobs: combinations at the same time, None as many as cores.
    """
    opened = open_traces(traces)
    note_moot(rules, grid.batches)
    note_few(opened, rules.requests)
    note_ample(grid.budgets, (trace.geometry.experts for trace in opened.values()))
    prepared = [(name, trace, costs_for(trace, *model)) for name, trace in opened.items()]
    runs, every = [], len(prepared)
    with progress(kernels_of(grid.policies.values())) as report:
        for i, (name, trace, costs) in enumerate(prepared):
            header = describe(trace, costs, rules)
            header["rules"]["batch"] = list(grid.batches)
            header["profile"]["link_gb_s"] = [
                link or costs.link_bandwidth_gb_s for link in grid.links_gb_s
            ]
            results = sweep(
                source_for(trace, grid.policies.values()),
                grid,
                costs,
                rules,
                expert_bytes=expert_bytes_of(trace, costs),
                jobs=jobs or cores(),
                progress=lambda done, total, i=i: report(i * total + done, every * total),
            )
            runs.append(GridRun(name, header, results))
    return runs


def cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def requests_of(runs: Sequence[GridRun]) -> pa.Table:
    """Return one row per trace, combination and counted request."""
    return pa.concat_tables([request_table(run.results, run.trace) for run in runs])


def write_out(path: Path, runs: Sequence[GridRun]) -> None:
    """Write :func:`requests_of` as Parquet or CSV.

    Raises:
        UsageError: it cannot be written there.
    """
    policies = about_policies(chain.from_iterable(run.results for run in runs))
    metadata = {"runs": {run.trace: run.header for run in runs}} | policies
    write_table(path, requests_of(runs), metadata)


def reference_of(policies: Sequence[str], against: str) -> tuple[dict[str, Policy], str]:
    """Return the policies by label, the one to compare with among them, and its label.

    Raises:
        UsageError: no other policy is given, or the reference runs with one budget only.
    """
    parsed, reference = parse_policies(policies), parse_policies([against])
    if len(reference) != 1:
        raise UsageError(f"{against} holds {len(reference)} policies: name the one to compare with")
    (label,) = reference
    if reference[label].residency != "budget":
        raise UsageError(f"policy {label!r} runs with one budget only: compare with another")
    return {**parsed, **reference}, label


def json_of(runs: Sequence[GridRun]) -> list[dict[str, Any]]:
    """Return header and results of every trace as plain data."""
    return [run.header | {"results": [r.to_dict() for r in run.results]} for run in runs]


def encode(document: Any) -> str:
    """Return a JSON document; NaN (0/0) becomes null."""
    return msgspec.json.encode(document).decode()
