"""A model without its experts on the device, and a machine around them."""

from __future__ import annotations

import os

import torch

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.clock import Clock
from oled_sim.hardware.copy_lane import CopyLane
from oled_sim.hardware.cpu_lane import CpuLane
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.machine import ExpertMachine
from oled_sim.hardware.memory import require_gpu_memory
from oled_sim.hardware.place import Place
from oled_sim.hardware.shapes import cost_geometry
from oled_sim.hardware.slab import Slab
from oled_sim.model.checkpoint_reader import load_tensors
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.loading import checkpoint_path
from oled_sim.model.moe import LLaDA2MoeExperts


def load_without_experts(name_or_path: str | os.PathLike[str], place: Place) -> LLaDA2MoeModelLM:
    """Load everything of a checkpoint but its routed experts, which stay on the ``meta`` device.

    Raises:
        UsageError, CheckpointError: as :func:`oled_sim.model.loading.load_model`.
    """
    path = checkpoint_path(name_or_path)
    config = LLaDA2Config.from_file(path if path.is_dir() else path.parent)
    with torch.device("meta"):
        model = LLaDA2MoeModelLM(config).to(place.dtype)
    for module in model.modules():
        if not isinstance(module, LLaDA2MoeExperts):
            module.to_empty(device=place.device, recurse=False)
    model.tie_weights()
    wanted = {name: t for name, t in model.state_dict().items() if not t.is_meta}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    load_tensors(path, wanted)
    return model.eval().requires_grad_(False)


def release_experts(model: LLaDA2MoeModelLM) -> None:
    """Free the memory of a model's routed experts; it can no longer run them by itself."""
    for block in model.sparse_blocks().values():
        block.experts.to_empty(device="meta")


def model_geometry(model: LLaDA2MoeModelLM, name: str) -> CostGeometry:
    """Return the sizes of a model, in its own dtype."""
    return cost_geometry(model.config, model.dtype.itemsize, name)


def machine_for(
    experts: HostExperts,
    slots: int,
    most_tokens: int,
    scale: float,
    *,
    workers: int,
) -> ExpertMachine:
    """Put the lanes together around experts in host memory.

    Args:
        experts: of the model.
        slots: of the slab, staging included.
        most_tokens: of a pass.
        scale: the model's factor on renormalised gate weights.
        workers: CPU threads that compute experts.

    Raises:
        CapacityError: the device has not enough memory.
        UsageError: more workers than torch's pool was started with.
    """
    place, cost = experts.place, experts.cost
    require_gpu_memory(cost, slots, place)
    slab, clock = Slab(place, cost, slots), Clock(place.device)
    return ExpertMachine(
        place=place,
        clock=clock,
        experts=experts,
        slab=slab,
        grouped=GroupedExperts(place, cost, slab, most_tokens),
        copies=CopyLane(place, clock, experts, slab),
        cpu=CpuLane(experts, place, cost, workers, most_tokens),
        scale=scale,
    )
