"""Time one job of the CPU lane, part by part, alone and beside a full queue of expert copies.

    python benchmarks/cpu_lane.py --geometry llada2.0-mini

Prints medians and 90th percentiles in microseconds: ``submit``, the call; ``sent``, until a poll
saw the activations on the host; ``compute``, until one saw the sums; ``return``, until the device
has them; ``poll``, a poll's own time. With ``--device cpu`` and a small model it runs anywhere.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from oled_sim.geometry import CostGeometry, find_geometry
from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.identity import default_workers, share_cores
from oled_sim.hardware.measuring.events import Rotation, even_rows
from oled_sim.hardware.place import Place, find_place

EXPERTS = (1, 2, 4, 8, 12, 16, 32)
TOKENS = (1, 2)
COPIES = 64
PARTS = ("submit", "sent", "compute", "return", "total", "poll")
Beside = Callable[[], object]


def copies_beside(experts: HostExperts, place: Place) -> Beside:
    """Return a call that fills the queue of host-to-device copies."""
    stream = torch.cuda.Stream(place.device)
    packed = experts.packed[0]
    there = torch.empty_like(packed[0], device=place.device)

    def run() -> None:
        with torch.cuda.stream(stream):
            for i in range(COPIES):
                there.copy_(packed[i % len(packed)], non_blocking=True)

    return run


class Jobs:
    """Jobs of a lane, the next experts at every one."""

    def __init__(self, cost: CostGeometry, place: Place, experts: HostExperts, lane: CpuLane):
        self.cost, self.place, self.lane = cost, place, lane
        self.rotation = Rotation(len(experts.packed), cost.experts)
        most = max(EXPERTS) * max(TOKENS)
        self.x = torch.randn(most, cost.hidden_size, device=place.device, dtype=place.dtype)

    def times(self, experts: int, tokens: int, beside: Beside | None) -> dict[str, float]:
        """Run one job; return the time of each part, µs."""
        layer, rows = self.rotation.rows(even_rows(experts, tokens, self.cost.top_k))
        which = np.arange(experts)
        self._wait(all_streams=True)
        if beside is not None:
            beside()
        start = time.perf_counter_ns()
        self.lane.submit(layer, self.x[: rows.tokens], rows, which)
        submitted = time.perf_counter_ns()
        polls = 1
        while not self.lane.poll():
            polls += 1
        computed = time.perf_counter_ns()
        self.lane.result()
        self._wait()
        end, found = time.perf_counter_ns(), self.lane.times
        return {
            "submit": (submitted - start) / 1e3,
            "sent": max(0.0, found.end_us - found.compute_us - submitted / 1e3),
            "compute": found.compute_us,
            "return": (end - computed) / 1e3,
            "total": (end - start) / 1e3,
            "poll": (computed - submitted) / 1e3 / polls,
        }

    def _wait(self, *, all_streams: bool = False) -> None:
        if self.place.cuda and all_streams:
            torch.cuda.synchronize(self.place.device)
        elif self.place.cuda:
            torch.cuda.current_stream(self.place.device).synchronize()


def print_table(jobs: Jobs, beside: Beside | None, repeats: int) -> None:
    """Print a line per number of experts and tokens."""
    print(f"{'experts':>7}{'tokens':>7}" + "".join(f"{p + ' p50 p90':>18}" for p in PARTS))
    for tokens in TOKENS:
        for n in (n for n in EXPERTS if n <= jobs.cost.experts):
            samples = [jobs.times(n, tokens, beside) for _ in range(repeats + 3)][3:]
            line = f"{n:7}{tokens:7}"
            for part in PARTS:
                found = sorted(s[part] for s in samples)
                line += f"{statistics.median(found):10.1f}{found[int(0.9 * (repeats - 1))]:8.1f}"
            print(line)


def same_bits(
    cost: CostGeometry, place: Place, experts: HostExperts, lane: CpuLane, alone: CpuLane
) -> bool:
    """Whether two lanes with other numbers of workers agree in every bit."""
    for n in (n for n in EXPERTS if n <= cost.experts):
        rows = even_rows(n, 2, cost.top_k)
        x = torch.randn(rows.tokens, cost.hidden_size, device=place.device, dtype=place.dtype)
        found = []
        for each in (lane, alone):
            each.submit(0, x, rows, np.arange(n))
            found.append(each.result().clone())
        if not torch.equal(*found):
            return False
    return True


@torch.inference_mode()
def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--geometry", default="llada2.0-mini")
    parser.add_argument("--device", default=None)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args()
    cost, place = find_geometry(options.geometry), find_place(options.device)
    workers = options.workers or default_workers(place.device)
    share_cores(place.device, workers)
    start = time.perf_counter()
    most = max(EXPERTS) * max(TOKENS)
    with (
        HostExperts.random(cost, 1, place, seed=0) as experts,
        CpuLane(experts, place, cost, workers, most) as lane,
    ):
        print(f"{cost.name}, {workers} workers, ready in {time.perf_counter() - start:.1f} s")
        jobs = Jobs(cost, place, experts, lane)
        print_table(jobs, None, options.repeats)
        if place.cuda:
            print(f"beside {COPIES} expert copies")
            print_table(jobs, copies_beside(experts, place), options.repeats)
        with CpuLane(experts, place, cost, 1, most) as alone:
            equal = same_bits(cost, place, experts, lane, alone)
        print(f"sums of 1 and {workers} workers are the same bits: {equal}")
    print(f"{time.perf_counter() - start:.1f} s in all")


if __name__ == "__main__":
    main()
