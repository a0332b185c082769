"""Golden results: figures of every built-in policy on the bundled traces, to the last bit.

They change only on purpose. After such a change (of the engine, a policy, the bundled profile or a
bundled trace)::

    python tests/engine/golden_results.py

writes them anew; the diff of the files belongs into the same commit, its reason into the message.
"""

from __future__ import annotations

import json
import math
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from oled_sim import plugins
from oled_sim.contenders import contenders as all_contenders
from oled_sim.costs.lanes import load_costs
from oled_sim.engine.budget import Budget
from oled_sim.engine.cut import CutSource
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Result, simulate_all
from oled_sim.engine.source import TraceSource
from oled_sim.geometry import find_geometry
from oled_sim.policy_spec import load_policy, parse_policies
from oled_sim.trace import Trace, open_trace

FOLDER = Path(__file__).parent / "golden"
TRACES = ("nano-gsm8k", "nano-humaneval")

RUNS = {
    "layer": (Rules(requests=3), (8, 40, 100)),
    "global, batches of 2": (Rules(requests=4, scope="global", batch=2, staging=2), (40,)),
    "cold, confidence end": (Rules(requests=3, cold=True, confidence="end"), (40,)),
}
"""Name: rules, and slots per layer. The traces have 128 experts, about 50 of them active."""

PASSES = 12
"""Decode passes of each request, so that all of a run is there in a fraction of its time: a block,
two allocations of `oled`, a next request that finds the cache warm."""

MORE = ("lru:dispatch=load", "oled:dispatch=load")
"""Specifications besides the defaults and variants of every policy."""

FIGURES = (
    "output_tokens", "passes", "tpot_us", "commit_tpot_us", "batch_tpot_us", "ttft_us",
    "pass_us", "pass_p50_us", "pass_p99_us",
    "utilization", "hit_rate", "effective_transfer_ratio",
    "demand_per_pass", "cpu_per_pass", "demand_bytes", "cpu_bytes",
    "prefetched", "useful", "late", "wasted",
    "gpu_busy_us", "h2d_busy_us", "cpu_busy_us",
    "gpu_critical_us", "h2d_critical_us", "cpu_critical_us",
    "peak_gpu_bytes", "peak_resident_bytes",
)  # fmt: skip


def built_in() -> list[str]:
    """Return the specifications of the policies of this package: defaults, variants, and more."""
    specs = []
    for entry in sorted(entry_points(group=plugins.POLICIES), key=lambda entry: entry.name):
        if entry.value.startswith("oled_sim."):
            variants = load_policy(entry.name).variants
            specs += [
                entry.name,
                *(f"{entry.name}:{v}" for v, values in variants.items() if values),
            ]
    return [*specs, *MORE]


def results_of(name: str) -> dict[str, Any]:
    """Return the golden results of a bundled trace: run, policy, slots, figure."""
    trace = open_trace(name)
    return {run: _figures(trace, rules, caches) for run, (rules, caches) in RUNS.items()}


def _figures(trace: Trace, rules: Rules, caches: tuple[int, ...]) -> dict[str, Any]:
    held = {*trace.signals, "future"}
    policies = {s: p for s, p in parse_policies(built_in()).items() if p.needs <= held}
    budgets = [Budget(cache=c) for c in caches]
    contenders = all_contenders(policies, budgets, trace.geometry.experts)
    costs = load_costs(find_geometry(trace.manifest.stands_for or ""))
    source = CutSource(TraceSource(trace), dict.fromkeys(trace.requests, PASSES))
    found: dict[str, Any] = {spec: {} for spec in policies}
    for result in simulate_all(source, contenders, costs, rules):
        found[result.spec][f"C={result.budget.cache}"] = _row(result)
    return found


def _row(result: Result) -> dict[str, Any]:
    """Return the figures; what is not a number is null, and JSON keeps every bit of the others."""
    values = {figure: getattr(result.summary, figure) for figure in FIGURES}
    return {figure: None if math.isnan(v) else v for figure, v in values.items()}


def main() -> None:
    """Write all golden results anew."""
    for name in TRACES:
        path = FOLDER / f"{name}.json"
        path.write_text(json.dumps(results_of(name), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
