"""The table that ``oled-sim run`` prints."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from oled_sim.cli.tables import Row, print_notes, print_table, table_console
from oled_sim.engine.averages import ratio
from oled_sim.engine.budget import Budget, bytes_text
from oled_sim.engine.metrics import Summary
from oled_sim.engine.runner import Result

NOT_CAUSAL = "*"

LEGEND = (
    "cache: slots per MoE layer on average, or bytes in all. TPOT, TTFT, commit: ms, means over"
    " requests; commit is the part of TPOT spent in commit passes. p50, p99: ms per decode pass"
    " (denoise or commit). util: |R ∩ A| / slots at the gate; hit: |R ∩ A| / |A|; hit all: the same"
    " with prefill passes. H2D: experts copied per decode pass, on demand or ahead; CPU: experts"
    " computed there. busy, critical: ms per decode pass that the GPU/H2D/CPU lane works, and that"
    " it is what the pass waits for. GPU GiB: peak of weights, cache, staging and KV cache."
)
LEGEND_BATCH = "batch TPOT: ms, decode time of all batches / output tokens of all requests."
LEGEND_PREFETCH = (
    "ahead: prefetches among the copies of H2D, per decode pass. useful/late/wasted: prefetched"
    " experts per decode pass that a gate found resident and used / found still on their way, and"
    " waited for / that were dropped unused."
)


def print_results(
    header: dict[str, Any], results: Sequence[Result], console: Console | None = None
) -> None:
    """Print what was run, then one row per policy and cache; by default to stdout."""
    console = console or table_console()
    print_facts(console, header)
    columns, varied = _columns(results), _varied(results)
    rows, keys = _rows(columns, results), 2 + len(varied)
    print_table(console, list(columns), rows, keys=keys, left=("policy",))
    print_notes(console, _legend(results, columns))


def _legend(results: Sequence[Result], columns: Collection[str]) -> list[str]:
    """Return what explains every column that is shown, and what policies have to say."""
    notes = [LEGEND]
    notes += [LEGEND_BATCH] if "batch TPOT" in columns else []
    notes += [LEGEND_PREFETCH] if "ahead" in columns else []
    if not all(result.causal for result in results):
        notes.append(f"{NOT_CAUSAL} sees what is known only later; not achievable.")
    return notes + list(dict.fromkeys(f"{r.spec}: {note}" for r in results for note in r.notes))


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
        "cache": lambda r: budget_text(r.budget),
        **_varied(results),
        "TPOT": lambda r: milliseconds(r.summary.tpot_us),
        "commit": lambda r: milliseconds(r.summary.commit_tpot_us),
        "TTFT": lambda r: milliseconds(r.summary.ttft_us),
        "p50": lambda r: milliseconds(r.summary.pass_p50_us),
        "p99": lambda r: milliseconds(r.summary.pass_p99_us),
        "util": lambda r: percent(r.summary.utilization),
        "hit": lambda r: percent(r.summary.hit_rate, 2),
        "hit all": lambda r: percent(r.summary.hit_rate_with_prefill, 2),
        "H2D": lambda r: number(copies_per_pass(r.summary), 1),
        "CPU": lambda r: number(r.summary.cpu_per_pass, 1),
        "busy": lambda r: _lanes(r, "busy"),
        "critical": lambda r: _lanes(r, "critical"),
        "GPU GiB": lambda r: number(r.summary.peak_gpu_bytes / 2**30, 2),
    }
    if any(r.rules.batch > 1 for r in results):
        columns["batch TPOT"] = lambda r: milliseconds(r.summary.batch_tpot_us)
    if any(r.summary.prefetched for r in results):
        columns["ahead"] = lambda r: number(ratio(r.summary.prefetched, r.summary.passes), 1)
        columns["useful/late/wasted"] = _fate
    return columns


def _varied(results: Sequence[Result]) -> dict[str, Callable[[Result], str]]:
    """Return columns for what differs between results besides policy and cache."""
    columns: dict[str, Callable[[Result], str]] = {}
    if len({r.rules.batch for r in results}) > 1:
        columns["batch"] = lambda r: str(r.rules.batch)
    if len({r.link_gb_s for r in results}) > 1:
        columns["GB/s"] = lambda r: f"{r.link_gb_s:.3g}"
    return columns


def _rows(columns: dict[str, Callable[[Result], str]], results: Sequence[Result]) -> list[Row]:
    """Return a row per result, with an empty line where batch, link or cache change."""
    rows: list[Row] = []
    last = None
    for result in results:
        section = result.rules.batch, result.link_gb_s, result.budget
        rows += [None] if last not in (None, section) else []
        rows.append([show(result) for show in columns.values()])
        last = section
    return rows


def budget_text(budget: Budget) -> str:
    """Return a budget as it is asked for: slots per layer, or bytes."""
    return str(budget) if budget.size_bytes is None else bytes_text(budget.size_bytes)


def copies_per_pass(summary: Summary) -> float:
    """Return the experts copied per decode pass: demand transfers and prefetches."""
    return summary.demand_per_pass + ratio(summary.prefetched, summary.passes)


def _fate(result: Result) -> str:
    """Return what became of prefetches, per decode pass."""
    summary = result.summary
    fates = (summary.useful, summary.late, summary.wasted)
    return "/".join(number(ratio(fate, summary.passes), 1) for fate in fates)


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


def number(value: float, digits: int) -> str:
    """Return a number as text; 0/0 is n/a."""
    return "n/a" if value != value else f"{value:.{digits}f}"
