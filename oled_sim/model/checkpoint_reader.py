"""Reading a checkpoint: headers first, then tensor by tensor from mapped memory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oled_sim.errors import CapacityError, CheckpointError
from oled_sim.model.checkpoint_layout import INDEX_FILE, SINGLE_FILE, canonical, pieces
from oled_sim.model.config import CONFIG_FILE, LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM

_PROGRESS_BYTES = 1 << 30
_NAMES_SHOWN = 3
_FLOATS = {"F32", "BF16", "F16"}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a file: where it is and what its header says."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str


def load_checkpoint(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> LLaDA2MoeModelLM:
    """Load a checkpoint folder (or one ``.safetensors`` file with ``config.json`` beside it).

    Weights are converted to ``dtype``; expert biases stay fp32. The model is in evaluation
    mode with gradients off.

    Raises:
        CheckpointError: a file is missing or damaged, or tensors are missing, unexpected or of
            another shape than the configuration says; the sentence names the first of them.
        CapacityError: the device has not enough memory.
    """
    config, shards = LLaDA2Config.from_file(_folder(path)), _shards(Path(path))
    stored = _read_headers(shards)
    with torch.device("meta"):
        model = LLaDA2MoeModelLM(config).to(dtype)
    _check(Path(path), stored, _wanted(model, stored))
    _allocate(model, torch.device(device))
    _copy(stored, _wanted(model, stored))
    return model.eval().requires_grad_(False)


def load_tensors(path: str | os.PathLike[str], wanted: Mapping[str, Tensor]) -> None:
    """Copy some tensors of a checkpoint into given memory, converting them to its dtype.

    Args:
        path: as for :func:`load_checkpoint`.
        wanted: canonical name to destination; stacked experts by the name of the stack
            (``...mlp.experts.up_proj``), however the checkpoint stores them.

    Raises:
        CheckpointError: as :func:`load_checkpoint`, tensors besides the wanted ones aside.
    """
    stored = _read_headers(_shards(Path(path)))
    targets: dict[str, Tensor] = {}
    for name, tensor in wanted.items():
        targets.update([(name, tensor)] if name in stored else pieces(name, tensor))
    _check(Path(path), {name: stored[name] for name in targets if name in stored}, targets)
    _copy(stored, targets)


def _folder(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path.parent if path.suffix == ".safetensors" else path


def _shards(path: Path) -> list[Path]:
    """Return the weight files of a checkpoint; the index, where there is one, decides."""
    if path.suffix == ".safetensors":
        return [path]
    if (path / INDEX_FILE).is_file():
        return _indexed(path / INDEX_FILE)
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise CheckpointError(
        f"{path} holds {len(found)} safetensors files and no {INDEX_FILE}: download it completely"
    )


def _indexed(index: Path) -> list[Path]:
    try:
        names = sorted(set(msgspec.json.decode(index.read_bytes())["weight_map"].values()))
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error!r}") from None
    if absent := [name for name in names if not (index.parent / name).is_file()]:
        raise CheckpointError(f"{index.parent} lacks {_some(absent)} that its index names")
    return [index.parent / name for name in names]


def _read_headers(shards: Iterable[Path]) -> dict[str, _Stored]:
    """Return canonical name to stored tensor, over all shards."""
    stored: dict[str, _Stored] = {}
    for file in shards:
        with _open(file) as handle:
            for key in handle.keys():  # noqa: SIM118 - the handle is no mapping
                name = canonical(key)
                if name in stored:
                    raise CheckpointError(f"{file} and {stored[name].file} both hold {name}")
                part = handle.get_slice(key)
                stored[name] = _Stored(file, key, tuple(part.get_shape()), part.get_dtype())
    return stored


@contextmanager
def _open(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{file} is damaged or incomplete ({reason}): get it again") from None


def _wanted(model: LLaDA2MoeModelLM, stored: Mapping[str, _Stored]) -> dict[str, Tensor]:
    """Return canonical name to destination, experts merged where the checkpoint merges them."""
    wanted: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        wanted.update([(name, tensor)] if name in stored else pieces(name, tensor))
    if model.config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    return wanted


def _is_ignored(name: str, wanted: Mapping[str, Tensor]) -> bool:
    """Tell whether a surplus tensor is known to carry nothing: frequencies, a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and name not in wanted)


def _check(path: Path, stored: Mapping[str, _Stored], wanted: Mapping[str, Tensor]) -> None:
    missing = [name for name in wanted if name not in stored]
    extra = [name for name in stored if name not in wanted and not _is_ignored(name, wanted)]
    both = [(name, stored[name], wanted[name]) for name in wanted if name in stored]
    shapes = [
        f"{name} {list(have.shape)} instead of {list(want.shape)}"
        for name, have, want in both
        if have.shape != tuple(want.shape)
    ]
    types = [f"{name} in {have.dtype}" for name, have, _ in both if have.dtype not in _FLOATS]
    faults = (
        ("lacks", missing),
        ("has unexpected", extra),
        ("has of another shape", shapes),
        ("stores in an unknown number format", types),
    )
    if found := [f"{what} {_some(names)}" for what, names in faults if names]:
        raise CheckpointError(f"{path} does not match its {CONFIG_FILE}: it {'; it '.join(found)}")


def _some(names: list[str]) -> str:
    """Return the first few names and the number of the rest."""
    shown = ", ".join(names[:_NAMES_SHOWN])
    rest = len(names) - _NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown


def _allocate(model: LLaDA2MoeModelLM, device: torch.device) -> None:
    """Give the ``meta`` tensors of ``model`` memory on ``device``."""
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    if device.type == "cpu" and size > _available_bytes():
        raise _too_large(size, device)
    try:
        model.to_empty(device=device)
    except torch.OutOfMemoryError:
        raise _too_large(size, device) from None
    except RuntimeError as error:
        if "allocate memory" not in str(error):
            raise
        raise _too_large(size, device) from None
    model.tie_weights()  # each parameter was allocated by itself


def _available_bytes() -> float:
    """Return free host memory where the system tells (Linux overcommits, then kills)."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else float("inf")


def _too_large(size: int, device: torch.device) -> CapacityError:
    return CapacityError(
        f"the model takes {size / 2**30:.1f} GiB, more than {device} has free: use a smaller "
        "model, bf16, or another device"
    )


@torch.no_grad()
def _copy(stored: Mapping[str, _Stored], wanted: Mapping[str, Tensor]) -> None:
    size = sum(tensor.nbytes for tensor in wanted.values())
    names = sorted(wanted, key=lambda name: stored[name].file)
    steps = track(
        names,
        "Loading weights",
        console=Console(stderr=True),
        transient=True,
        disable=size < _PROGRESS_BYTES,
    )
    for file, group in groupby(steps, key=lambda name: stored[name].file):
        with _open(file) as handle:
            for name in group:
                wanted[name].copy_(handle.get_tensor(stored[name].key))
