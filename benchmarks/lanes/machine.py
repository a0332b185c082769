"""What machine this is: names, versions, link. Unknown facts are 0 or "unknown"."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from pathlib import Path

import numpy as np
import torch

_QUERY = "driver_version,pcie.link.gen.max,pcie.link.width.max"


def hardware(device: torch.device, workers: int) -> dict[str, str | int]:
    """Return the fields of a profile's hardware section."""
    driver, generation, width = _nvidia() if device.type == "cuda" else ("none", 0, 0)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "gpu": gpu.name if gpu else "none (CPU threads)",
        "gpu_memory_bytes": gpu.total_memory if gpu else 0,
        "driver": driver,
        "pcie_generation": generation,
        "pcie_width": width,
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "workers": workers,
        "host_memory_bytes": memory,
    }


def software() -> dict[str, str]:
    """Return the fields of a profile's software section."""
    return {
        "os": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "none",
        "numpy": str(np.__version__),
    }


def revision() -> str:
    """Return the first digits of the sha256 over the sources of the measurement."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted([folder.parent / "measure_lanes.py", *folder.glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _nvidia() -> tuple[str, int, int]:
    command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown", 0, 0
    driver, generation, width = (f.strip() for f in found.stdout.splitlines()[0].split(","))
    return driver, _number(generation), _number(width)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else 0
