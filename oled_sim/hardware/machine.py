"""The parts of a machine that a run keeps busy, put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.clock import Clock
from oled_sim.hardware.copy_lane import CopyLane
from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.host_experts import HostExperts, Progress
from oled_sim.hardware.memory import require_gpu_memory
from oled_sim.hardware.place import Place
from oled_sim.hardware.slab import Slab


@dataclass(frozen=True, kw_only=True)
class ExpertMachine:
    """What runs routed experts, wherever their inputs come from.

    Attributes:
        place: device and dtype. clock: marks in the GPU's work.
        experts: all routed experts, in host memory.
        slab: slots for them on the GPU. grouped: computes experts that lie in slots.
        copies: the copy engine. cpu: the CPU workers.
        scale: factor on the renormalised gate weights of routed experts.
    """

    place: Place
    clock: Clock
    experts: HostExperts
    slab: Slab
    grouped: GroupedExperts
    copies: CopyLane
    cpu: CpuLane
    scale: float

    def close(self) -> None:
        """Wait for all lanes, and give back page-locked memory."""
        self.cpu.close()
        self.copies.close()
        self.experts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def synchronize(self) -> None:
        """Wait until the GPU has finished everything."""
        if self.place.cuda:
            torch.cuda.synchronize(self.place.device)


@dataclass(frozen=True, kw_only=True)
class Machine(ExpertMachine):
    """Everything that works in a replay.

    Attributes:
        backbone: all of the model but the routed experts.
    """

    backbone: Backbone

    def get_ready(self, contexts: Iterable[int]) -> None:
        """Capture the passes to come, and run every kind of kernel once, off the clock.

        Args:
            contexts: tokens that precede the block-sized passes to come.
        """
        backbone = self.backbone
        backbone.capture(contexts, self.cpu.sums[: backbone.block])
        backbone.begin_pass(backbone.block, 0)
        self.grouped.capture(backbone.x, backbone.out)
        self.cpu.capture(backbone.x)
        self.synchronize()


@dataclass(frozen=True)
class Sizes:
    """How much of a machine a replay needs.

    Attributes:
        layers: MoE layers. slots: expert slots on the GPU, staging included.
        block: tokens of a decode pass. most_tokens: of any pass. most_context: most tokens before
            and in a pass.
    """

    layers: int
    slots: int
    block: int
    most_tokens: int
    most_context: int


def build_machine(
    place: Place,
    cost: CostGeometry,
    sizes: Sizes,
    *,
    workers: int,
    seed: int,
    checkpoint: Path | None = None,
    progress: Progress | None = None,
) -> Machine:
    """Allocate and fill everything that a replay works with.

    Args:
        place: device and dtype.
        cost: sizes of the model.
        sizes: how much of it.
        workers: CPU threads that compute experts.
        seed: of random weights.
        checkpoint: a folder with real weights of this geometry; by default they are random.
        progress: called with layers of experts that are in memory, and all of them.

    Raises:
        CapacityError: host or GPU memory does not suffice; nothing has been allocated then.
        CheckpointError: the checkpoint is none, or of another geometry.
    """
    require_gpu_memory(cost, sizes.slots, place, cost.resident_bytes)
    if checkpoint is None:
        experts = HostExperts.random(cost, sizes.layers, place, seed, progress)
    else:
        experts = HostExperts.from_model(checkpoint, place, progress)
    return assemble(
        place, cost, sizes, experts, workers=workers, seed=seed,
        checkpoint=checkpoint,
    )  # fmt: skip


def assemble(
    place: Place,
    cost: CostGeometry,
    sizes: Sizes,
    experts: HostExperts,
    *,
    workers: int,
    seed: int,
    checkpoint: Path | None = None,
) -> Machine:
    """Put a machine together around experts that are in memory; see :func:`build_machine`."""
    if checkpoint is None:
        backbone = Backbone(place, cost, sizes.layers, sizes.block, sizes.most_context, seed)
    else:
        backbone = Backbone.from_model(checkpoint, place, sizes.block, sizes.most_context)
    slab, clock = Slab(place, cost, sizes.slots), Clock(place.device)
    return Machine(
        place=place,
        clock=clock,
        backbone=backbone,
        experts=experts,
        slab=slab,
        grouped=GroupedExperts(place, cost, slab, sizes.most_tokens),
        copies=CopyLane(place, clock, experts, slab),
        cpu=CpuLane(experts, place, cost, workers, sizes.most_tokens),
        scale=backbone.config.routed_scaling_factor,
    )
