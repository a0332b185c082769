# ruff: noqa: ANN001 - Triton reads annotations itself and knows tl.constexpr alone
"""A Triton kernel that copies. Import on CUDA, or with ``TRITON_INTERPRET=1``."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports] - comes with torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def copy(source, target, size, chunk: tl.constexpr) -> None:
    """target [size] = source [size]; either may lie in page-locked host memory.

    A copy engine would do it after the expert transfers already queued there.
    Grid (size / chunk,).
    """
    at = tl.program_id(0) * chunk + tl.arange(0, chunk)
    tl.store(target + at, tl.load(source + at, mask=at < size), mask=at < size)
