"""``oled-sim curve``: the hit rate with every cache size, from one pass over a trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from oled_sim.cli.options import DEFAULT_TRACE, batch_option, policy_option, rule_options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import pyarrow as pa

    from oled_sim.bounds.policy_curves import HitCurve
    from oled_sim.engine.rules import Rules
    from oled_sim.policy import Policy
    from oled_sim.sweep import Progress
    from oled_sim.trace import Trace

# Heavy modules are imported by the functions that need them: `--help` must stay fast.

EPILOG = """\b
Examples:
  oled-sim curve --policy lru --policy lfu --cache 8:128:8
  oled-sim curve nano-gsm8k nano-humaneval --policy lru --scope global --plot curve.png
  oled-sim curve my-trace --policy lfu:count=tokens --json
"""


class CurveRun(NamedTuple):
    """The curves of one trace. ``header``: what they must say."""

    trace: str
    header: dict[str, Any]
    curves: list[HitCurve]


@click.command(epilog=EPILOG)
@click.argument("traces", nargs=-1, metavar="[TRACE]...")
@policy_option
@click.option(
    "--cache",
    "caches",
    multiple=True,
    metavar="C",
    help="Show only these cache sizes, such as 8,16 or 8:128:8. Default: 0 to all experts.",
)
@batch_option
@rule_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write one row per trace, policy and cache size: .parquet or .csv.",
)
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw the hit rate against the cache size, as .png or .svg.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
def curve(
    traces: tuple[str, ...], policies: tuple[str, ...], caches: tuple[str, ...], as_json: bool,
    out: Path | None, plot: Path | None, force: bool, **rules: Any,
) -> None:  # fmt: skip
    """Find the hits of policies with every cache size on every TRACE, by default mini-gsm8k.

    One pass per policy does for all sizes, and gives exactly the hits of a run with each. Only for
    stack policies, whose larger caches hold what smaller ones hold, such as lru and lfu; run
    others with oled-sim sweep.
    """
    from oled_sim.bounds.curves import update_list
    from oled_sim.cli.files import FIGURE, TABLE, check_files
    from oled_sim.cli.grids import encode
    from oled_sim.cli.progress import progress
    from oled_sim.cli.simulating import note_few, note_moot
    from oled_sim.cli.traces import open_traces
    from oled_sim.engine.rules import Rules
    from oled_sim.policy_spec import parse_policies
    from oled_sim.sweep import part_of

    parsed, settings = parse_policies(policies), Rules(**rules)
    shown = _capacities(caches)
    check_files(
        {"--out": out, "--plot": plot}, forms={"--out": TABLE, "--plot": FIGURE}, force=force
    )
    opened = open_traces(traces or (DEFAULT_TRACE,))
    note_moot(settings, [settings.batch])
    note_few(opened, settings.requests)
    with progress([update_list]) as report:
        parts = len(opened) * len(parsed)
        reports = (part_of(report, i, parts) for i in range(parts))
        runs = [_run(name, trace, parsed, settings, reports) for name, trace in opened.items()]
    if out is not None or plot is not None:
        _write(out, plot, runs)
    if as_json:
        click.echo(encode({"runs": [_document(run) for run in runs]}))
        return
    for i, run in enumerate(runs):
        if i > 0:
            click.echo()
        _print(run, shown)


def _capacities(texts: Sequence[str]) -> list[int] | None:
    from oled_sim.engine.budget import parse_capacities

    found = [c for text in texts for c in parse_capacities(text)]
    return list(dict.fromkeys(found)) or None


def _run(
    name: str,
    trace: Trace,
    policies: dict[str, Policy],
    rules: Rules,
    reports: Iterator[Progress],
) -> CurveRun:
    from oled_sim.bounds.policy_curves import policy_curve
    from oled_sim.cli.simulating import costs_for, describe, expert_bytes_of, source_for

    costs = costs_for(trace, None, None, extrapolate=True)  # hits do not depend on them
    curves = [
        policy_curve(
            source_for(trace, [policy]),
            policy,
            costs,
            rules,
            spec=spec,
            expert_bytes=expert_bytes_of(trace, costs),
            progress=next(reports),
        )
        for spec, policy in policies.items()
    ]
    return CurveRun(name, describe(trace, costs, rules), curves)


def _document(run: CurveRun) -> dict[str, Any]:
    """Return what JSON says; costs and profile have no part in it."""
    about = {k: v for k, v in run.header.items() if k not in ("cost_geometry", "profile")}
    return about | {"curves": [_plain(curve) for curve in run.curves]}


def _plain(curve: HitCurve) -> dict[str, Any]:
    return {
        "spec": curve.spec,
        "cache": list(range(len(curve.hits))),
        "hits": curve.hits.tolist(),
        "activations": curve.activations,
        "hit_rate": curve.hit_rate.tolist(),
        "prefill_hits": curve.prefill_hits.tolist(),
        "prefill_activations": curve.prefill_activations,
        "hit_rate_with_prefill": curve.hit_rate_with_prefill.tolist(),
    }


def _table(runs: Sequence[CurveRun]) -> pa.Table:
    import pyarrow as pa

    def rows(trace: str, curve: HitCurve) -> pa.Table:
        plain = _plain(curve)
        spec, number = plain.pop("spec"), len(curve.hits)
        columns = {k: v if isinstance(v, list) else [v] * number for k, v in plain.items()}
        return pa.table({"trace": [trace] * number, "policy": [spec] * number, **columns})

    return pa.concat_tables([rows(run.trace, curve) for run in runs for curve in run.curves])


def _write(out: Path | None, plot: Path | None, runs: Sequence[CurveRun]) -> None:
    table = _table(runs)
    if out is not None:
        from oled_sim.engine.results import write_table

        write_table(out, table, {"runs": {run.trace: run.header for run in runs}})
    if plot is not None:
        from oled_sim.plotting.results import draw_curves
        from oled_sim.plotting.style import save

        save(draw_curves(table.to_pandas()), plot)


def _print(run: CurveRun, shown: list[int] | None) -> None:
    from oled_sim.cli.run_table import percent, print_facts
    from oled_sim.cli.tables import print_notes, print_table, table_console

    console = table_console()
    print_facts(console, run.header, ("Trace", "Routing", "Rules"))
    experts = run.header["routing_geometry"]["experts"]
    rows = []
    for cache in range(experts + 1) if shown is None else shown:
        c = min(cache, experts)
        rates = [(f.hit_rate[c], f.hit_rate_with_prefill[c]) for f in run.curves]
        rows.append([str(cache), *(percent(rate, 2) for pair in rates for rate in pair)])
    names = [name for found in run.curves for name in (found.spec, f"{found.spec} all")]
    print_table(console, ["cache", *names], rows)
    legend = "|R ∩ A| / |A| of decode passes; all: with prefill passes. cache: slots per MoE layer."
    print_notes(console, [legend])
