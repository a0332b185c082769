"""What the host does for a prefetch in a live replay, without the hardware: copies take no time.

    python benchmarks/prefetch_path.py [--queued 100] [--evict 8]

From one prefetch's arrival to the next one's: noticing it, taking the next from the queue, letting
the first in or dropping it, and noting where it lies. The policy's answer is the cheapest there is,
and calls of CUDA are missing. Processor time in µs, the best of several runs; ``--evict`` goes
through that many MiB of memory before each, as a live host finds its caches cold.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from oled_sim.costs.lanes import load_costs
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.jit import direct
from oled_sim.engine.prefetch_queue import ask_prefetches
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.state import QUEUED
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.hardware.clock import Clock, Mark
from oled_sim.hardware.measuring.trials import Trial, policy_of, request_of, slots_of
from oled_sim.hardware.prefetches import Prefetches
from oled_sim.hardware.replay import no_garbage_collection
from oled_sim.hardware.slot_map import SlotMap

STAGING = 16
PREFETCHES, RUNS = 2000, 5


def submit(copies: list[tuple[Any, Mark | None]]) -> None:
    """Stand for the copy engine: all bytes are there at once."""
    for copy, _ in copies:
        copy.began = copy.ended = Mark(None)


def prepare() -> tuple[Simulation, Prefetches]:
    """Return a run at the start of a pass, and what takes care of its prefetches."""
    costs = load_costs(find_geometry("llada2.0-mini"))
    cost = costs.geometry
    geometry = RoutingGeometry(tuple(range(1, 20)), cost.experts, cost.top_k)
    trial = Trial(0, 0, 1, prefetches=True)
    simulation = Simulation(
        policy_of(geometry, trial),
        geometry,
        costs,
        Budget(cache=slots_of(cost.experts)),
        Rules(staging=STAGING),
    )
    batch = make_batch([request_of(geometry, trial)], geometry, costs)
    simulation.open_group(Group("counted", (0,)), batch.fresh_course())
    simulation.open_pass(batch, 0)
    slots = SlotMap(len(geometry.layers), cost.experts, simulation.slots + STAGING)
    slots.fill(simulation.state.pools.resident)
    lane = SimpleNamespace(submit=submit)
    machine: Any = SimpleNamespace(clock=Clock(torch.device("cpu")), copies=lane)
    return simulation, Prefetches(machine, slots, simulation.state)


def measure(simulation: Simulation, prefetches: Prefetches, queued: int, evict: int) -> float:
    """Return µs per prefetch."""
    rng, ask, evicts = np.random.default_rng(0), direct(ask_prefetches), np.zeros(evict, np.uint8)
    state, taken_ns = simulation.state, 0
    layers, experts = state.pools.resident.shape
    for _ in range(PREFETCHES):
        if simulation.work[QUEUED] < queued // 2:
            where = rng.choice(layers * experts, queued, replace=False)
            wanted = np.column_stack([where // experts, where % experts, rng.random(queued)])
            ask(state, wanted.astype(np.float64), True)
        evicts += 1
        began = time.process_time_ns()
        arrived = prefetches.arrived()
        prefetches.start()
        if arrived is not None:
            state.queue.arrived[:] = arrived
            simulation.admit()
            prefetches.settle(*arrived)
        taken_ns += time.process_time_ns() - began
        prefetches.moments.clear()
    return taken_ns / PREFETCHES / 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--queued", type=int, default=100, help="prefetches that wait, at most")
    parser.add_argument("--evict", type=float, default=0.0, help="MiB of memory between prefetches")
    given = parser.parse_args()
    simulation, prefetches = prepare()
    evict = int(given.evict * 2**20)
    with no_garbage_collection():
        found = [measure(simulation, prefetches, given.queued, evict) for _ in range(1 + RUNS)]
    print(f"{min(found[1:]):.1f} µs per prefetch")  # the first compiles


if __name__ == "__main__":
    main()
