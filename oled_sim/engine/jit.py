"""Compilation of kernels, with a disk cache that notices every change of their sources.

numba keys its cache by the file that a function is defined in; a changed function that it *calls*
from another file would go unnoticed (numba/numba#1833). :func:`kernel` therefore adds a digest of
all kernel sources to the key. ``NUMBA_DISABLE_JIT=1`` runs the same source interpreted, with
bit-identical results: kernels use no fastmath and no reduction whose order could differ.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from numba import config, njit, typeof
from numba.core import types
from numba.core.caching import FunctionCache

__all__ = [
    "compiled_for",
    "direct",
    "inlined",
    "is_compiled",
    "kernel",
    "lean",
    "merged",
    "specialised",
]

F = TypeVar("F", bound=Callable[..., Any])


ENGINE = Path(__file__).parent


def _digest_of(files: Iterable[Path]) -> str:
    """Return a hash over the contents of files."""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


_SOURCES = _digest_of([*sorted(ENGINE.glob("*.py")), ENGINE.parent / "costs" / "tables.py"])
"""Digest of every source file whose functions a kernel of the engine may call."""


class _SourceKeyedCache(FunctionCache):
    """numba's cache of compiled functions, with digests of all sources concerned in the key.

    ``about``: the functions whose sources count besides the engine's, if not the cached one's.
    """

    def __init__(self, function: Any, *about: Any) -> None:
        super().__init__(function)
        self._about = about

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        if not self._about:
            own = _sources_of(self._py_func)
            return (super()._index_key(sig, codegen), own, _SOURCES)
        # numba would hash the closure, whose pickled form differs from process to process.
        which = tuple((f.__module__, f.__qualname__, _sources_of(f)) for f in self._about)
        return (sig, codegen.magic_tuple(), which, _SOURCES)


def _sources_of(function: Any) -> str:
    """Return a hash over the sources of a kernel outside the engine, whose own are in every key.

    They are its file or, in a package, all files of its folder, and likewise for every kernel that
    it calls by a global name.
    """
    files: set[Path] = set()
    seen, left = set(), [function]
    while left:
        plain = left.pop()
        path = Path(plain.__code__.co_filename)
        if plain in seen or path.parent == ENGINE:
            continue
        seen.add(plain)
        files.update(path.parent.glob("*.py") if (path.parent / "__init__.py").exists() else [path])
        called = (plain.__globals__.get(name) for name in plain.__code__.co_names)
        left += [f.py_func for f in called if hasattr(f, "py_func")]
    return _digest_of(sorted(file for file in files if file.is_file()))


def kernel(function: F) -> F:
    """Compile ``function`` without the interpreter lock, cached on disk where that is possible."""
    return _compile(function, nogil=True)


def lean(function: F) -> F:
    """Compile a kernel that allocates no array: it counts no references, which is most of its time.

    Arrays that it is given outlive the call, so nothing has to be counted. It may take views of
    them (``a[i]``, ``a[i:j]``) and call other kernels, but must return numbers only. numba refuses
    to compile it when it allocates.
    """
    return _compile(function, nogil=True, _nrt=False)


def merged(function: F) -> F:
    """Compile a :func:`lean` kernel that becomes part of the machine code of whoever calls it.

    A call would pass every field of every array in its arguments on the stack, which takes longer
    than most events do; LLVM by itself inlines one day and not the next.
    """
    return _compile(function, nogil=True, _nrt=False, forceinline=True)


def specialised(loop: F, *functions: Any) -> F:
    """Compile a closure over kernels, ``functions``, as :func:`lean` does.

    It is cached under their names and sources: numba's own cache does not tell closures over
    different functions apart from one process to the next.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return loop
    dispatcher: Any = njit(nogil=True, _nrt=False)(loop)  # type: ignore[call-overload]
    with contextlib.suppress(RuntimeError):
        plain = (getattr(function, "py_func", function) for function in functions)
        dispatcher._cache = _SourceKeyedCache(loop, *plain)
    return dispatcher


def direct(function: F) -> F:
    """Return a way to call a kernel again and again with arguments of the same types.

    numba looks at the type of every array in the arguments at every call, which for the state of a
    simulation takes twenty times as long as an event. After the first call this goes to the machine
    code at once. It trusts its caller: arguments of other types would be misread.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    entry: Any = None

    def call(*args: Any) -> Any:
        nonlocal entry
        if entry is not None:
            return entry(*args)
        answer = function(*args)
        entry = _entry_point(function, args)
        return answer

    return call  # type: ignore[return-value]


def compiled_for(function: F, *args: Any) -> F:
    """Return the machine code of a kernel for arguments of these types, without calling it.

    It trusts its caller as :func:`direct` does, and there is no Python in between.
    """
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    kernel_of: Any = function
    kinds = tuple(typeof(a) for a in args)
    kernel_of.compile(kinds)
    return kernel_of.overloads[kinds].entry_point


def _entry_point(function: Any, args: tuple[Any, ...]) -> Any:
    """Return what was compiled for arguments of these types, after a call with them."""
    compiled = list(function.overloads.values())
    if len(compiled) > 1:  # asking for the types takes a while
        compiled = [function.overloads[tuple(typeof(a) for a in args)]]
    return compiled[0].entry_point


def _compile(function: F, **options: Any) -> F:
    if config.DISABLE_JIT:  # type: ignore[attr-defined]
        return function
    dispatcher: Any = njit(**options)(function)
    dispatcher.get_call_template = functools.partial(_any_number, dispatcher.get_call_template)
    # What `Dispatcher.enable_caching` does, with our key. Without a writable folder for the cache
    # numba raises RuntimeError: compile in every process then.
    with contextlib.suppress(RuntimeError):
        dispatcher._cache = _SourceKeyedCache(function)
    return dispatcher


def _any_number(template_for: Callable[..., Any], args: Any, kws: Any) -> Any:
    """Look for what was compiled for a call by another kernel: for any number, not for this one.

    numba takes ``f(x, 3)`` for a type of its own and compiles ``f`` anew for every literal. LLVM
    puts constants in later, so that would cost time and gain nothing.
    """
    plain = {name: types.unliteral(kind) for name, kind in kws.items()}
    return template_for(tuple(types.unliteral(kind) for kind in args), plain)


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
