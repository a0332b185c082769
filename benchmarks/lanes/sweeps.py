"""All tables of a profile, measured one after another."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
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
from lanes.timing import UNMEASURED, Clock, Spread
from oled_sim.geometry import CostGeometry

CPU_POOL_BYTES = 1 << 30
"""Least size of the experts in host memory: far more than any last-level cache."""
GPU_POOL_BYTES = 3 << 30
PRUNE_RATIO = 1.5
"""Once sharing out experts is this much faster, one at a time is no longer tried with more."""


@dataclass
class Sweep:
    """One run over all tables; ``tables`` and ``interference`` fill up as it goes."""

    clock: Clock
    cost: CostGeometry
    axes: Axes
    place: Place
    workers: Workers
    tables: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def curve(self, name: str, axis: str, points: Sequence[int], time_at: Callable) -> None:
        """Measure a table of one count."""
        with _Stage(self, name):
            cells = [time_at(p) for p in points]
        self.tables[name] = {"axis": axis, "points": list(points), **_columns(cells)}

    def grid(
        self, name: str, axes: Sequence[str], rows: Sequence[int], columns: Sequence[int],
        time_at: Callable,
    ) -> None:  # fmt: skip
        """Measure a table of two counts."""
        with _Stage(self, name):
            cells = [[time_at(r, c) for c in columns] for r in rows]
        self.tables[name] = {
            "axes": list(axes), "rows": list(rows), "columns": list(columns), **_rows(cells)
        }  # fmt: skip


class _Stage:
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
    rows, columns = sweep.axes.experts, sweep.axes.tokens_per_expert
    with _Stage(sweep, "cpu_experts"):
        by_column = [_cpu_column(sweep, j) for j in range(len(columns))]
    both = [list(row) for row in zip(*by_column, strict=True)]
    best = [[_faster(cell) for cell in row] for row in both]
    sweep.tables["cpu_experts"] = {
        "axes": ["experts", "tokens_per_expert"],
        "rows": list(rows),
        "columns": list(columns),
        **_rows([[cell[name] if name else UNMEASURED for cell, name in zip(r, b, strict=True)]
                 for r, b in zip(both, best, strict=True)]),
        "strategy": best,
        "both": [[{k: asdict(v) for k, v in cell.items()} for cell in row] for row in both],
    }  # fmt: skip


def _cpu_column(sweep: Sweep, column: int) -> list[dict[str, Spread]]:
    """Measure one number of tokens over all numbers of experts."""
    cells: list[dict[str, Spread]] = []
    for row, experts in enumerate(sweep.axes.experts):
        cell: dict[str, Spread] = {}
        if sweep.axes.reachable(row, column, sweep.cost):
            task = sweep.workers.experts.task(experts, sweep.axes.tokens_per_expert[column])
            cell["experts"] = sweep.clock.host_times(lambda t=task: sweep.workers.by_experts(t))
            if not _hopeless(cells, experts, sweep.workers.count):
                cell["threads"] = sweep.clock.host_times(lambda t=task: sweep.workers.by_threads(t))
        cells.append(cell)
    return cells


def _hopeless(cells: list[dict[str, Spread]], experts: int, workers: int) -> bool:
    """Whether one expert at a time was left far behind already with fewer experts."""
    if not cells or experts <= workers:
        return False
    last = cells[-1]
    if "threads" not in last:
        return True
    return last["threads"].median > PRUNE_RATIO * last["experts"].median


def _faster(cell: dict[str, Spread]) -> str:
    return min(cell, key=lambda name: cell[name].median) if cell else ""


def measure_attention(sweep: Sweep) -> None:
    """Dense part by tokens × context, and its two halves for batches."""
    a, clock = sweep.axes, sweep.clock
    element = 2
    attention = Attention(sweep.place, sweep.cost, a.cache_bytes // element)
    sweep.grid("dense", ("tokens", "context"), a.dense_tokens, a.context,
        lambda t, c: clock.device_times(attention.whole(t, c)))  # fmt: skip
    sweep.curve("projections", "tokens", a.tokens,
        lambda t: clock.device_times(attention.projections(t)))  # fmt: skip

    def block(requests: int, keys: int) -> Spread:
        size = requests * keys * sweep.cost.kv_heads * sweep.cost.head_dim
        if size > attention.cache.numel() // 2:
            return UNMEASURED
        return clock.device_times(attention.block_attention(requests, keys))

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
    """Host time of one kernel launch, and of waiting for an empty kernel."""
    x = torch.zeros(1, device=sweep.clock.device)
    many = 100

    def launches() -> None:
        for _ in range(many):
            x.add_(1)

    clock = sweep.clock
    launch = clock.host_times(launches).scaled(1 / many)
    return {"launch": launch, "synchronize": clock.host_times(lambda: x.add_(1))}


def measure_interference(sweep: Sweep, grouped: GroupedExperts, tries: int) -> dict[str, Any]:
    """Slow-down of each lane beside the others, at the sizes of a decode pass."""
    clock, cost, cuda = sweep.clock, sweep.cost, sweep.clock.device.type == "cuda"
    stream = torch.cuda.current_stream() if cuda else None
    most = sweep.axes.experts[-1]
    small, large = grouped.call(min(24, most), 2), grouped.call(most, 2)
    host = sweep.workers.experts.up.view(-1).view(torch.uint8)
    target = torch.zeros(max(256 << 20, cost.expert_bytes) if cuda else cost.expert_bytes,
        dtype=torch.uint8, device=clock.device)  # fmt: skip
    copies = links.Copies(clock, host[: host.numel() // 2], target)
    size = min(cost.expert_bytes, host.numel() // 2)
    queue = copy_queue(copies, size, 8)
    task = sweep.workers.experts.task(min(32, most), 2)

    def on_cpu() -> None:
        sweep.workers.by_experts(task)

    once = {
        "gpu": clock.device_times(large).median,
        "h2d": copies.times(size).median,
        "cpu": clock.host_times(on_cpu).median,
    }
    gpu = event_sample(small, stream) if stream else host_sample(small)
    h2d = event_sample(queue, copies.stream) if copies.stream else host_sample(queue)
    one_copy = copy_queue(copies, size, 1)
    lanes = {
        "gpu": Lane(gpu, QueuedLoad(large, once["gpu"], stream)),
        "h2d": Lane(h2d, QueuedLoad(one_copy, once["h2d"], copies.stream)),
        "cpu": Lane(host_sample(on_cpu), WorkerLoad(sweep.workers, task, once["cpu"])),
    }
    with _Stage(sweep, "interference"):
        found = slowdowns(clock, lanes, tries)
    return {lane: {k: asdict(v) for k, v in beside.items()} for lane, beside in found.items()}


def cpu_pool(cost: CostGeometry, axes: Axes, device: torch.device, limit_bytes: int) -> Experts:
    """Return the rotating expert pool in (pinned) host memory."""
    pool = max(axes.experts[-1], -(-limit_bytes // cost.expert_bytes))
    return Experts(cost, pool, pin=device.type == "cuda")


def _limit(sweep: Sweep, size_bytes: int) -> int:
    return size_bytes if sweep.clock.device.type == "cuda" else 0


def _columns(cells: Sequence[Spread]) -> dict[str, list]:
    return {
        "median_us": [c.median for c in cells],
        "p10_us": [c.p10 for c in cells],
        "p90_us": [c.p90 for c in cells],
        "repeats": [c.repeats for c in cells],
    }


def _rows(cells: Sequence[Sequence[Spread]]) -> dict[str, list]:
    columns = [_columns(row) for row in cells]
    return {key: [c[key] for c in columns] for key in columns[0]}
