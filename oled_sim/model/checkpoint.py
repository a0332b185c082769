"""Published LLaDA2 checkpoints: ``config.json`` plus safetensors, read and written as they are.

Read: one file or shards with ``model.safetensors.index.json``; experts stored one by one
(``mlp.experts.7.gate_proj.weight``) or merged (``mlp.experts.gate_proj``, 3-D); ``expert_bias``
in 2 bytes (2.0) or 4 (2.1); names under ``model.language_model.``. Files are memory-mapped and
copied tensor by tensor, so host memory peaks near the size of the model.
"""

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
from safetensors.torch import save_file
from torch import Tensor

from oled_sim.errors import CapacityError, CheckpointError, UsageError
from oled_sim.model.config import CONFIG_FILE, LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_BYTES = 4 << 30
"""Default size above which :func:`save_checkpoint` starts another file."""

_PROGRESS_BYTES = 1 << 30
_NAMES_SHOWN = 3
_FLOATS = {"F32", "BF16", "F16"}
_PREFIXES = (("model.language_model.", "model."), ("model.lm_head.", "lm_head."))


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


def save_checkpoint(
    model: LLaDA2MoeModelLM,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.bfloat16,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
) -> list[Path]:
    """Write ``config.json`` and the weights in the published per-expert layout.

    Weights are stored in ``dtype``, expert biases in fp32 (as 2.1 checkpoints have them).
    Every file is written under a temporary name and renamed.

    Returns:
        The weight files, in order.

    Raises:
        UsageError: the folder holds a checkpoint and ``overwrite`` is false.
        CheckpointError: a file cannot be written.
    """
    folder = Path(folder)
    old = _old_files(folder)
    if old and not overwrite:
        raise UsageError(f"{folder} already holds a checkpoint ({old[0].name}): name a new folder")
    with _explain(folder):
        folder.mkdir(parents=True, exist_ok=True)
        files = _save_shards(model, folder, dtype, shard_bytes)
        for stale in set(old) - set(files) - {folder / CONFIG_FILE, folder / INDEX_FILE}:
            stale.unlink()
    model.config.save(folder)
    return files


def published_tensors(model: LLaDA2MoeModelLM) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of ``model`` under its published name, experts one by one.

    Tensors are views (also on the ``meta`` device); a tied head is left out.
    """
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight" or not model.config.tie_word_embeddings:
            yield from _pieces(name, tensor)


def _pieces(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    stem, is_stacked, projection = name.partition(".mlp.experts.")
    if not is_stacked:
        yield name, tensor
        return
    for expert, weight in enumerate(tensor.unbind(0)):
        yield f"{stem}.mlp.experts.{expert}.{projection}.weight", weight


# Reading


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
                name = _canonical(key)
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


def _canonical(name: str) -> str:
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name[len(prefix) :]
    return name


def _wanted(model: LLaDA2MoeModelLM, stored: Mapping[str, _Stored]) -> dict[str, Tensor]:
    """Return canonical name to destination, experts merged where the checkpoint merges them."""
    wanted: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        wanted.update([(name, tensor)] if name in stored else _pieces(name, tensor))
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


# Writing


def _old_files(folder: Path) -> list[Path]:
    names = (CONFIG_FILE, INDEX_FILE, "model*.safetensors")
    return [file for name in names for file in sorted(folder.glob(name))]


def _save_shards(
    model: LLaDA2MoeModelLM, folder: Path, dtype: torch.dtype, shard_bytes: int
) -> list[Path]:
    shards = _split(published_tensors(model), dtype, shard_bytes)
    files = [folder / name for name in _shard_names(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        _save_file({name: _stored_form(name, t, dtype) for name, t in shard.items()}, file)
    if len(files) > 1:
        _save_index(folder / INDEX_FILE, files, shards, dtype)
    else:
        (folder / INDEX_FILE).unlink(missing_ok=True)
    return files


def _split(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, shard_bytes: int
) -> list[dict[str, Tensor]]:
    """Cut the tensors, in order, into shards of at most ``shard_bytes`` (or one tensor)."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors:
        size = _stored_bytes(name, tensor, dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    return shards


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(".expert_bias") else dtype


def _stored_bytes(name: str, tensor: Tensor, dtype: torch.dtype) -> int:
    return tensor.numel() * _stored_dtype(name, dtype).itemsize


def _stored_form(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.detach().to("cpu", _stored_dtype(name, dtype), copy=True).contiguous()


def _save_file(tensors: dict[str, Tensor], file: Path) -> None:
    with _replacing(file) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def _save_index(
    file: Path, files: list[Path], shards: list[dict[str, Tensor]], dtype: torch.dtype
) -> None:
    pairs = [(f.name, name, t) for f, s in zip(files, shards, strict=True) for name, t in s.items()]
    total = sum(_stored_bytes(name, tensor, dtype) for _, name, tensor in pairs)
    weight_map = {name: shard for shard, name, _ in pairs}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    with _replacing(file) as temporary:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2))


@contextmanager
def _replacing(file: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``file``; on success sync it and put it in place."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def _explain(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint to {folder}: {error}") from None
