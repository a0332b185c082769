"""Models by name: the bundled one, or the folder of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from oled_sim.errors import CheckpointError, UsageError
from oled_sim.model.checkpoint import SINGLE_FILE, load_checkpoint
from oled_sim.model.config import CONFIG_FILE
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.tokenizer import Tokenizer

BUNDLED = ("nano",)
ASSETS = Path(__file__).parent / "assets"


def checkpoint_path(name_or_path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a user means: a bundled model's name, a folder, or a file.

    Raises:
        UsageError: nothing by that name, or something else than a checkpoint.
        CheckpointError: the bundled model is absent from this installation.
    """
    if name_or_path in BUNDLED:
        folder = ASSETS / str(name_or_path)
        if not (folder / SINGLE_FILE).is_file():
            raise CheckpointError(
                f"the bundled model {name_or_path!r} is not in this installation ({folder} holds "
                f"no {SINGLE_FILE}): install oled-sim again, or name a checkpoint folder"
            )
        return folder
    path = Path(name_or_path)
    if not path.exists():
        known = ", ".join(BUNDLED)
        raise UsageError(f"no model {str(path)!r}: name a checkpoint folder or one of {known}")
    if path.is_dir() and not (path / CONFIG_FILE).exists():
        raise UsageError(f"{path} is no checkpoint: name a folder that holds {CONFIG_FILE}")
    if not path.is_dir() and path.suffix != ".safetensors":
        raise UsageError(f"{path} is no checkpoint: name its folder, or a .safetensors file in it")
    return path


def load_model(
    name_or_path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> LLaDA2MoeModelLM:
    """Load a model for generation.

    Args:
        name_or_path: ``"nano"``, or the folder of a published checkpoint.
        device: default CUDA where there is one, else the CPU.
        dtype: default bf16 on CUDA, fp32 on the CPU.

    Raises:
        UsageError: no such model or device.
        CheckpointError: see :func:`load_checkpoint`.
        CapacityError: the device has not enough memory.
    """
    path, target = checkpoint_path(name_or_path), pick_device(device)
    if dtype is None:
        dtype = torch.bfloat16 if target.type == "cuda" else torch.float32
    return load_checkpoint(path, target, dtype)


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
    """Load the tokenizer beside a model's weights; raises as :func:`load_model`."""
    path = checkpoint_path(name_or_path)
    return Tokenizer.from_folder(path if path.is_dir() else path.parent)


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, or the best present one.

    Raises:
        UsageError: the name means nothing, or this machine has no such device.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError:
        raise UsageError(f"unknown device {device!r}: use cpu, cuda or cuda:N") from None
    if picked.type not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not supported: use cpu, cuda or cuda:N")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"no device {str(device)!r} on this machine: use --device cpu")
    return picked
