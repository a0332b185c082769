"""The fields of a record of SGLang's recorder, checked before anything is made of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LONGEST_CONTEXT = 1 << 24
"""Positions from here on are damage: a canvas as long as the last of them is kept in memory."""

_INT32 = 1 << 31


class FieldError(Exception):
    """A field is not what the recorder writes; the message says which, and what it should be."""


def token_fields(
    record: dict[str, Any],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return ``input_ids`` [T], ``positions`` [T] and ``extend_seq_lens`` [R] of a record.

    A decoding pass of SGLang has no ``extend_seq_lens``: one token a request.

    Raises:
        FieldError: one of them is no list of whole numbers in range, or lengths do not add up.
    """
    ids = _integers(record, "input_ids", _INT32)
    positions = _integers(record, "positions", LONGEST_CONTEXT)
    if record.get("extend_seq_lens") is None:
        lengths = np.ones(len(ids), np.int64)
    else:
        lengths = _integers(record, "extend_seq_lens", LONGEST_CONTEXT)
    if not len(ids) == len(positions) == lengths.sum():
        raise FieldError(
            f"{len(ids)} tokens, {len(positions)} positions, {lengths.sum()} of requests"
        )
    return ids, positions, lengths


def _integers(record: dict[str, Any], field: str, end: int) -> NDArray[np.int64]:
    """Return a field as whole numbers within 0..end-1."""
    try:
        found = np.asarray(record[field])
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors without a numpy dtype
        found = np.empty((), object)
    if found.shape == (0,):
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        raise FieldError(f"{field} is no list of whole numbers")
    if (wrong := (found < 0) | (found >= end)).any():
        raise FieldError(f"{field} holds {found[wrong][0]}, which is not within 0..{end - 1}")
    return found.astype(np.int64)


def routes(record: dict[str, Any]) -> NDArray[Any]:
    """Return ``topk_ids_of_layer``, integer [layers, tokens, k], -1 where nothing was recorded.

    Raises:
        FieldError: it is no such tensor.
    """
    tensor = record["topk_ids_of_layer"]
    if not is_integer_tensor(tensor, 3):
        raise FieldError("topk_ids_of_layer is no tensor of whole numbers [layers, tokens, k]")
    return tensor.numpy()


def is_integer_tensor(value: Any, dimensions: int) -> bool:
    """Whether ``value`` is a tensor of whole numbers with so many dimensions."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == dimensions
        and value.layout == torch.strided
        and value.dtype != torch.bool
        and not (value.is_floating_point() or value.is_complex())
    )
