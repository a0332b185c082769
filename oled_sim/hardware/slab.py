"""Device memory of all expert slots: residents and staging, of all layers."""

from __future__ import annotations

import torch
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.memory import require_gpu_memory
from oled_sim.hardware.place import Place
from oled_sim.hardware.shapes import expert_elements

__all__ = ["Slab", "require_gpu_memory"]


class Slab:
    """Slots for routed experts, each one contiguous run as :class:`HostExperts` packs them.

    f is the expert's inner width, h the hidden width.

    Args:
        place: where.
        cost: sizes of an expert.
        slots: number of them, at least 1.

    Attributes:
        weights: [slots, 3·f·h] in the place's dtype, zero at first.
        up: view [slots, 2f, h], gate projection then up projection (strided).
        down: view [slots, h, f] (strided).

    Raises:
        CapacityError: the device has not enough memory.
    """

    def __init__(self, place: Place, cost: CostGeometry, slots: int) -> None:
        require_gpu_memory(cost, slots, place)
        f, h = cost.moe_intermediate_size, cost.hidden_size
        size = expert_elements(cost)
        self.weights = torch.zeros(slots, size, device=place.device, dtype=place.dtype)
        self.up: Tensor = self.weights[:, : 2 * f * h].view(slots, 2 * f, h)
        self.down: Tensor = self.weights[:, 2 * f * h :].view(slots, h, f)

    @property
    def slots(self) -> int:
        """Number of slots."""
        return len(self.weights)
