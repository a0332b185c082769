"""Where weights and activations live."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from oled_sim.errors import UsageError
from oled_sim.model.loading import pick_device

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Number formats by the names that options use."""


@dataclass(frozen=True)
class Place:
    """A device and the number format of everything on it.

    Attributes:
        device: a CUDA device or the CPU.
        dtype: of weights and activations; routers are fp32 in any case.
    """

    device: torch.device
    dtype: torch.dtype

    @property
    def cuda(self) -> bool:
        """Whether this is a CUDA device."""
        return self.device.type == "cuda"

    @property
    def item_bytes(self) -> int:
        """Bytes of one weight."""
        return self.dtype.itemsize


def find_place(device: str | None = None, dtype: str | None = None) -> Place:
    """Return the place asked for.

    Args:
        device: ``cpu``, ``cuda`` or ``cuda:N``; default CUDA where there is one, else the CPU.
        dtype: ``bf16`` or ``fp32``; default bf16 on CUDA, fp32 on the CPU.

    Raises:
        UsageError: an unknown name, or a device that this machine lacks.
    """
    picked = pick_device(device)
    if dtype is None:
        return Place(picked, torch.bfloat16 if picked.type == "cuda" else torch.float32)
    if dtype not in DTYPES:
        raise UsageError(f"unknown number format {dtype!r}: use {' or '.join(DTYPES)}")
    return Place(picked, DTYPES[dtype])
