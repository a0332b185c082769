"""Cost geometries as files: a TOML of the sizes, or a model's ``config.json``."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import MISSING
from pathlib import Path

import msgspec

from oled_sim.errors import CheckpointError, FileError, UsageError
from oled_sim.geometry import CostGeometry
from oled_sim.model.config import LLaDA2Config

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Bytes of a weight by the name that ``config.json`` gives its number format."""


def read_geometry(path: Path) -> CostGeometry:
    """Return the cost geometry of a file.

    A ``.toml`` file holds the fields of :class:`CostGeometry`. A ``.json`` file is a published
    LLaDA2 configuration; its folder's name is that of the geometry, unless it has another name
    than ``config.json``.

    Raises:
        UsageError: the file cannot be read.
        FileError: it lacks or misspells a field, or no model has such sizes.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read geometry {path}: {error.strerror}") from error
    if path.suffix == ".json":
        return _from_config(path, text)
    try:
        fields = tomllib.loads(text.decode())
        _require_names(fields, path)
        cost = msgspec.convert({"name": path.stem, **fields}, CostGeometry)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FileError(f"geometry {path} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise FileError(f"geometry {path} breaks the format: {error}") from error
    return _checked(cost, path)


def cost_geometry(config: LLaDA2Config, weight_bytes: int, name: str = "model") -> CostGeometry:
    """Return the cost geometry of a model whose weights take ``weight_bytes`` bytes each."""
    return CostGeometry(
        name=name,
        hidden_size=config.hidden_size,
        dense_intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.moe_intermediate_size,
        layers=config.num_hidden_layers,
        dense_layers=config.first_k_dense_replace,
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        shared_experts=config.num_shared_experts,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        weight_bytes=weight_bytes,
    )


def _from_config(path: Path, text: bytes) -> CostGeometry:
    try:
        config = LLaDA2Config.from_file(path)
        dtype = msgspec.json.decode(text).get("dtype", "bfloat16")
    except CheckpointError as error:
        raise FileError(f"geometry {error}") from error
    if dtype not in BYTES:
        raise FileError(f"geometry {path}: dtype {dtype!r} is none of {', '.join(BYTES)}")
    named = path.resolve()
    name = named.parent.name if named.name == "config.json" else named.stem
    return cost_geometry(config, BYTES[dtype], name)


def _require_names(found: Collection[str], path: Path) -> None:
    """Refuse fields that there are not, then all at once those that are missing."""
    fields = CostGeometry.__dataclass_fields__
    if unknown := set(found) - set(fields):
        raise FileError(f"geometry {path} has an unknown field {min(unknown)!r}")
    needed = (f.name for f in fields.values() if f.default is MISSING and f.name != "name")
    if missing := [name for name in needed if name not in found]:
        raise FileError(f"geometry {path} lacks {', '.join(missing)}")


def _checked(cost: CostGeometry, path: Path) -> CostGeometry:
    """Refuse sizes that no model has."""
    may_be_zero = ("dense_layers", "name")
    for field in CostGeometry.__dataclass_fields__:
        value = getattr(cost, field)
        if field not in may_be_zero and value < 1:
            raise FileError(f"geometry {path}: {field} is {value}, but must be at least 1")
    if wrong := _contradiction(cost):
        raise FileError(f"geometry {path}: {wrong}")
    return cost


def _contradiction(cost: CostGeometry) -> str | None:
    """Return which size does not go with the others, or with kernels, if one does not."""
    if not 0 <= cost.dense_layers < cost.layers:
        return f"dense_layers {cost.dense_layers} leaves no layer of {cost.layers} with experts"
    if cost.top_k > cost.experts:
        return f"top_k is {cost.top_k}, but must not exceed experts, {cost.experts}"
    if cost.heads % cost.kv_heads:
        return f"kv_heads is {cost.kv_heads}, but must divide heads, {cost.heads}"
    if cost.head_dim % 4:
        # Rotary embedding turns half of a head's dimensions, two by two.
        return f"head_dim is {cost.head_dim}, but must be a multiple of 4"
    if cost.weight_bytes not in (2, 4):
        return f"weight_bytes is {cost.weight_bytes}, but must be 2 (bf16) or 4 (fp32)"
    return None
