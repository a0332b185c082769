"""Writing a checkpoint in the published per-expert layout, file by file, each atomically."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from oled_sim.errors import CheckpointError, UsageError
from oled_sim.model.checkpoint_layout import INDEX_FILE, SINGLE_FILE, published_tensors
from oled_sim.model.config import CONFIG_FILE
from oled_sim.model.llada2 import LLaDA2MoeModelLM

SHARD_BYTES = 4 << 30
"""Default size above which :func:`save_checkpoint` starts another file."""


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
