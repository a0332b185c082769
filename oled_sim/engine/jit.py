"""Compilation of kernels, with a disk cache that notices every change of their sources.

numba keys its cache by the file that a function is defined in; a changed function that it *calls*
from another file would go unnoticed (numba/numba#1833). :func:`kernel` therefore adds a digest of
all kernel sources to the key. ``NUMBA_DISABLE_JIT=1`` runs the same source interpreted, with
bit-identical results: kernels use no fastmath and no reduction whose order could differ.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit
from numba.core.caching import FunctionCache

__all__ = ["inlined", "is_compiled", "kernel"]

F = TypeVar("F", bound=Callable[..., Any])


def _digest() -> str:
    """Return a hash over every source file whose functions a kernel may call."""
    engine = Path(__file__).parent
    sources = [*sorted(engine.glob("*.py")), engine.parent / "costs" / "tables.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


_SOURCES = _digest()


class _SourceKeyedCache(FunctionCache):
    """numba's cache of compiled functions, with the sources' digest in the key."""

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return (super()._index_key(sig, codegen), _SOURCES)


def kernel(function: F) -> F:
    """Compile ``function`` without the interpreter lock, cached on disk where that is possible."""
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    dispatcher: Any = njit(nogil=True)(function)
    # What `Dispatcher.enable_caching` does, with our key. Without a writable folder for the cache
    # numba raises RuntimeError: compile in every process then.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _SourceKeyedCache(function)
    return dispatcher


def inlined(function: F) -> F:
    """Mark a function that becomes part of every kernel that calls it, and is none by itself.

    For what few call sites use: compiling it by itself would cost time and gain nothing.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    return njit(nogil=True, inline="always")(function)  # type: ignore[return-value]


def is_compiled(function: Any) -> bool:
    """Whether a kernel of these sources is on disk, so that calling it takes no compilation."""
    try:
        index = function._cache._cache_file._load_index()
    except (AttributeError, OSError):  # interpreted, or no cache
        return True
    return any(key[-1] == _SOURCES for key in index)
