"""What collectors of live models share: describing the model, and standing in its call paths."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import GEOMETRIES
from oled_sim.recording import Wishes
from oled_sim.trace.manifest import Decode, Manifest, Model, Prompts, Runtime

SIGNALS = ("ids", "gates", "confidence", "token_state")
"""Signals that a collector of live models always records."""


def arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name, defaults filled in."""
    call = inspect.signature(function).bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def input_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the token ids [B, S] that a language model was called with.

    Raises:
        TraceError: it was called with embeddings instead.
    """
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is None:
        raise TraceError("the model was called without token ids: acceptance cannot be followed")
    return ids


def prompt_ids(prompt: Any) -> Tensor:
    """Return the prompt of one request as int64 [P], on the host.

    Raises:
        UsageError: several prompts, or no token ids.
    """
    try:
        given = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError):
        raise UsageError(
            f"a prompt is token ids, [P] or [1, P], not a {type(prompt).__name__}: give input_ids"
        ) from None
    if given.numel() and (given.is_floating_point() or given.is_complex()):
        raise UsageError(f"a prompt is token ids, whole numbers, not {given.dtype}")
    ids = given.long()
    if ids.dim() == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise UsageError(f"a prompt of shape {list(ids.shape)}: give one request, [P] or [1, P]")
    return ids.cpu()


def whole_number(option: str, value: Any, least: int) -> int:
    """Return an option as an integer.

    Args:
        option: its name, for the message. value: as the caller gave it. least: smallest allowed.

    Raises:
        UsageError: it is no whole number, or smaller.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(f"{option}={value!r}: give a whole number of at least {least}")
    return number


def text_config(model: Any) -> Any:
    """Return the configuration of the language model; a multimodal one holds it inside."""
    return getattr(model.config, "text_config", model.config)


def describe_model(model: nn.Module, layers: Sequence[int], name: str | None) -> Model:
    """Describe a model by its transformers-style configuration.

    ``layers``: of the gates that were found.
    """
    config = text_config(model)
    path = str(getattr(config, "_name_or_path", "")).rstrip("/").rsplit("/", 1)[-1]
    weight = next(model.parameters())
    return Model(
        name=name or path or type(model).__name__,
        layers=tuple(layers),
        experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        expert_size=config.moe_intermediate_size,
        shared_experts=getattr(config, "num_shared_experts", None),
        vocabulary=config.vocab_size,
        total_layers=config.num_hidden_layers,
        dtype=str(weight.dtype).removeprefix("torch."),
    )


def describe_run(
    model: nn.Module, described: Model, decode: Decode, wishes: Wishes, **runtime: Any
) -> Manifest:
    """Return the manifest of a trace; ``runtime``: fields of ``Runtime``, ``name`` at least."""
    device = next(model.parameters()).device
    return Manifest(
        model=described,
        origin="real",
        signals=(*SIGNALS, *wishes.signals),
        stands_for=wishes.stands_for or _geometry_of(described),
        decode=decode,
        runtime=Runtime.here(
            device=device.type,
            hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else "",
            **runtime,
        ),
        prompts=Prompts(source=wishes.source, redacted=wishes.redact),
        notes=f"model code: {type(model).__module__}.{type(model).__name__}",
    )


def _geometry_of(model: Model) -> str | None:
    """Return the published geometry of the same widths, if there is one."""
    for geometry in GEOMETRIES.values():
        widths = (geometry.hidden_size, geometry.moe_intermediate_size, geometry.layers)
        if widths == (model.hidden_size, model.expert_size, model.total_layers):
            return geometry.name
    return None


def check_geometry(wishes: Wishes) -> None:
    """Refuse a ``stands_for`` that is no geometry.

    Raises:
        UsageError: it is none.
    """
    if wishes.stands_for is not None and wishes.stands_for not in GEOMETRIES:
        known = ", ".join(GEOMETRIES)
        raise UsageError(f"unknown geometry {wishes.stands_for!r}: known are {known}")


def check_layers(found: Sequence[int], expected: Sequence[int], kind: str) -> None:
    """Refuse a model whose gates are not those of its configuration.

    Raises:
        TraceError: layers are missing, or there are more than expected.
    """
    if missing := sorted(set(expected) - set(found)):
        raise TraceError(
            f"no {kind} in {len(missing)} of {len(expected)} MoE layers, layer {missing[0]} first:"
            " they are of another class, or in another process"
        )
    if list(found) != list(expected):
        raise TraceError(f"gates in layers {list(found)}, the configuration says {list(expected)}")


def check_routing(
    experts: Sequence[Tensor], tokens: int, top_k: int, layers: Sequence[int]
) -> None:
    """Refuse a pass whose gates did not route every token to k experts.

    Args:
        experts: ids [N, k] of each layer. tokens: of the pass. layers: for the message.

    Raises:
        TraceError: dropped tokens, or another k.
    """
    for ids, layer in zip(experts, layers, strict=True):
        rows, k = ids.shape
        if rows != tokens:
            raise TraceError(f"layer {layer} routed {rows} of the {tokens} tokens of a pass")
        if k != top_k:
            raise TraceError(
                f"layer {layer} chose {k} experts a token, the configuration says {top_k}"
            )
