"""The report of a training run: one JSON file beside the weights, from which the card is made."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers
import torch

from oled_sim.errors import UsageError

REPORT_FILE = "training.json"


def environment(device: torch.device) -> dict[str, str]:
    """Return what the run ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": name,
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "tokenizers": tokenizers.__version__,
    }


def read_report(path: Path) -> dict[str, Any]:
    """Read a report.

    Raises:
        UsageError: it is missing or damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"cannot read the training report {path}: {error}") from None


def write_report(path: Path, report: dict[str, Any]) -> None:
    """Write a report atomically."""
    write_atomically(path, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync it, and put it in place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
