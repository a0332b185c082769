"""Tables in text files, plain, .xz or .gz, read in blocks of whole lines.

Memory holds one block, and every complaint names file and line.
"""

from __future__ import annotations

import gzip
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
from numpy.typing import NDArray

from oled_sim.errors import TraceError

BLOCK_BYTES = 4 << 20

_MAGIC = {b"\xfd7zXZ\x00": lzma.open, b"\x1f\x8b": gzip.open}
_UNPACKING_ERRORS = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
_INTEGER = re.compile(rb"-?[0-9]+")


class Block(NamedTuple):
    """Whole lines of a file; ``first_line`` is the number of the first, counted from 1."""

    data: bytes
    first_line: int


class LineReader:
    """Reads a file's first lines one by one, then the rest in blocks; a context manager.

    Args:
        path: plain, xz or gzip, told apart by their first bytes.
        block_bytes: about how much text a block holds.

    Raises:
        TraceError: the file cannot be opened or read, or its compression is damaged.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.line = 0
        try:
            self.size_bytes = path.stat().st_size
            self._raw = path.open("rb")
            self._text: IO[bytes] = _unpack(self._raw)
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._text.close()
        self._raw.close()

    @property
    def fraction(self) -> float:
        """Share of the file that has been read, 0 to 1."""
        return self._raw.tell() / max(1, self.size_bytes)

    def read_line(self) -> str:
        """Return the next line without its end, and count it; empty at the end of the file."""
        data = self._guard(lambda: self._text.readline(self.block_bytes))
        self.line += bool(data)
        return data.decode("utf-8", "replace").rstrip("\r\n")

    def blocks(self) -> Iterator[Block]:
        """Yield what has not been read yet; empty lines at the end of the file are left out."""
        rest = b""
        while data := self._guard(lambda: self._text.read(self.block_bytes)):
            data = rest + data
            # Empty lines wait until something follows them, which decides what they are.
            end = data.rfind(b"\n", 0, len(data.rstrip(b"\r\n"))) + 1
            rest = data[end:]
            if len(rest) > self.block_bytes:
                raise TraceError(f"{self.path}, line {self.line + 2}: the line has no end")
            if end:
                yield self._count(data[:end])
        if rest := rest.rstrip(b"\r\n"):
            yield self._count(rest + b"\n")

    def _count(self, data: bytes) -> Block:
        first = self.line + 1
        self.line += data.count(b"\n")
        return Block(data, first)

    def _guard(self, read: Any) -> bytes:
        try:
            return read()
        except _UNPACKING_ERRORS as error:
            raise TraceError(f"{self.path} is cut short or damaged: {error}") from None
        except OSError as error:
            raise TraceError(f"{self.path} cannot be read: {error.strerror}") from None


def _unpack(raw: IO[bytes]) -> IO[bytes]:
    start = raw.read(max(map(len, _MAGIC)))
    raw.seek(0)
    for magic, opener in _MAGIC.items():
        if start.startswith(magic):
            return opener(raw, "rb")  # type: ignore[return-value]
    return raw


def parse_columns(
    block: Block, path: Path, names: Sequence[str], types: Mapping[str, pa.DataType]
) -> dict[str, NDArray[Any]]:
    """Parse comma-separated lines.

    Args:
        block: the lines.
        path: their file, for messages.
        names: all columns of the file.
        types: integer or float type of each column to return; the others are skipped.

    Returns:
        One array per column of ``types``, one value per line.

    Raises:
        TraceError: the first line that has too few or too many values, or one that is no number.
    """
    try:
        table = pcsv.read_csv(
            pa.BufferReader(block.data),
            pcsv.ReadOptions(use_threads=False, column_names=list(names)),
            pcsv.ParseOptions(quote_char=False, ignore_empty_lines=False),
            pcsv.ConvertOptions(
                include_columns=list(types), column_types=dict(types), null_values=[]
            ),
        )
    except pa.ArrowInvalid as error:
        raise _blame(block, path, names, types, error) from None
    return {name: np.asarray(table[name]) for name in types}


def _blame(
    block: Block,
    path: Path,
    names: Sequence[str],
    types: Mapping[str, pa.DataType],
    error: pa.ArrowInvalid,
) -> TraceError:
    """Return the complaint about the first malformed line."""
    for line, text in enumerate(block.data.splitlines(), block.first_line):
        values = text.split(b",")
        if len(values) != len(names):
            return TraceError(
                f"{path}, line {line}: {len(values)} values, the columns are {len(names)}"
            )
        for name, value in zip(names, values, strict=True):
            if name in types and not _fits(value, types[name]):
                shown = value.decode("utf-8", "replace")
                problem = f"{name} is {shown!r}, {_wanted(types[name])}"
                return TraceError(f"{path}, line {line}: {problem}")
    first = str(error).splitlines()[0]
    return TraceError(f"{path}, from line {block.first_line} on: {first}")


def _fits(value: bytes, kind: pa.DataType) -> bool:
    if not pa.types.is_integer(kind):
        try:
            float(value)
        except ValueError:
            return False
        return True
    limit = 1 << (kind.bit_width - 1)
    return bool(_INTEGER.fullmatch(value)) and -limit <= int(value) < limit


def _wanted(kind: pa.DataType) -> str:
    if not pa.types.is_integer(kind):
        return "which is no number"
    return f"which is no integer of {kind.bit_width} bits"
