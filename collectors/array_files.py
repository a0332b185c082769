"""Arrays by name in .npy, .npz and .safetensors files, none read before it is asked for.

A file of safetensors is eight bytes with the length of a JSON header, the header, which says dtype,
shape and place of every tensor, and the tensors (github.com/huggingface/safetensors). Reading it
needs nothing but numpy, so that importing does without the ``torch`` extra.
"""

from __future__ import annotations

import json
import lzma
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError, UsageError

SUFFIXES = (".npy", ".npz", ".safetensors")

_SAFETENSORS_DTYPES = {
    "BOOL": "|b1", "U8": "|u1", "I8": "|i1", "U16": "<u2", "I16": "<i2", "U32": "<u4",
    "I32": "<i4", "U64": "<u8", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
_DAMAGE = (
    ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
    # numpy evaluates a header as Python; zipfile says so of encryption and unknown compression.
    SyntaxError, tokenize.TokenError, RecursionError, NotImplementedError, RuntimeError,
)  # fmt: skip
_LONGEST_HEADER_BYTES = 100 << 20

Arrays = Mapping[str, Callable[[], NDArray[Any]]]
"""Reads an array, by name."""


def open_arrays(path: Path) -> Arrays:
    """Return the arrays of a file; the only one of a .npy file has the name ``routed_experts``.

    Raises:
        UsageError: the name promises another format.
        TraceError: no such file, or damaged; also when an array is read.
    """
    readers = {".npy": _npy, ".npz": _npz, ".safetensors": _safetensors}
    if path.suffix not in readers:
        raise UsageError(f"{path} is none of {', '.join(SUFFIXES)}: name it by what it holds")
    return _guarded(path, lambda: readers[path.suffix](path))


def _guarded(path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except OSError as error:
        reason = error.strerror or str(error).splitlines()[0]
        raise TraceError(f"{path} cannot be read: {reason}") from None
    except _DAMAGE as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TraceError(f"{path} is damaged or no {path.suffix} file: {reason}") from None


def _npy(path: Path) -> Arrays:
    with warnings.catch_warnings(action="ignore"):  # of headers that numpy takes for Python 2's
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    return {"routed_experts": lambda: array}


def _npz(path: Path) -> Arrays:
    with zipfile.ZipFile(path) as archive:
        names = [n for n in archive.namelist() if n.endswith(".npy")]

    def reader(name: str) -> Callable[[], NDArray[Any]]:
        def read() -> NDArray[Any]:
            with zipfile.ZipFile(path) as archive, archive.open(name) as member:
                return np.lib.format.read_array(member, allow_pickle=False)

        return lambda: _guarded(path, read)

    return {name.removesuffix(".npy"): reader(name) for name in names}


def _safetensors(path: Path) -> Arrays:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER_BYTES):
            raise ValueError(f"its header is to have {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return {n: _tensor(path, n, entry, 8 + length, size) for n, entry in header.items()}


def _tensor(
    path: Path, name: str, entry: dict[str, Any], data: int, size: int
) -> Callable[[], NDArray[Any]]:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])

    def read() -> NDArray[Any]:
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            known = ", ".join(_SAFETENSORS_DTYPES)
            raise ValueError(f"{name!r} is of dtype {entry['dtype']}, known are {known}")
        dtype = np.dtype(_SAFETENSORS_DTYPES[entry["dtype"]])
        if end - begin != dtype.itemsize * int(np.prod(shape)) or data + end > size:
            raise ValueError(f"{name!r} is cut short, or its shape is wrong")
        return np.memmap(path, dtype, "r", data + begin, shape)

    return lambda: _guarded(path, read)
