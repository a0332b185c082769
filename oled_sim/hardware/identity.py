"""What machine this is: names, versions, link. Unknown facts are 0 or "unknown"."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

from oled_sim.costs.profile import Hardware, Software

_QUERY = "driver_version,pcie.link.gen.max,pcie.link.width.max"
NO_GPU = "none (CPU threads)"


def default_workers(device: torch.device) -> int:
    """Return how many CPU threads compute experts unless it is said.

    Beside a GPU three quarters of the cores: the others are for the thread that launches kernels
    and polls, for the driver and the system. With two of 16 to spare, while experts were copied a
    worker lost its core in the middle of every twentieth job or so, and all others waited 10 ms
    for it: no less time on average than with four to spare. Where the CPU also stands for the
    GPU, half of them.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, cores - -(-cores // 4) if device.type == "cuda" else cores // 2)


def share_cores(device: torch.device, workers: int) -> None:
    """Leave the cores to the workers where the calling thread computes what a GPU would.

    Measuring and replaying must agree on this.
    """
    if device.type != "cuda":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - workers))


def hardware(device: torch.device, workers: int) -> Hardware:
    """Return this machine as a profile names it."""
    cuda = device.type == "cuda"
    driver, generation, width = _nvidia(device) if cuda else ("none", 0, 0)
    gpu = torch.cuda.get_device_properties(device) if cuda else None
    return Hardware(
        gpu=gpu.name if gpu else NO_GPU,
        gpu_memory_bytes=gpu.total_memory if gpu else 0,
        driver=driver,
        pcie_generation=generation,
        pcie_width=width,
        cpu=_cpu_name(),
        cores=len(os.sched_getaffinity(0)),
        workers=workers,
        host_memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


def software() -> Software:
    """Return the versions that kernels come from."""
    return Software(
        os=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=torch.version.cuda or "none",
        numpy=str(np.__version__),
    )


def revision() -> str:
    """Return the first digits of the sha256 over the sources that measure and are measured."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _nvidia(device: torch.device) -> tuple[str, int, int]:
    """Return driver version, PCIe generation and width of a CUDA device."""
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    command.append(f"--id={device.index or 0}")
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown", 0, 0
    driver, generation, width = (f.strip() for f in found.stdout.splitlines()[0].split(","))
    return driver, _number(generation), _number(width)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
