"""``oled-sim run``: simulate policies with several cache sizes on one trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from oled_sim.costs.lanes import LaneCosts
    from oled_sim.engine.budget import Budget
    from oled_sim.engine.results import EventFile
    from oled_sim.engine.rules import Rules
    from oled_sim.engine.runner import Contender, Observer, Result
    from oled_sim.engine.simulation import GroupRecord
    from oled_sim.policy import Policy
    from oled_sim.timeline_export import TimelineFile
    from oled_sim.trace import Trace

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

DEFAULT_TRACE = "nano-gsm8k"
ALWAYS_READ = frozenset({"ids", "gates", "confidence", "token_state"})
"""Small signals, decoded whether a policy declares them or not."""

EPILOG = """\b
Examples:
  oled-sim run --policy lru --policy oled --cache 16 --cache 40
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
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="SPEC",
    help="name, name:variant, name:key=value,…, module:Class, ./file.py, or a .toml file with"
    " policies; repeatable. `oled-sim policies` lists names and keys.",
)
@click.option(
    "--cache",
    "caches",
    multiple=True,
    type=int,
    metavar="C",
    help="Average number of resident experts per MoE layer; repeatable.",
)
@click.option(
    "--cache-bytes",
    "sizes",
    multiple=True,
    metavar="SIZE",
    help="Bytes of resident experts in all, such as 4000MiB; repeatable.",
)
@click.option(
    "--profile",
    metavar="NAME_OR_FILE",
    help="Hardware profile: a bundled name or a .toml file. Default: the geometry's.",
)
@click.option(
    "--geometry",
    metavar="NAME",
    help="Model size that costs are for. Default: what the trace stands for, else llada2.0-mini.",
)
@click.option("--extrapolate", is_flag=True, help="Allow counts outside the profiled range.")
@click.option(
    "--scope",
    type=click.Choice(["layer", "global"]),
    default="layer",
    show_default=True,
    help="One pool per layer, or one for all.",
)
@click.option(
    "--batch",
    type=int,
    default=1,
    show_default=True,
    metavar="B",
    help="Requests that run together.",
)
@click.option(
    "--batch-mode",
    type=click.Choice(["lockstep", "barrier", "refill"]),
    default="lockstep",
    show_default=True,
    help="Finished requests leave; or all blocks start together; or the next request moves up.",
)
@click.option(
    "--staging",
    type=int,
    default=16,
    show_default=True,
    metavar="N",
    help="Slots where transfers land, on top of the cache.",
)
@click.option(
    "--warmup",
    type=int,
    metavar="N",
    help="Requests that come first and are not counted. Default: 1, but 0 if it is the only one.",
)
@click.option(
    "--history",
    type=int,
    metavar="N",
    help="Requests that policies may learn from, not counted. Default: the first third.",
)
@click.option("--cold", is_flag=True, help="Empty the cache before every request.")
@click.option(
    "--confidence",
    type=click.Choice(["previous", "end", "current"]),
    default="previous",
    show_default=True,
    help="Which confidence a policy sees; 'current' is not causal.",
)
@click.option("--requests", type=int, metavar="N", help="Use only the first N requests.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a Parquet file with one row per policy, cache and request.",
)
@click.option(
    "--events",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a Parquet file with one row per event.",
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
    default=1,
    show_default=True,
    metavar="N",
    help="Counted requests that the timeline shows.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def run(
    source: str, policies: tuple[str, ...], caches: tuple[int, ...], sizes: tuple[str, ...],
    profile: str | None, geometry: str | None, extrapolate: bool, as_json: bool,
    out: Path | None, events: Path | None, timeline: Path | None, timeline_requests: int,
    force: bool, **rules: Any,
) -> None:  # fmt: skip
    """Simulate policies on a trace and compare their time per output token.

    Every policy runs with every cache size, references such as 'full' once. Times are simulated
    from the profile's measured costs; the time that a policy's own decisions take is not part of
    them.
    """
    from oled_sim.contenders import contenders as all_contenders
    from oled_sim.engine.rules import Rules
    from oled_sim.trace import open_trace

    parsed, budgets = _asked_for(policies, caches, sizes)
    settings = Rules(**rules)
    files = Files(out, events, timeline, timeline_requests)
    _check_files(files, force)
    trace = open_trace(source)
    contenders = all_contenders(parsed, budgets, trace.geometry.experts)
    costs = _costs(trace, geometry, profile, extrapolate)
    header = describe(trace, costs, settings)
    results = _simulate(trace, contenders, costs, settings, files, header)
    if files.results is not None:
        from oled_sim.engine.results import write_results

        write_results(files.results, results, header)
    if as_json:
        click.echo(to_json(header, results))
    else:
        from oled_sim.cli.run_table import print_results

        print_results(header, results)


def _asked_for(
    policies: Sequence[str], caches: Sequence[int], sizes: Sequence[str]
) -> tuple[dict[str, Policy], list[Budget]]:
    """Return policies by label, and budgets in the order given."""
    from oled_sim.engine.budget import Budget, parse_bytes
    from oled_sim.errors import UsageError
    from oled_sim.policy_spec import parse_policies

    if not policies:
        raise UsageError("no policy to run: give at least one, such as --policy oled")
    budgets = [Budget(cache=c) for c in dict.fromkeys(caches)]
    budgets += [Budget(size_bytes=parse_bytes(s)) for s in dict.fromkeys(sizes)]
    parsed = parse_policies(policies)
    if not budgets and any(p.residency == "budget" for p in parsed.values()):
        raise UsageError("no cache size to run: give --cache, such as --cache 40, or --cache-bytes")
    return parsed, budgets


def _check_files(files: Files, force: bool) -> None:
    """Find out before the simulation whether its results can be written."""
    from oled_sim.engine.output import refuse_existing
    from oled_sim.errors import UsageError

    wanted = [path for path in (files.results, files.events, files.timeline) if path is not None]
    for path in wanted:
        refuse_existing(path, force=force)
    if len({path.resolve() for path in wanted}) < len(wanted):
        raise UsageError("--out, --events and --timeline name the same file: give each its own")
    if files.timeline_requests < 1:
        raise UsageError(
            f"a timeline of {files.timeline_requests} requests is empty: give 1 or more"
        )


def _costs(trace: Trace, geometry: str | None, profile: str | None, extrapolate: bool) -> LaneCosts:
    from oled_sim.costs.lanes import load_costs
    from oled_sim.geometry import DEFAULT_GEOMETRY, find_geometry

    name = geometry or trace.manifest.stands_for or DEFAULT_GEOMETRY
    return load_costs(find_geometry(name), profile, extrapolate=extrapolate)


def _simulate(
    trace: Trace,
    contenders: list[Contender],
    costs: LaneCosts,
    rules: Rules,
    files: Files,
    header: dict[str, Any],
) -> list[Result]:
    import numpy as np

    from oled_sim.engine.runner import simulate_all
    from oled_sim.engine.source import TraceSource

    own = trace.manifest.expert_bytes
    sizes = own or [costs.geometry.expert_bytes] * len(trace.geometry.layers)
    expert_bytes = np.array(sizes, np.int64)
    needed = frozenset().union(*(c.policy.needs | c.policy.wants for c in contenders))
    events = _event_file(files, trace, contenders, header)
    timeline = _timeline_file(files, expert_bytes, header)
    with ExitStack() as stack, _progress() as progress:
        observers = [stack.enter_context(f).add for f in (events, timeline) if f is not None]
        return simulate_all(
            TraceSource(trace, needed | ALWAYS_READ),
            contenders,
            costs,
            rules,
            expert_bytes=expert_bytes,
            observe=_all_of(observers),
            keep_log=timeline.draws if timeline is not None else False,
            progress=progress,
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


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that moves a bar on a terminal's stderr."""
    from rich.console import Console
    from rich.progress import Progress

    from oled_sim.engine.events import proceed
    from oled_sim.engine.jit import is_compiled

    console = Console(stderr=True)
    label = "Simulating" if is_compiled(proceed) else "Compiling once, then simulating"
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def describe(trace: Trace, costs: LaneCosts, rules: Rules) -> dict[str, Any]:
    """Return what every result must say: trace, both geometries, profile, run rules."""
    from dataclasses import asdict

    from oled_sim import __version__
    from oled_sim.engine.rules import split_requests

    manifest, profile = trace.manifest, costs.profile
    return {
        "version": __version__,
        "trace": {
            "path": str(trace.path),
            "name": trace.path.name,
            "origin": manifest.origin,
            "model": manifest.model.name,
            "checksum": manifest.checksum,
        },
        "routing_geometry": asdict(trace.geometry),
        "cost_geometry": asdict(costs.geometry) | {"expert_bytes": costs.geometry.expert_bytes},
        "stands_for": manifest.stands_for,
        "expert_bytes": manifest.expert_bytes,
        "profile": {
            "name": profile.name,
            "status": profile.status,
            "provisional": profile.provisional,
            "gpu": profile.hardware.gpu,
            "cpu": profile.hardware.cpu,
            "workers": costs.workers,
            "link_gb_s": costs.link_bandwidth_gb_s,
            "extrapolate": costs.extrapolate,
        },
        "rules": asdict(rules),
        "splits": asdict(split_requests(trace.requests, rules)),
    }


def to_json(header: dict[str, Any], results: Sequence[Result]) -> str:
    """Return header and results as one JSON object; NaN (0/0) becomes null."""
    import msgspec

    document = header | {"results": [r.to_dict() for r in results]}
    return msgspec.json.encode(document).decode()
