"""How long policies take to decide in a live replay, without the hardware.

    python benchmarks/decisions.py [--policy fiddler] [--cache 20,160] [--passes 60] [--repeat 3]

What `oled-sim replay` shows as ``decide``: from each stop of the pace (a gate, a prefetch that
arrived) until the engine runs on, summed over a pass. Here the simulated lanes stand in for the
machine, and times are processor times of the process; history and warm-up run before, as in a
replay. A live host does other work between decisions and finds its caches cold; so ``--evict``
goes through that many MiB of memory before each (several: one after the other). The best of
several runs counts.

Writes benchmarks/results/<date>-<machine>-decisions.json (``--dry`` does not).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from engine import machine
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts, load_costs
from oled_sim.engine import events
from oled_sim.engine.batch import Batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.cut import CutSource
from oled_sim.engine.jit import direct
from oled_sim.engine.rules import Group, Rules, Splits, split_requests
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import TraceSource
from oled_sim.engine.state import ARRIVED, PASS_ENDED, Course
from oled_sim.geometry import find_geometry
from oled_sim.hardware.replay import no_garbage_collection
from oled_sim.policy_spec import parse_policy
from oled_sim.trace import open_trace
from oled_sim.validation.prepared import run_up

POLICIES = ["lru", "oled", "fiddler", "hybrimoe", "moe-infinity", "finemoe"]
TRACES = ["mini-gsm8k", "mini-humaneval", "mini-science"]
CACHES = "20,40,100,160"
Measured = list[tuple[Group, Batch]]


class TimedLanes:
    """The simulated lanes as a pace, with a clock that runs while the engine decides.

    Attributes:
        decide_us: of every pass. arrivals: prefetches asked about.
    """

    def __init__(self, evict_bytes: int) -> None:
        self._evicts = np.zeros(evict_bytes, np.uint8)
        self.decide_us: list[float] = []
        self.arrivals = 0

    def enter(self, simulation: Simulation, batch: Batch, course: Course) -> None:
        """Start a group."""
        self._simulation, self._course = simulation, course
        self._proceed = direct(events.proceed)
        self._asked, self._pass_ns, self._left_ns = PASS_ENDED, 0, 0

    def run_on(self) -> int:
        """Take the time of the last decision, and run to the next."""
        if self._asked != PASS_ENDED:
            self._pass_ns += time.process_time_ns() - self._left_ns
        simulation, nothing = self._simulation, (np.empty(0, np.int64), np.empty(0))
        self._asked = self._proceed(
            simulation.state, self._course, simulation.costs.tables, events.RUN_ON, *nothing
        )
        self.arrivals += int(self._asked == ARRIVED)
        if self._asked == PASS_ENDED:
            self.decide_us.append(self._pass_ns / 1e3)
            self._pass_ns = 0
        self._evicts += 1
        self._left_ns = time.process_time_ns()
        return self._asked


def prepare(
    source: CutSource, splits: Splits, spec: str, cache: int, costs: LaneCosts
) -> tuple[Simulation, Measured]:
    """Run history and warm-up; return the simulation and what is left to run."""
    simulation = Simulation(
        parse_policy(spec), source.geometry, costs, Budget(cache=cache), Rules(), name=spec
    )
    return simulation, run_up(simulation, source, splits, costs)


def measure(simulation: Simulation, counted: Measured, repeat: int, evict: int) -> dict[str, float]:
    """Return what the decisions of a pass take: mean and 95th percentile, ms, best of all runs."""
    start, found, arrivals = simulation.snapshot(), [], 0
    for _ in range(repeat + 1):  # the first compiles
        simulation.restore(start)
        simulation.pace = pace = TimedLanes(evict)
        with no_garbage_collection():
            for group, batch in counted:
                simulation.run_group(group, batch)
        simulation.pace = None
        found.append(decodes(counted, pace.decide_us))
        arrivals = pace.arrivals
    simulation.restore(start)
    best = min(found[1:], key=lambda taken: float(taken.mean())) / 1e3
    return {
        "mean_ms": float(best.mean()),
        "p95_ms": float(np.percentile(best, 95)),
        "arrivals_per_pass": arrivals / sum(batch.passes for _, batch in counted),
    }


def decodes(counted: Measured, taken_us: list[float]) -> NDArray[np.float64]:
    """Return those of decode passes."""
    return np.array(taken_us)[np.concatenate([batch.course.decode for _, batch in counted])]


def main() -> None:
    """Measure, print, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--policy", action="append", help="once for each")
    parser.add_argument("--trace", action="append", help="once for each")
    parser.add_argument("--cache", default=CACHES)
    parser.add_argument("--passes", type=int, default=60, help="decode passes of the request")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--evict", default="0,8", help="MiB of memory between decisions")
    parser.add_argument("--dry", action="store_true", help="write no file")
    given = parser.parse_args()
    costs = load_costs(find_geometry("llada2.0-mini"))
    rows = []
    for trace in given.trace or TRACES:
        whole = TraceSource(open_trace(trace))
        splits = split_requests(list(whole.requests), Rules())
        splits = replace(splits, counted=splits.counted[:1])
        before = dict.fromkeys([*splits.history, *splits.warmup])
        source = CutSource(whole, before | {splits.counted[0]: given.passes})
        for spec in given.policy or POLICIES:
            for cache in map(int, given.cache.split(",")):
                simulation, counted = prepare(source, splits, spec, cache, costs)
                for mib in map(float, given.evict.split(",")):
                    row = measure(simulation, counted, given.repeat, int(mib * 2**20))
                    where = {"policy": spec, "trace": trace, "cache": cache, "evict_mib": mib}
                    rows.append({**where, **row})
                    print(
                        f"{spec:<16}{trace:<16}{cache:>4}{mib:>4g} MiB {row['mean_ms']:>8.3f} ms,"
                        f" p95 {row['p95_ms']:.3f} ms, {row['arrivals_per_pass']:.1f} arrivals",
                        flush=True,
                    )
    if not given.dry:
        write(given, rows)


def write(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Write what was measured."""
    found = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "passes": given.passes,
        "repeat": given.repeat,
        "points": rows,
    }
    name = re.sub(r"[^a-z0-9]+", "-", found["machine"].lower()).strip("-")
    path = Path(__file__).parent / "results" / f"{found['date']}-{name}-decisions.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    print(path)


if __name__ == "__main__":
    main()
