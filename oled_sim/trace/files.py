"""Files that are either whole or absent: atomic writes and content hashes."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from oled_sim.errors import TraceError

TEMPORARY_SUFFIX = ".part"


def sha256_hex(data: bytes | memoryview) -> str:
    """Return the SHA-256 of ``data`` as 64 hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def write_atomic(path: Path, data: bytes | memoryview) -> None:
    """Write ``data`` so that ``path`` holds all of it or, after any crash, what it held before.

    The bytes and the directory entry are on disk when this returns.

    Raises:
        TraceError: the file system refuses (full, read-only, no permission); no temporary is left.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except OSError as error:
        raise TraceError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


def sync_directory(path: Path) -> None:
    """Put the entries of a directory on disk; without it a rename may be lost in a crash."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def table_path(table: str, request: int) -> str:
    """Return the path of a request's table relative to its trace."""
    return f"{table}/{request:05d}.parquet"
