"""All tables of a profile, measured one after another."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from lanes import kernels, links
from lanes.axes import Axes
from lanes.cpu import Experts, Workers
from lanes.interference import (
    Lane,
    QueuedLoad,
    WorkerLoad,
    copy_queue,
    event_sample,
    host_sample,
    slowdowns,
)
from lanes.kernels import Attention, DenseMlp, Gate, GroupedExperts, Mlp, Place
from lanes.timing import Clock, Spread, spread
from oled_sim.geometry import CostGeometry

CPU_POOL_BYTES = 1 << 30
"""Least size of the experts in host memory: far more than any last-level cache."""
GPU_POOL_BYTES = 3 << 30
PRUNE_RATIO = 1.5
"""Once sharing out experts is this much faster, one at a time is no longer tried with more."""


Key = tuple[int, ...]
TimeAt = Callable[..., list[float]]


@dataclass
class Sweep:
    """One run over all tables; ``tables`` fills up as it goes."""

    clock: Clock
    cost: CostGeometry
    axes: Axes
    place: Place
    workers: Workers
    tables: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def curve(self, name: str, axis: str, points: Sequence[int], time_at: TimeAt) -> None:
        """Measure a table of one count; ``time_at(point)`` returns samples in µs."""
        cells = self.visit(name, [(p,) for p in points], time_at)
        self.tables[name] = {"axis": axis, "points": list(points), **_columns(cells)}

    def grid(
        self, name: str, axes: tuple[str, str], rows: Sequence[int], columns: Sequence[int],
        time_at: TimeAt,
    ) -> None:  # fmt: skip
        """Measure a table of two counts; ``time_at(row, column)`` returns samples, or none."""
        cells = self.visit(name, [(r, c) for r in rows for c in columns], time_at)
        self.tables[name] = _grid(axes, rows, columns, cells)

    def visit(self, name: str, keys: Sequence[Key], time_at: TimeAt) -> list[Spread]:
        """Visit all points in several rounds, and pool the samples of each."""
        samples: dict[Key, list[float]] = {key: [] for key in keys}
        with Stage(self, name):
            for turn in range(self.clock.rounds):
                for key, found in samples.items():
                    if turn == 0 or (found and not self.clock.is_long(found)):
                        found += time_at(*key)
        return [spread(found) for found in samples.values()]


def _grid(
    axes: tuple[str, str], rows: Sequence[int], columns: Sequence[int], cells: Sequence[Spread]
) -> dict[str, Any]:
    """Return a table from its cells in row-major order."""
    width = len(columns)
    by_row = [_columns(cells[i * width : (i + 1) * width]) for i in range(len(rows))]
    times = {key: [row[key] for row in by_row] for key in by_row[0]}
    return {"axes": list(axes), "rows": list(rows), "columns": list(columns), **times}


def _columns(cells: Sequence[Spread]) -> dict[str, list]:
    return {
        "median_us": [c.median for c in cells],
        "p10_us": [c.p10 for c in cells],
        "p90_us": [c.p90 for c in cells],
        "repeats": [c.repeats for c in cells],
    }


class Stage:
    """Prints a table's name and how long it took; frees the GPU's memory after it."""

    def __init__(self, sweep: Sweep, name: str) -> None:
        self.sweep, self.name = sweep, name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self.start
        self.sweep.seconds[self.name] = round(taken, 2)
        print(f"  {self.name:<16} {taken:6.1f} s", file=sys.stderr, flush=True)
        if self.sweep.clock.device.type == "cuda":
            torch.cuda.empty_cache()


def everything(sweep: Sweep, tries: int) -> Iterator[dict[str, Any]]:
    """Measure all there is; yield what is not a table after every step."""
    for step in (measure_links, measure_rest, measure_attention):
        step(sweep)
        yield {}
    grouped = measure_gpu_experts(sweep)
    yield {name: asdict(value) for name, value in measure_overheads(sweep).items()}
    yield {"interference": measure_interference(sweep, grouped, tries)}
    measure_cpu_experts(sweep)
    yield {}


def measure_links(sweep: Sweep) -> None:
    """H2D by size and pinning, D2H, and the CPU lane's round trip."""
    clock, sizes, cuda = sweep.clock, sweep.axes.copies, sweep.clock.device.type == "cuda"
    host = sweep.workers.experts.up.view(-1).view(torch.uint8)
    room = min(max(4 * sizes[-1], 512 << 20), host.numel()) if cuda else max(sizes)
    device = torch.zeros(room, dtype=torch.uint8, device=clock.device)
    landing = torch.zeros(max(sizes), dtype=torch.uint8, pin_memory=cuda)
    down = links.Copies(clock, host, device)
    up = links.Copies(clock, device, landing)
    sweep.curve("h2d", "bytes", sizes, down.times)
    sweep.curve("h2d_pageable", "bytes", sizes, lambda s: clock.host_times(
        links.pageable(clock, s, device)))  # fmt: skip
    sweep.curve("d2h", "bytes", sizes, up.times)
    sweep.curve("cpu_link", "tokens", sweep.axes.tokens, lambda t: clock.host_times(
        links.round_trip(clock, sweep.cost, t)))  # fmt: skip


def measure_gpu_experts(sweep: Sweep) -> GroupedExperts:
    """Grouped kernel by experts × tokens per expert."""
    a = sweep.axes
    pool = max(a.experts[-1], -(-_limit(sweep, GPU_POOL_BYTES) // sweep.cost.expert_bytes))
    grouped = GroupedExperts(sweep.place, sweep.cost, pool)
    sweep.grid("gpu_experts", ("experts", "tokens_per_expert"), a.experts, a.tokens_per_expert,
        lambda n, t: sweep.clock.device_times(grouped.call(n, t)))  # fmt: skip
    return grouped


def measure_cpu_experts(sweep: Sweep) -> None:
    """Makespan by experts × tokens per expert, the faster of two strategies in each cell."""
    a, clock, workers = sweep.axes, sweep.clock, sweep.workers
    keys = [(n, t) for n in a.experts for t in a.tokens_per_expert]

    def shared_out(n: int, t: int) -> list[float]:
        if not a.reachable(n, t, sweep.cost):
            return []
        task = workers.experts.task(n, t)
        return clock.host_times(lambda: workers.by_experts(task))

    by_experts = sweep.visit("cpu by experts", keys, shared_out)
    rival = {key: cell.median for key, cell in zip(keys, by_experts, strict=True)}
    left_behind: dict[int, int] = {}

    def one_by_one(n: int, t: int) -> list[float]:
        if n > left_behind.get(t, n) or math.isnan(rival[n, t]):
            return []
        task = workers.experts.task(n, t)
        found = clock.host_times(lambda: workers.by_threads(task))
        if n >= workers.count and min(found) > PRUNE_RATIO * rival[n, t]:
            left_behind[t] = n
        return found

    by_threads = sweep.visit("cpu by threads", keys, one_by_one)
    sweep.tables["cpu_experts"] = _faster(sweep.axes, by_experts, by_threads)


def _faster(axes: Axes, by_experts: list[Spread], by_threads: list[Spread]) -> dict[str, Any]:
    """Return the table of the faster strategy per cell, with both beside it."""
    grid = partial(_grid, ("experts", "tokens_per_expert"), axes.experts, axes.tokens_per_expert)
    pairs = list(zip(by_experts, by_threads, strict=True))
    won = [e.repeats > 0 and not e.median > t.median for e, t in pairs]
    best = [e if first or not e.repeats else t for (e, t), first in zip(pairs, won, strict=True)]
    names = ["" if not b.repeats else "experts" if w else "threads"
        for b, w in zip(best, won, strict=True)]  # fmt: skip
    width = len(axes.tokens_per_expert)
    strategy = [names[i : i + width] for i in range(0, len(names), width)]
    both = {"by_experts": grid(by_experts), "by_threads": grid(by_threads)}
    return {**grid(best), "strategy": strategy, **both}


def measure_attention(sweep: Sweep) -> None:
    """Dense part by tokens × context, and its two halves for batches."""
    a, clock = sweep.axes, sweep.clock
    attention = Attention(sweep.place, sweep.cost, a.cache_bytes // sweep.cost.weight_bytes)

    def block(requests: int, keys: int) -> list[float]:
        size = requests * keys * sweep.cost.kv_heads * sweep.cost.head_dim
        if size > attention.cache.numel() // 2:
            return []
        return clock.device_times(attention.block_attention(requests, keys))

    sweep.grid("dense", ("tokens", "context"), a.dense_tokens, a.context,
        lambda t, c: clock.device_times(attention.whole(t, c)))  # fmt: skip
    sweep.curve("projections", "tokens", a.tokens,
        lambda t: clock.device_times(attention.projections(t)))  # fmt: skip
    sweep.grid("block_attention", ("requests", "keys"), a.requests, a.keys, block)


def measure_rest(sweep: Sweep) -> None:
    """Gate, shared expert, dense layer, LM head, merge, embedding by tokens."""
    cost, place, clock, tokens = sweep.cost, sweep.place, sweep.clock, sweep.axes.tokens
    gate = Gate(place, cost)
    sweep.curve("gate", "tokens", tokens, lambda t: clock.host_times(gate.call(t)))
    shared = Mlp(place, cost.hidden_size, cost.moe_intermediate_size * cost.shared_experts)
    sweep.curve("shared_expert", "tokens", tokens, lambda t: clock.device_times(shared.call(t)))
    dense = DenseMlp(place, cost.hidden_size, cost.dense_intermediate_size)
    sweep.curve("dense_layer", "tokens", tokens, lambda t: clock.device_times(dense.call(t)))
    head = kernels.lm_head(place, cost)
    sweep.curve("lm_head", "tokens", sweep.axes.head_tokens, lambda t: clock.host_times(head(t)))
    merge = partial(kernels.merge, place, cost)
    sweep.curve("merge", "tokens", tokens, lambda t: clock.device_times(merge(t)))
    embed = kernels.embedding(place, cost)
    sweep.curve("embedding", "tokens", tokens, lambda t: clock.device_times(embed(t)))


def measure_overheads(sweep: Sweep) -> dict[str, Spread]:
    """Host time of one kernel launch, and of launching and waiting for an empty kernel."""
    x = torch.zeros(1, device=sweep.clock.device)
    many = 100

    def launches() -> None:
        for _ in range(many):
            x.add_(1)

    clock = sweep.clock
    launch = spread([time_us / many for time_us in clock.host_times(launches)])
    return {"launch": launch, "synchronize": spread(clock.host_times(lambda: x.add_(1)))}


def measure_interference(
    sweep: Sweep, grouped: GroupedExperts, tries: int
) -> dict[str, dict[str, Any]]:
    """Slow-down of each lane beside the others, at the sizes of a decode pass."""
    lanes = {
        "gpu": _gpu_lane(sweep, grouped),
        "h2d": _h2d_lane(sweep),
        "cpu": _cpu_lane(sweep),
    }
    with Stage(sweep, "interference"):
        found = slowdowns(sweep.clock, lanes, tries)
    return {lane: {k: asdict(v) for k, v in beside.items()} for lane, beside in found.items()}


def _gpu_lane(sweep: Sweep, grouped: GroupedExperts) -> Lane:
    """Sample: a decode event's residents. Load: all experts, so that launches stay ahead."""
    most = sweep.axes.experts[-1]
    small, large = grouped.call(min(24, most), 2), grouped.call(most, 2)
    once_us = spread(sweep.clock.device_times(large)).median
    if sweep.clock.device.type != "cuda":
        return Lane(host_sample(small), QueuedLoad(large, once_us, None))
    stream = torch.cuda.current_stream(sweep.clock.device)
    return Lane(event_sample(small, stream), QueuedLoad(large, once_us, stream))


def _h2d_lane(sweep: Sweep) -> Lane:
    """Sample: eight experts behind a first one that hides the launch. Load: one by one."""
    host = sweep.workers.experts.up.view(-1).view(torch.uint8)
    size = min(sweep.cost.expert_bytes, host.numel() // 2)
    device = torch.zeros(8 * size, dtype=torch.uint8, device=sweep.clock.device)
    copies = links.Copies(sweep.clock, host, device)
    once_us = spread(copies.times(size)).median
    one, eight = copy_queue(copies, size, 1), copy_queue(copies, size, 8)
    load = QueuedLoad(one, once_us, copies.stream)
    if copies.stream is None:
        return Lane(host_sample(eight), load)
    return Lane(event_sample(eight, copies.stream, lead=one), load)


def _cpu_lane(sweep: Sweep) -> Lane:
    """Sample and load: a decode event's misses, shared out to the workers."""
    task = sweep.workers.experts.task(min(32, sweep.axes.experts[-1]), 2)

    def compute() -> None:
        sweep.workers.by_experts(task)

    once_us = spread(sweep.clock.host_times(compute)).median
    return Lane(host_sample(compute), WorkerLoad(sweep.workers, task, once_us))


def cpu_pool(cost: CostGeometry, axes: Axes, device: torch.device, limit_bytes: int) -> Experts:
    """Return the rotating expert pool in (pinned) host memory."""
    pool = max(axes.experts[-1], -(-limit_bytes // cost.expert_bytes))
    return Experts(cost, pool, pin=device.type == "cuda")


def _limit(sweep: Sweep, size_bytes: int) -> int:
    return size_bytes if sweep.clock.device.type == "cuda" else 0
