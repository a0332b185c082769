"""Streams of a GPU that run beside the one that computes: one for each purpose, the same all along.

torch hands out 32 streams, one after the other and then again: of two lanes that come by the same
one, each waits for the other. CUDA sends streams through queues of the hardware, 8 unless it is
told otherwise, and by its manual streams that share a queue may wait for each other, too.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Literal

import torch

# Read by CUDA when a process first uses the device; as many as the hardware has.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

Purpose = Literal["copies", "cpu link", "capture"]


@cache
def stream_for(purpose: Purpose, device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a CUDA device for a purpose.

    ``copies``: experts on their way, either direction. ``cpu link``: the CPU lane's ways there and
    back, where they are timed apart from the GPU's work. ``capture``: graphs.
    """
    return torch.cuda.Stream(device)
