"""Values of arrays that others wrote, checked before they are cast to a trace's dtypes.

A cast alone would turn 2.7 into 2, and 300 into 44, without a word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from oled_sim.errors import TraceError


def whole_numbers(values: NDArray[Any], called: str, dtype: DTypeLike) -> NDArray[Any]:
    """Return the values as ``dtype``, an integer or boolean one that holds each of them exactly.

    Args:
        values: booleans, integers, or floats that are integers.
        called: file and name of the array, for the message.

    Raises:
        TraceError: the first value that ``dtype`` cannot hold, or no array of numbers.
    """
    values = numbers(values, called)
    kind: np.dtype[Any] = np.dtype(dtype)
    low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, np.iinfo(kind).max)
    if values.dtype.kind == "b":
        return values.astype(kind)
    wrong = ~((values >= low) & (values <= high))  # NaN compares false
    if values.dtype.kind == "f":
        wrong |= values != np.floor(values)
    if wrong.any():
        index = int(np.argmax(wrong))
        where = f", token {index}" if values.ndim else ""
        raise TraceError(
            f"{called}{where} is {values.reshape(-1)[index]}, expected a whole number within"
            f" {low}..{high}"
        )
    return values.astype(kind)


def number_within(values: NDArray[Any], called: str, most: int) -> int:
    """Return the only value of an array, a whole number from 0 to ``most``.

    Raises:
        TraceError: it is something else.
    """
    values = whole_numbers(values, called, np.int64)
    if values.size != 1 or not 0 <= values.item() <= most:
        shown = values.item() if values.size == 1 else f"of shape {list(values.shape)}"
        raise TraceError(f"{called} is {shown}, expected one of 0..{most}")
    return int(values.item())


def numbers(values: NDArray[Any], called: str) -> NDArray[Any]:
    """Return the values if they are real numbers or booleans.

    Raises:
        TraceError: they are text, complex, or something else.
    """
    if values.dtype.kind not in "biuf":
        raise TraceError(f"{called} is of dtype {values.dtype}, expected numbers")
    return values


def signed_ids(ids: NDArray[Any]) -> NDArray[Any]:
    """Return ids in which padding that an unsigned dtype wrapped around is -1 again."""
    if ids.dtype.kind == "i":
        return ids
    wrapped = (ids == np.iinfo(ids.dtype).max).all(axis=1)
    # An only slot of 255 may be expert 255 of 256; repeated ids are none.
    if ids.shape[1] == 1 or not wrapped.any():
        return ids
    signed = ids.astype(np.int32 if ids.dtype.itemsize < 4 else np.int64)
    signed[wrapped] = -1
    return signed
