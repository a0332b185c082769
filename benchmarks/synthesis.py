"""Speed of synthetic traces: events per second of processor time, writing included.

    python benchmarks/synthesis.py --requests 4
    python benchmarks/synthesis.py --requests 100 --jobs 2 --out results.json

One trace for every data set and model. Processor time counts all processes; wall
time depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from oled_sim.synthesis.generate import make_recipe, write_synthetic
from oled_sim.synthesis.parameters import data_sets, load_data_set
from oled_sim.trace.manifest import processor_name


def processor_seconds() -> float:
    """Return user and system time of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def measure(name: str, model: str, requests: int, jobs: int, tokens: int) -> dict:
    """Write one trace and return what it took."""
    recipe = make_recipe(load_data_set(name), model, output_tokens=tokens)
    with tempfile.TemporaryDirectory() as folder:
        began, used = time.perf_counter(), processor_seconds()
        manifest = write_synthetic(Path(folder) / "trace", recipe, requests, jobs=jobs)
        wall, used = time.perf_counter() - began, processor_seconds() - used
    events = sum(r.events for r in manifest.requests)
    size = sum(f.size_bytes for f in manifest.files.values())
    return {
        "dataset": name,
        "model": model,
        "requests": requests,
        "events": events,
        "bytes_per_event": size / events,
        "wall_s": wall,
        "processor_s": used,
        "events_per_processor_s": events / used,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Speed of synthetic traces.")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--output-tokens", type=int, default=1024)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    for name in data_sets():
        measure(name, "llada2.0-mini", 1, 1, 32)  # compiles
        for model in ("llada2.0-mini", "llada2.0-flash"):
            row = measure(name, model, arguments.requests, arguments.jobs, arguments.output_tokens)
            rows.append(row)
            print(
                f"{name:10} {model:15} {row['events']:>9,} events {row['wall_s']:7.2f} s wall,"
                f" {row['processor_s']:7.2f} s processor,"
                f" {row['events_per_processor_s']:9,.0f} events per processor second"
            )
    load = os.getloadavg()[0]
    report = {"hardware": processor_name(), "load_average": load, "jobs": arguments.jobs}
    if arguments.out:
        arguments.out.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
