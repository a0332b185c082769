"""The table that ``oled-sim run`` prints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from oled_sim.engine.runner import Result

NOT_CAUSAL = "*"
WIDTH_WITHOUT_TERMINAL = 160

LEGEND = """\
TPOT, TTFT, commit: ms, means over requests; commit is the part of TPOT spent in commit passes.
p50, p99: ms per decode pass. util: |R ∩ A| / slots at the gate; hit: |R ∩ A| / |A|; hit all: the
same with prefill passes. H2D, CPU: experts per decode pass. busy, critical: ms per decode pass of
GPU/H2D/CPU lane."""


def print_results(header: dict[str, Any], results: Sequence[Result]) -> None:
    """Print what was run, then one row per policy and cache."""
    console = table_console()
    print_facts(console, header)
    console.print(_table(results))
    console.print(Text(LEGEND), style="dim", highlight=False)
    if not all(result.causal for result in results):
        console.print(f"{NOT_CAUSAL} sees what is known only later; not achievable.", style="dim")
    for note in dict.fromkeys(f"{r.spec}: {note}" for r in results for note in r.notes):
        console.print(Text(note), style="dim", highlight=False)


def table_console() -> Console:
    """Return a console on stdout, wide enough for a table where there is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_WITHOUT_TERMINAL)


def print_facts(
    console: Console, header: dict[str, Any], names: Collection[str] | None = None
) -> None:
    """Print what results must say, a line each; only those of certain ``names`` if given."""
    for name, value in facts(header).items():
        if names is not None and name not in names:
            continue
        console.print(Text(f"{name:<9}{value}"), soft_wrap=True, highlight=False)


def facts(header: dict[str, Any]) -> dict[str, str]:
    """Return what a run's results must say, a line each."""
    trace, routing, cost = header["trace"], header["routing_geometry"], header["cost_geometry"]
    layers = routing["layers"]
    return {
        "Trace": f"{trace['name']} ({trace['origin']}, model {trace['model']}): {_split(header)}",
        "Routing": f"{len(layers)} MoE layers ({layers[0]}..{layers[-1]}) × {routing['experts']}"
        f" experts, top-{routing['top_k']}",
        "Costs": f"{cost['name']}{'' if header['stands_for'] else ' (the trace names no model)'}:"
        f" {_expert_size(header)} per expert, width {cost['hidden_size']}, charged"
        f" for {cost['dense_layers']} dense and {len(layers)} MoE layers",
        "Profile": _profile(header["profile"]),
        "Rules": _rules(header["rules"]),
    }


def _split(header: dict[str, Any]) -> str:
    """Say what the requests are for."""
    counts = {name: len(requests) for name, requests in header["splits"].items()}
    if header["rules"]["warmup"] is None and counts["warmup"] == 0:
        return f"{counts['history']} history + 1 counted request, too few for a warm-up"
    return (
        f"{counts['history']} history + {counts['warmup']} warm-up + {counts['counted']} counted"
        " requests"
    )


def _expert_size(header: dict[str, Any]) -> str:
    """Return the bytes of an expert: those of the trace, if it says them, else the geometry's."""
    own = header["expert_bytes"]
    if not own:
        return f"{header['cost_geometry']['expert_bytes'] / 2**20:.4g} MiB"
    sizes = dict.fromkeys(f"{size / 2**20:.4g}" for size in (min(own), max(own)))
    return f"{' to '.join(sizes)} MiB (the trace's own)"


def _profile(profile: dict[str, Any]) -> str:
    links = profile["link_gb_s"]
    shown = ", ".join(f"{link:.3g}" for link in (links if isinstance(links, list) else [links]))
    mark = ", provisional" if profile["provisional"] else ""
    return (
        f"{profile['name']} ({profile['status']}{mark}): {profile['gpu']}, {profile['workers']} CPU"
        f" workers, link {shown} GB/s"
    )


def _rules(rules: dict[str, Any]) -> str:
    sizes = rules["batch"] if isinstance(rules["batch"], list) else [rules["batch"]]
    batch = f"batch {', '.join(map(str, sizes))}"
    if rules["batch_mode"] != "lockstep":
        batch += f" ({rules['batch_mode']})"
    start = "cold start of every request" if rules["cold"] else "caches persist over requests"
    return (
        f"scope {rules['scope']}, {batch}, {rules['staging']} staging slots,"
        f" {start}, confidence {rules['confidence']}"
    )


def _columns(results: Sequence[Result]) -> dict[str, Callable[[Result], str]]:
    columns: dict[str, Callable[[Result], str]] = {
        "policy": lambda r: r.spec + ("" if r.causal else NOT_CAUSAL),
        "cache": _budget,
        **_varied(results),
        "TPOT": lambda r: milliseconds(r.summary.tpot_us),
        "commit": lambda r: milliseconds(r.summary.commit_tpot_us),
        "TTFT": lambda r: milliseconds(r.summary.ttft_us),
        "p50": lambda r: milliseconds(r.summary.pass_p50_us),
        "p99": lambda r: milliseconds(r.summary.pass_p99_us),
        "util": lambda r: percent(r.summary.utilization),
        "hit": lambda r: percent(r.summary.hit_rate, 2),
        "hit all": lambda r: percent(r.summary.hit_rate_with_prefill, 2),
        "H2D": lambda r: _number(r.summary.demand_per_pass, 1),
        "CPU": lambda r: _number(r.summary.cpu_per_pass, 1),
        "busy": lambda r: _lanes(r, "busy"),
        "critical": lambda r: _lanes(r, "critical"),
        "GPU GiB": lambda r: _number(r.summary.peak_gpu_bytes / 2**30, 2),
    }
    if any(r.rules.batch > 1 for r in results):
        columns["batch TPOT"] = lambda r: milliseconds(r.summary.batch_tpot_us)
    if any(r.summary.prefetched for r in results):
        columns["useful/late/wasted"] = lambda r: (
            f"{r.summary.useful}/{r.summary.late}/{r.summary.wasted}"
        )
    return columns


def _varied(results: Sequence[Result]) -> dict[str, Callable[[Result], str]]:
    """Return columns for what differs between results besides policy and cache."""
    columns: dict[str, Callable[[Result], str]] = {}
    if len({r.rules.batch for r in results}) > 1:
        columns["batch"] = lambda r: str(r.rules.batch)
    if len({r.link_gb_s for r in results}) > 1:
        columns["GB/s"] = lambda r: f"{r.link_gb_s:.3g}"
    return columns


def _table(results: Sequence[Result]) -> Table:
    columns = _columns(results)
    table = Table(pad_edge=False, box=None, header_style="bold")
    for name in columns:
        text = name == "policy"
        justify = "left" if text else "right"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=not text)
    last = None
    for result in results:
        section = result.rules.batch, result.link_gb_s, result.budget
        if last is not None and section != last:
            table.add_section()
            table.add_row()
        last = section
        table.add_row(*(Text(show(result)) for show in columns.values()))
    return table


def _budget(result: Result) -> str:
    if result.budget.size_bytes is None:
        return str(result.budget.cache)
    return f"{result.budget.size_bytes / 2**20:.4g} MiB"


def _lanes(result: Result, what: str) -> str:
    times = (getattr(result.summary, f"{lane}_{what}_us") for lane in ("gpu", "h2d", "cpu"))
    return "/".join(milliseconds(time) for time in times)


def milliseconds(time_us: float) -> str:
    """Return milliseconds with three significant digits."""
    if time_us != time_us:
        return "n/a"
    ms = time_us / 1e3
    return f"{ms:.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share as text; 0/0 is n/a."""
    return "n/a" if share != share else f"{100 * share:.{digits}f}%"


def _number(value: float, digits: int) -> str:
    return "n/a" if value != value else f"{value:.{digits}f}"
