"""Routed experts: the grouped kernel on the GPU, and the CPU lane."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import numpy as np
import torch

from oled_sim.hardware.measuring.events import even_rows
from oled_sim.hardware.measuring.rig import SEED, Rig
from oled_sim.hardware.measuring.sweep import Key, Strategies, Sweep
from oled_sim.hardware.measuring.timing import Call, spread

PRUNE_RATIO = 1.5
"""Once sharing out experts is this much faster, one at a time is no longer tried with more."""


def grouped_call(rig: Rig, experts: int, per_expert: int) -> Call:
    """Return the grouped kernel over ``experts`` slots at random with ``per_expert`` rows each."""
    rows = even_rows(experts, per_expert, rig.cost.top_k)
    draw = np.random.default_rng(SEED)
    x, out = rig.x[: rows.tokens], rig.out[: rows.tokens * rig.cost.top_k]
    which = np.arange(experts, dtype=np.int32)
    choices = [draw.permutation(rig.slab.slots)[:experts].astype(np.int32) for _ in range(16)]
    turn = 0

    def run() -> None:
        nonlocal turn
        turn += 1
        rig.grouped.load(rows)
        rig.grouped.run(x, which, choices[turn % len(choices)], out)

    return run


def lane_job(rig: Rig, experts: int, per_expert: int, tokens: int | None = None) -> Call:
    """Return a job of the CPU lane, until its sums are on the device and the next can begin."""
    like = even_rows(experts, per_expert, rig.cost.top_k, tokens)
    x, which = rig.x[: like.tokens], np.arange(experts)
    # A stream of its own: what is queued on the GPU's comes later than the inputs in a layer, too.
    aside = torch.cuda.stream(torch.cuda.Stream(x.device)) if x.is_cuda else nullcontext()

    def run() -> None:
        layer, rows = rig.rotation.rows(like)
        with aside:
            rig.lane.submit(layer, x, rows, which)
            rig.lane.result()

    return run


def measure_gpu_experts(sweep: Sweep, rig: Rig) -> None:
    """Grouped kernel by experts × tokens per expert."""
    a = rig.axes

    def times(n: int, t: int) -> list[float]:
        if not a.reachable(n, t, rig.cost, a.gpu_tokens):
            return []
        return sweep.clock.device_times(grouped_call(rig, n, t))

    sweep.grid("gpu_experts", a.experts, a.tokens_per_expert, times)


def measure_cpu_experts(sweep: Sweep, rig: Rig) -> None:
    """Makespan by experts × tokens per expert, the faster of two strategies in each cell."""
    a = rig.axes
    keys = [(n, t) for n in a.experts for t in a.tokens_per_expert]

    def shared_out(n: int, t: int) -> list[float]:
        if not a.reachable(n, t, rig.cost, a.cpu_tokens):
            return []
        return _makespans(sweep, rig, n, t, "experts")

    by_experts = sweep.visit("cpu_experts, shared out", keys, shared_out)
    rival = {key: spread(found).median for key, found in by_experts.items() if found}
    left_behind: dict[int, int] = {}

    def one_by_one(n: int, t: int) -> list[float]:
        if n > left_behind.get(t, n) or (n, t) not in rival:
            return []
        found = _makespans(sweep, rig, n, t, "threads")
        if n >= rig.workers and min(found) > PRUNE_RATIO * rival[n, t]:
            left_behind[t] = n
        return found

    by_threads = sweep.visit("cpu_experts, one by one", keys, one_by_one)
    best, strategy = _faster(by_experts, by_threads, a.tokens_per_expert)
    sweep.keep_grid("cpu_experts", a.experts, a.tokens_per_expert, best, strategy)


def measure_cpu_link(sweep: Sweep, rig: Rig) -> None:
    """What a job of the CPU lane takes besides the workers' makespan, by tokens of the event."""
    clock = sweep.clock

    def times(tokens: int) -> list[float]:
        rig.way.name = "experts"
        job = lane_job(rig, 1, 1, tokens)

        def sample() -> float:
            clock.synchronize()
            start = time.perf_counter_ns()
            job()
            clock.synchronize()
            return max(0.0, (time.perf_counter_ns() - start) / 1e3 - rig.lane.times.compute_us)

        return clock.repeat(sample)

    sweep.curve("cpu_link", rig.axes.tokens, times)


def _makespans(sweep: Sweep, rig: Rig, experts: int, per_expert: int, way: str) -> list[float]:
    """Time the workers of the CPU lane, µs."""
    rig.way.name = way
    job = lane_job(rig, experts, per_expert)

    def sample() -> float:
        sweep.clock.synchronize()
        job()
        return rig.lane.times.compute_us

    return sweep.clock.repeat(sample)


def _faster(
    by_experts: dict[Key, list[float]], by_threads: dict[Key, list[float]], columns: list[int]
) -> tuple[dict[Key, list[float]], Strategies]:
    """Return the samples of the faster strategy per cell, and which one it is, row by row."""
    best: dict[Key, list[float]] = {}
    names: Strategies = [[]]
    for key, shared_out in by_experts.items():
        one_by_one = by_threads[key]
        faster = math.inf if not one_by_one else spread(one_by_one).median
        wins = bool(shared_out) and spread(shared_out).median <= faster
        best[key] = shared_out if wins or not one_by_one else one_by_one
        if len(names[-1]) == len(columns):
            names.append([])
        names[-1].append("experts" if wins else "threads" if one_by_one else "")
    return best, names
