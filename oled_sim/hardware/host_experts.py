"""All routed experts in host memory, page-locked where a GPU copies from them."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from oled_sim.errors import CapacityError
from oled_sim.geometry import CostGeometry
from oled_sim.hardware.memory import locked_memory_limit, require_host_memory
from oled_sim.hardware.place import Place
from oled_sim.hardware.shapes import cost_geometry, expert_elements
from oled_sim.model.checkpoint_reader import load_tensors
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM

__all__ = ["HostExperts", "Progress", "require_host_memory"]

Progress = Callable[[int, int], None]
"""Told (layers finished, layers in all)."""

_CHUNK_BYTES = 512 << 20
"""Random weights are made on the device in pieces of about this size."""


class HostExperts:
    """Routed experts of some MoE layers in host memory.

    One expert is one contiguous run of 3·f·h weights, gate projection and up projection [2f, h],
    then down projection [h, f], so one copy moves it. Layers are counted among the MoE layers,
    from 0. Memory comes in huge pages where the system has them, is touched by all threads
    before it is locked (locking alone would fault page by page), and is registered with CUDA as
    it is: torch's own allocator of pinned memory would round each layer up to a power of two.

    Args:
        cost: sizes.
        layers: number of MoE layers.
        place: weights are in its dtype, and page-locked if it is a CUDA device.
        progress: told after each layer that memory is there.

    Attributes:
        packed: one tensor per layer, [experts, 3·f·h].

    Raises:
        CapacityError: not enough host memory, or the system refuses to lock it.
    """

    def __init__(
        self, cost: CostGeometry, layers: int, place: Place, progress: Progress | None = None
    ) -> None:
        require_host_memory(cost, layers, place)
        self.cost, self.place = cost, place
        self.packed: list[Tensor] = []
        self._locked: list[int] = []
        try:
            for layer in range(layers):
                self._add_layer()
                if progress is not None:
                    progress(layer + 1, layers)
        except BaseException:
            self.close()
            raise

    @classmethod
    def random(
        cls,
        cost: CostGeometry,
        layers: int,
        place: Place,
        seed: int,
        progress: Progress | None = None,
    ) -> HostExperts:
        """Return distinct random experts; a projection keeps the size of what it maps.

        They are drawn on the place's device, so they depend on its kind.
        """
        experts = cls(cost, layers, place, progress)
        for layer, packed in enumerate(experts.packed):
            _draw(packed, cost, place, seed * 1_000_003 + layer)
        return experts

    @classmethod
    def from_model(
        cls,
        source: LLaDA2MoeModelLM | str | os.PathLike[str],
        place: Place,
        progress: Progress | None = None,
    ) -> HostExperts:
        """Return the experts of a model in memory, or of a checkpoint folder (read from disk).

        Raises:
            CheckpointError: the folder holds no such model.
            CapacityError: not enough host memory.
        """
        loaded = isinstance(source, LLaDA2MoeModelLM)
        config = source.config if loaded else LLaDA2Config.from_file(source)
        cost = cost_geometry(config, place.item_bytes)
        experts = cls(cost, len(config.moe_layers), place, progress)
        wanted = experts._published(config)
        if loaded:
            state = source.state_dict()
            for name, tensor in wanted.items():
                tensor.copy_(state[name])
        else:
            load_tensors(source, wanted)
        return experts

    def up(self, layer: int, expert: int) -> Tensor:
        """Return gate and up projection of an expert, a view [2f, h]."""
        return self._up(layer)[expert]

    def down(self, layer: int, expert: int) -> Tensor:
        """Return the down projection of an expert, a view [h, f]."""
        return self._down(layer)[expert]

    def close(self) -> None:
        """Unlock the memory; it is freed with the last tensor that refers to it."""
        while self._locked:
            torch.cuda.check_error(int(_runtime().cudaHostUnregister(self._locked.pop())))

    def __enter__(self) -> HostExperts:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _add_layer(self) -> None:
        shape = (self.cost.experts, expert_elements(self.cost))
        packed = _touched(math.prod(shape), self.place.dtype).view(shape)
        if self.place.cuda:
            self._lock(packed)
        self.packed.append(packed)

    def _lock(self, packed: Tensor) -> None:
        status = int(_runtime().cudaHostRegister(packed.data_ptr(), packed.nbytes, 0))
        if status:
            raise CapacityError(
                f"cannot lock {packed.nbytes / 2**30:.1f} GiB of host memory after "
                f"{len(self._locked)} layers (CUDA error {status}; {locked_memory_limit()}): raise "
                "the limit on locked memory or use fewer layers"
            )
        self._locked.append(packed.data_ptr())

    def _up(self, layer: int) -> Tensor:
        f, h = self.cost.moe_intermediate_size, self.cost.hidden_size
        return self.packed[layer][:, : 2 * f * h].view(-1, 2 * f, h)

    def _down(self, layer: int) -> Tensor:
        f, h = self.cost.moe_intermediate_size, self.cost.hidden_size
        return self.packed[layer][:, 2 * f * h :].view(-1, h, f)

    def _published(self, config: LLaDA2Config) -> dict[str, Tensor]:
        """Return published name of each stack of experts to its view here."""
        named: dict[str, Tensor] = {}
        for position, layer in enumerate(config.moe_layers):
            stem = f"model.layers.{layer}.mlp.experts"
            gate, up = self._up(position).chunk(2, dim=1)
            named[f"{stem}.gate_proj"], named[f"{stem}.up_proj"] = gate, up
            named[f"{stem}.down_proj"] = self._down(position)
        return named


def _runtime() -> Any:
    """Return torch's binding of the CUDA runtime."""
    return torch.cuda.cudart()


def _touched(elements: int, dtype: torch.dtype) -> Tensor:
    """Return zeroed host memory that is really there, in huge pages where possible."""
    memory = mmap.mmap(-1, elements * dtype.itemsize)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).zero_()


def _draw(packed: Tensor, cost: CostGeometry, place: Place, seed: int) -> None:
    """Fill the experts of one layer: N(0, 1/inputs) in each projection."""
    f, h = cost.moe_intermediate_size, cost.hidden_size
    generator = torch.Generator(place.device).manual_seed(seed)
    step = max(1, _CHUNK_BYTES // (packed.shape[1] * place.item_bytes))
    for some in packed.split(step):
        drawn = torch.empty(some.shape, device=place.device, dtype=place.dtype)
        drawn.normal_(generator=generator)
        drawn[:, : 2 * f * h] /= math.sqrt(h)
        drawn[:, 2 * f * h :] /= math.sqrt(f)
        some.copy_(drawn)
