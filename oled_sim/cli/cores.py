"""How many CPU workers a machine can have."""

from __future__ import annotations

import os

from oled_sim.errors import UsageError


def require_cores(workers: int | None) -> None:
    """Refuse more CPU workers than there are cores.

    Raises:
        UsageError: says how many there are.
    """
    cores = len(os.sched_getaffinity(0))
    if workers is not None and workers > cores:
        raise UsageError(f"--workers {workers} exceeds this machine's {cores} cores: give fewer")
