"""The parts of the hardware layer that are measured, put together."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.measuring.axes import Axes, ExpertAxes
from oled_sim.hardware.measuring.events import Rotation, tokens_of
from oled_sim.hardware.memory import available_host_bytes
from oled_sim.hardware.place import Place
from oled_sim.hardware.shapes import expert_elements
from oled_sim.hardware.slab import Slab

SEED = 0
HOST_POOL_BYTES, SMALL_HOST_POOL_BYTES = 4 << 30, 1 << 30
"""Least size of the experts in host memory with a GPU and without, unless all of the model's are
fewer. Many times the last level cache of a server, which has hundreds of MB; with 16 GiB CPU
experts took as long as with 1.5, and page-locking those takes longer than most tables."""
HOST_SHARE = 0.25
"""Of the host memory that is available, the most that these may take."""
GPU_POOL_BYTES = 3 << 30
"""Least size of the experts on the GPU."""
WEIGHTS_BYTES = 256 << 20
"""Least size of rotated weights that are no experts: four times the largest L2."""


@dataclass(frozen=True)
class Rig:
    """What is measured.

    Attributes:
        cost: sizes; its ``weight_bytes`` are those of the place's dtype.
        axes: where to measure. place: device and dtype. workers: of the CPU lane.
        layers: MoE layers of a backbone that rotates through enough weights.
        experts: routed experts in host memory, and ``rotation`` through them.
        slab: slots on the GPU. grouped: computes experts in them.
        lane: the CPU lane.
        x: [tokens, h] inputs on the device; ``out`` [tokens·k, h].
    """

    cost: CostGeometry
    axes: Axes
    place: Place
    workers: int
    layers: int
    experts: HostExperts
    rotation: Rotation
    slab: Slab
    grouped: GroupedExperts
    lane: CpuLane
    x: Tensor
    out: Tensor


@contextmanager
def built(
    cost: CostGeometry, axes: Axes, place: Place, workers: int, *, quick: bool
) -> Iterator[Rig]:
    """Yield a rig; give its page-locked memory back at the end.

    Raises:
        CapacityError: not enough memory on the host or the GPU.
        UsageError: torch cannot serve so many workers.
    """
    layer_bytes = cost.experts * expert_elements(cost) * place.item_bytes
    pool_bytes = 0 if quick else host_pool_bytes(place)
    layers = min(cost.moe_layers, max(1, math.ceil(pool_bytes / layer_bytes)))
    most = tokens_on_gpu(axes, cost)
    with HostExperts.random(cost, layers, place, SEED) as experts:
        slab = Slab(place, cost, _slots(cost, place, quick))
        for first in range(0, slab.slots, cost.experts):
            some = slab.weights[first : first + cost.experts]
            some.copy_(experts.packed[first // cost.experts % layers][: len(some)])
        tokens = tokens_on_cpu(axes, cost)
        x = torch.randn(max(most, tokens), cost.hidden_size, device=place.device, dtype=place.dtype)
        out = torch.zeros(most * cost.top_k, cost.hidden_size, device=place.device, dtype=x.dtype)
        grouped = GroupedExperts(place, cost, slab, most)
        grouped.capture(x, out)
        with CpuLane(experts, place, cost, workers, tokens) as lane:
            yield Rig(
                cost, axes, place, workers, _backbone_layers(cost, place, quick), experts,
                Rotation(layers, cost.experts), slab, grouped, lane, x, out,
            )  # fmt: skip


def host_pool_bytes(place: Place) -> int:
    """Return how large the experts in host memory are to be."""
    if not place.cuda:  # whose random numbers take a processor minutes
        return SMALL_HOST_POOL_BYTES
    return int(min(HOST_POOL_BYTES, HOST_SHARE * available_host_bytes()[0]))


def tokens_on_gpu(axes: Axes, cost: CostGeometry) -> int:
    """Return the tokens of the largest event that the grouped kernel is measured with."""
    return _largest(axes.on_gpu, cost)


def tokens_on_cpu(axes: Axes, cost: CostGeometry) -> int:
    """Return the tokens of the largest event that the CPU lane is measured with."""
    return max(_largest(axes.on_cpu, cost), axes.tokens[-1])


def _largest(axes: ExpertAxes, cost: CostGeometry) -> int:
    return max(
        tokens_of(n, t, cost.top_k)
        for n in axes.experts
        for t in axes.tokens_per_expert
        if axes.reachable(n, t, cost)
    )


def _slots(cost: CostGeometry, place: Place, quick: bool) -> int:
    """Return enough slots that no cache of a GPU holds them."""
    if not place.cuda or quick:
        return cost.experts
    size = expert_elements(cost) * place.item_bytes
    return max(cost.experts, math.ceil(GPU_POOL_BYTES / size))


def _backbone_layers(cost: CostGeometry, place: Place, quick: bool) -> int:
    """Return how many MoE layers have enough weights besides experts."""
    h, width = cost.hidden_size, (cost.heads + cost.kv_heads) * cost.head_dim
    elements = 2 * width * h + 3 * h * cost.moe_intermediate_size * cost.shared_experts
    layer_bytes = elements * place.item_bytes + 4 * cost.experts * h
    wanted = 1 if quick else math.ceil(WEIGHTS_BYTES / layer_bytes)
    return min(cost.moe_layers, max(1, wanted))
