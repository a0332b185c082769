"""``oled-sim run``: simulate policies with several cache sizes on one trace."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from oled_sim.cli.options import (
    DEFAULT_TRACE,
    batch_option,
    cache_bytes_option,
    cache_option,
    cost_options,
    policy_option,
    rule_options,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from oled_sim.costs.lanes import LaneCosts
    from oled_sim.engine.results import EventFile
    from oled_sim.engine.rules import Rules
    from oled_sim.engine.runner import Contender, Observer, Result
    from oled_sim.engine.simulation import GroupRecord
    from oled_sim.timeline_export import TimelineFile
    from oled_sim.trace import Trace

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim run --policy lru --policy oled --cache 16,40
  oled-sim run --policy oled:priority,psi=square --cache-bytes 800MiB --json
  oled-sim run --policy ./mine.py:decay=0.5 --trace my-trace --cache 40 --out results.parquet
  oled-sim run --policy lru --policy oled --cache 16 --timeline lanes.pftrace
"""


class Files(NamedTuple):
    """Where results go besides the screen."""

    results: Path | None
    events: Path | None
    timeline: Path | None
    timeline_requests: int


@click.command(epilog=EPILOG)
@click.option(
    "--trace",
    "source",
    default=DEFAULT_TRACE,
    show_default=True,
    metavar="PATH_OR_NAME",
    help="A trace directory, or one that ships with oled-sim.",
)
@policy_option
@cache_option
@cache_bytes_option
@cost_options
@batch_option
@rule_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one row per policy, cache and request: .parquet or .csv.",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one row per event, as .parquet.",
)
@click.option(
    "--timeline",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a Perfetto trace of what every lane does, for ui.perfetto.dev.",
)
@click.option(
    "--timeline-requests",
    type=int,
    metavar="N",
    help="Counted requests that the timeline shows. Default: 1.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def run(
    source: str, policies: tuple[str, ...], caches: tuple[str, ...], sizes: tuple[str, ...],
    profile: str | None, geometry: str | None, extrapolate: bool, as_json: bool,
    out: Path | None, events: Path | None, timeline: Path | None, timeline_requests: int | None,
    force: bool, **rules: Any,
) -> None:  # fmt: skip
    """Simulate policies on a trace and compare their time per output token.

    Every policy runs with every cache size, references such as 'full' once. Times are simulated
    from the profile's measured costs; the time that a policy's own decisions take is not part of
    them.
    """
    from oled_sim.cli.simulating import (
        asked_for,
        costs_for,
        describe,
        note_ample,
        note_few,
        note_moot,
    )
    from oled_sim.contenders import contenders as all_contenders
    from oled_sim.engine.rules import Rules
    from oled_sim.trace import open_trace

    parsed, budgets = asked_for(policies, caches, sizes)
    settings = Rules(**rules)
    files = _checked_files(out, events, timeline, timeline_requests, force=force)
    trace = open_trace(source)
    note_moot(settings, [settings.batch])
    note_few({source: trace}, settings.requests)
    note_ample(budgets, [trace.geometry.experts])
    contenders = all_contenders(parsed, budgets, trace.geometry.experts)
    costs = costs_for(trace, geometry, profile, extrapolate)
    header = describe(trace, costs, settings)
    results = _simulate(trace, contenders, costs, settings, files, header)
    try:
        _write(files.results, results, header)
    finally:  # a disk that is full takes the file, not the results
        _print(header, results, as_json=as_json)


def _checked_files(
    out: Path | None,
    events: Path | None,
    timeline: Path | None,
    requests: int | None,
    *,
    force: bool,
) -> Files:
    """Find out before the simulation whether its results can be written."""
    from oled_sim.cli.files import PARQUET, TABLE, check_files
    from oled_sim.errors import UsageError

    if timeline is None and requests is not None:
        raise UsageError("--timeline-requests needs a timeline: add --timeline FILE")
    if requests is not None and requests < 1:
        raise UsageError(f"a timeline of {requests} requests is empty: give 1 or more")
    check_files(
        {"--out": out, "--events": events, "--timeline": timeline},
        forms={"--out": TABLE, "--events": PARQUET},
        force=force,
    )
    return Files(out, events, timeline, requests or 1)


def _write(path: Path | None, results: Sequence[Result], header: dict[str, Any]) -> None:
    if path is not None:
        from oled_sim.engine.results import about_policies, request_table, write_table

        rows = request_table(results, header["trace"]["name"])
        write_table(path, rows, header | about_policies(results))


def _print(header: dict[str, Any], results: Sequence[Result], *, as_json: bool) -> None:
    if as_json:
        from oled_sim.cli.simulating import to_json

        click.echo(to_json(header, results))
    else:
        from oled_sim.cli.run_table import print_results

        print_results(header, results)


def _simulate(
    trace: Trace,
    contenders: list[Contender],
    costs: LaneCosts,
    rules: Rules,
    files: Files,
    header: dict[str, Any],
) -> list[Result]:
    from oled_sim.cli.progress import kernels_of, progress
    from oled_sim.cli.simulating import expert_bytes_of, source_for
    from oled_sim.engine.runner import simulate_all

    expert_bytes = expert_bytes_of(trace, costs)
    events = _event_file(files, trace, contenders, header)
    timeline = _timeline_file(files, expert_bytes, header)
    kernels = kernels_of(c.policy for c in contenders)
    with ExitStack() as stack, progress(kernels) as on_progress:
        observers = [stack.enter_context(f).add for f in (events, timeline) if f is not None]
        return simulate_all(
            source_for(trace, [c.policy for c in contenders]),
            contenders,
            costs,
            rules,
            expert_bytes=expert_bytes,
            observe=_all_of(observers),
            keep_log=timeline.draws if timeline is not None else False,
            progress=on_progress,
        )


def _all_of(observers: Sequence[Observer]) -> Observer:
    def observe(contender: Contender, record: GroupRecord) -> None:
        for observer in observers:
            observer(contender, record)

    return observe


def _event_file(
    files: Files, trace: Trace, contenders: list[Contender], header: dict[str, Any]
) -> EventFile | None:
    from oled_sim.engine.results import EventFile

    if files.events is None:
        return None
    policies = {c.spec: dict(c.policy.describe()) for c in contenders}
    return EventFile(files.events, trace.geometry.layers, header | {"policies": policies})


def _timeline_file(
    files: Files, expert_bytes: NDArray[np.int64], header: dict[str, Any]
) -> TimelineFile | None:
    if files.timeline is None:
        return None
    from oled_sim.cli.run_table import facts
    from oled_sim.timeline_export import TimelineFile

    layers, counted = header["routing_geometry"]["layers"], header["splits"]["counted"]
    about = {name.lower(): value for name, value in facts(header).items()}
    drawn = counted[: files.timeline_requests]
    return TimelineFile(files.timeline, layers, expert_bytes, requests=drawn, about=about)
