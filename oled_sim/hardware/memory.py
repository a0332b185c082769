"""How much memory is free: on the host, within the limits of its control groups, and on a GPU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from oled_sim.errors import CapacityError
from oled_sim.geometry import CostGeometry
from oled_sim.hardware.place import Place
from oled_sim.hardware.shapes import expert_elements

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")
RESERVE_BYTES = 1 << 30
"""Host memory left to everything else, when gigabytes are asked for."""


def require_host_memory(cost: CostGeometry, layers: int, place: Place) -> None:
    """Check, before anything is allocated, that the routed experts of ``layers`` layers fit.

    The limit on locked memory (``ulimit -l``) is no reason to refuse: the NVIDIA driver does not
    count what it locks. Where locking fails all the same, the error names that limit.

    Raises:
        CapacityError: they do not; with need, what is free, and what limits it.
    """
    need = layers * cost.experts * expert_elements(cost) * place.item_bytes
    free, limit = available_host_bytes()
    reserve = min(RESERVE_BYTES, need // 8)
    if need + reserve > free:
        raise CapacityError(
            f"the routed experts of {layers} layers of {cost.name} take {_gib(need)} of host "
            f"memory and {_gib(free)} are free ({limit}): use more memory, a smaller geometry, "
            "or fewer layers"
        )


def require_gpu_memory(cost: CostGeometry, slots: int, place: Place, more_bytes: int = 0) -> None:
    """Check, before anything is allocated, that ``slots`` expert slots fit on the device.

    Args:
        cost: sizes of an expert.
        slots: residents and staging slots of all layers.
        place: on the CPU, host memory is what counts.
        more_bytes: what will be allocated besides, in bytes.

    Raises:
        CapacityError: they do not; with need and what is free.
    """
    need = slots * expert_elements(cost) * place.item_bytes + more_bytes
    free = available_gpu_bytes(place.device) if place.cuda else available_host_bytes()[0]
    if need > free:
        rest = f" with {_gib(more_bytes)} for everything else" if more_bytes else ""
        raise CapacityError(
            f"{slots} expert slots of {cost.name}{rest} take {_gib(need)} and {place.device} has "
            f"{_gib(free)} free: use a smaller cache, fewer staging slots or another device"
        )


def available_gpu_bytes(device: torch.device) -> int:
    """Return free bytes of a CUDA device, those that torch holds unused included."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused


def available_host_bytes() -> tuple[float, str]:
    """Return how many bytes this process may still use, and what says so.

    The smallest of the system's ``MemAvailable`` and what each control group above the process
    leaves (its limit less its use, page cache that can be dropped not counted); infinite where
    the system tells neither.
    """
    found = [(_meminfo_available(), "MemAvailable"), *_group_room()]
    return min(found, key=lambda pair: pair[0])


def locked_memory_limit() -> str:
    """Return the limit on locked memory in words, for the sentence of a failed page lock."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    return "ulimit -l is unlimited" if unlimited else f"ulimit -l allows {_gib(soft)}"


def _meminfo_available() -> float:
    text = _read(MEMINFO)
    found = [line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else float("inf")


def _group_room() -> list[tuple[float, str]]:
    """Return what each memory control group of this process leaves, version 2 and 1."""
    room: list[tuple[float, str]] = []
    for line in _read(OWN_GROUPS).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            names, root = ("memory.max", "memory.current", "inactive_file"), GROUPS
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            root = GROUPS / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        # A container may see its own group as the root, whatever the path says.
        above = (one for one in folder.parents if one.is_relative_to(root))
        left = (_left(one, *names) for one in (folder, *above))
        room += [(free, "memory limit of the control group") for free in left if free is not None]
    return room


def _left(folder: Path, limit: str, use: str, cache: str) -> float | None:
    """Return what one group leaves, or None where it sets no limit."""
    maximum, used = _read(folder / limit).strip(), _read(folder / use).strip()
    if not (maximum.isdigit() and used.isdigit()):
        return None
    rows = (line.split() for line in _read(folder / "memory.stat").splitlines())
    droppable = sum(int(row[1]) for row in rows if row[0] == cache)
    return max(0.0, int(maximum) - int(used) + droppable)


def _read(file: Path) -> str:
    """Return a file's text, or nothing where the system has no such file."""
    try:
        return file.read_text()
    except OSError:
        return ""


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**28 else f"{size / 2**20:.1f} MiB"
