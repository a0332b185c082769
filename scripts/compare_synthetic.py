"""Hold hit rates of policies on synthetic traces against those on the trace that was fitted.

    python scripts/compare_synthetic.py gsm8k=nano-gsm8k humaneval=nano-humaneval

No fit looks at these curves. Prints, for every policy and relation, the hit rate of decode passes
with 10 to 70 % of the experts resident, real and synthetic, and the largest difference.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from oled_sim.cli.simulating import costs_for, source_for
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.policy_spec import parse_policies
from oled_sim.sweep import Grid, sweep
from oled_sim.synthesis.generate import FITTED, make_recipe, write_synthetic
from oled_sim.synthesis.parameters import COUPLINGS, load_data_set
from oled_sim.synthesis.statistics import CACHE_SHARES
from oled_sim.trace import Trace, open_trace


def hit_rates(trace: Trace, names: Sequence[str]) -> dict[str, list[float]]:
    """Return the hit rates of each policy at all cache sizes."""
    policies = parse_policies(names)
    caches = [round(share * trace.geometry.experts) for share in CACHE_SHARES]
    source = source_for(trace, policies.values())
    grid = Grid(policies, [Budget(cache=c) for c in caches])
    costs = costs_for(trace, None, None, extrapolate=True)
    results = sweep(source, grid, costs, Rules(history=0))
    found: dict[str, list[float]] = {name: [] for name in names}
    for result in results:
        found[result.spec].append(result.summary.hit_rate)
    return found


def compare(name: str, source: str, requests: int | None, names: Sequence[str]) -> None:
    """Print the comparison of one data set."""
    data, real = load_data_set(name), open_trace(source)
    wanted = hit_rates(real, names)
    print(
        f"{name}, fitted on {data.fitted_on}; caches {', '.join(f'{s:.0%}' for s in CACHE_SHARES)}"
    )
    for policy in names:
        print(f"  {policy:8}real      {_row(wanted[policy])}")
    for coupling in COUPLINGS:
        recipe = make_recipe(data, FITTED, coupling=coupling, output_tokens=data.output_tokens)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / coupling
            write_synthetic(path, recipe, requests or data.requests)
            found = hit_rates(open_trace(path), names)
        for policy in names:
            away = max(abs(a - b) for a, b in zip(found[policy], wanted[policy], strict=True))
            print(f"  {policy:8}{coupling:10}{_row(found[policy])}  largest difference {away:.3f}")


def _row(rates: list[float]) -> str:
    return "".join(f"{rate:7.3f}" for rate in rates)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Hit rates on synthetic traces beside real ones.")
    parser.add_argument("pairs", nargs="+", metavar="DATASET=TRACE")
    parser.add_argument("--requests", type=int, help="synthetic requests [default: the trace's]")
    parser.add_argument("--policies", default="lru,lfu,oled,belady")
    arguments = parser.parse_args()
    for pair in arguments.pairs:
        name, _, source = pair.partition("=")
        compare(name, source, arguments.requests, arguments.policies.split(","))
