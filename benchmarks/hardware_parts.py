"""Time the GPU side of the hardware layer at a geometry's size, part by part.

    python benchmarks/hardware_parts.py --geometry llada2.0-mini --tokens 16 --context 512

Prints for each part the median time on the GPU between two events on an idle device, and the
median time its call takes on the host, in microseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np
import torch

from oled_sim.geometry import find_geometry
from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.place import find_place
from oled_sim.hardware.rows import event_rows
from oled_sim.hardware.slab import Slab

REPEATS = 40
LAYERS = 8
"""MoE layers taken in turn, so that weights come from memory and not from the cache."""

Part = tuple[str, Callable[[], object]]


def grouped_parts(grouped: GroupedExperts, backbone: Backbone, slots: int) -> Iterator[Part]:
    """Yield calls of 1 to 48 experts with two rows each, other slots at every call."""
    draw = np.random.default_rng(0)
    top_k = backbone.config.num_experts_per_tok
    for n in (1, 4, 12, 24, 48):
        experts = np.arange(backbone.tokens * top_k // 2)
        routes = np.tile(experts, 2).reshape(backbone.tokens, top_k)
        rows = event_rows(routes, None, experts, 2.5)
        turns = cycle([draw.permutation(slots)[:n].astype(np.int32) for _ in range(16)])
        which = np.arange(min(n, len(experts)), dtype=np.int32)

        def call() -> None:
            grouped.load(rows)  # noqa: B023 - called before the next turn of the loop
            grouped.run(backbone.x, which, next(turns)[: len(which)], backbone.out)  # noqa: B023

        yield f"grouped, {len(which)} experts x 2 rows", call


def times_us(call: Callable[[], object]) -> tuple[float, float]:
    """Return median GPU and host time of a call, from an idle device."""
    on_gpu, on_host = [], []
    for _ in range(REPEATS + 5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000)  # the launch is not part of the work
        first.record()
        start = time.perf_counter_ns()
        call()
        on_host.append((time.perf_counter_ns() - start) / 1e3)
        last.record()
        torch.cuda.synchronize()
        on_gpu.append(first.elapsed_time(last) * 1e3)
    return statistics.median(on_gpu[5:]), statistics.median(on_host[5:])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--geometry", default="llada2.0-mini")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of a block")
    parser.add_argument("--context", type=int, default=512, help="tokens kept before it")
    options = parser.parse_args()
    cost, place = find_geometry(options.geometry), find_place("cuda")
    block, context = options.tokens, options.context
    backbone = Backbone(place, cost, LAYERS, block, context + block, seed=0)
    slab = Slab(place, cost, 128)
    slab.weights.normal_(0, cost.hidden_size**-0.5)
    grouped = GroupedExperts(place, cost, slab, block)
    backbone.capture([context])
    grouped.capture(backbone.x, backbone.out)
    backbone.begin_pass(block, context)
    layer = cycle(range(LAYERS))
    parts: list[Part] = [
        ("begin_pass", lambda: backbone.begin_pass(block, context)),
        ("to_gate", lambda: backbone.to_gate(next(layer))),
        ("attention, eager", lambda: backbone.attention(next(layer))),
        ("gate, eager", lambda: backbone.gate(next(layer))),
        ("shared", lambda: backbone.shared(next(layer))),
        ("merge", lambda: backbone.merge(0, None)),
        ("head", backbone.head),
        *grouped_parts(grouped, backbone, slab.slots),
    ]
    print(f"{torch.cuda.get_device_name()}, {cost.name}, {block} tokens, context {context}")
    print(f"{'part':32}{'GPU us':>10}{'host us':>10}")
    for name, call in parts:
        on_gpu, on_host = times_us(call)
        print(f"{name:32}{on_gpu:10.1f}{on_host:10.1f}")


if __name__ == "__main__":
    main()
