# ruff: noqa: ANN001 - Triton reads annotations itself and knows tl.constexpr alone
"""Triton kernels of the grouped experts. Import on CUDA, or with ``TRITON_INTERPRET=1``.

Rows are worked on in blocks of 16, each block of one expert. A *table* of int32 describes the
blocks of a call, B of them: slot [B] (negative: no block, padding of the table), flat row
[B, 16] (negative: no row), bits of the float32 weight [B, 16]. A block's result depends on its
own rows and weights alone: tiles are of fixed size and nothing is summed across programs.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports] - comes with torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def upload(
    staged, counter, table, size, stride, ring: tl.constexpr,
    chunk: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the next staged table from page-locked host memory, read over the link by this kernel.

    A copy engine would do it after the expert transfers already queued there.
    """
    turn = tl.load(counter) % ring
    at = tl.program_id(0) * chunk + tl.arange(0, chunk)
    values = tl.load(staged + turn * stride + at, mask=at < size, other=0)
    tl.store(table + at, values, mask=at < size)


@triton.jit
def up_projection(
    x, weights, table, inner, blocks, slot_stride,
    top_k: tl.constexpr, f: tl.constexpr, h: tl.constexpr,
    rows: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    """inner [B, 16, f] = silu(x·gateᵀ) · (x·upᵀ) of the rows of each block, gathered from x [T, h].

    Grid (f / tile_n, B).
    """
    block = tl.program_id(1)
    slot = tl.load(table + block)
    if slot >= 0:
        r = tl.arange(0, rows)
        row = tl.load(table + blocks + block * rows + r)
        real = row >= 0
        token = tl.where(real, row // top_k, 0)
        n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
        k = tl.arange(0, tile_k)
        x_at = x + token[:, None] * h + k[None, :]
        gate_at = weights + slot.to(tl.int64) * slot_stride + n[None, :] * h + k[:, None]
        up_at = gate_at + f * h
        gate = tl.zeros((rows, tile_n), tl.float32)
        up = tl.zeros((rows, tile_n), tl.float32)
        for start in range(0, h, tile_k):
            if f % tile_n == 0 and h % tile_k == 0:
                a = tl.load(x_at, mask=real[:, None], other=0.0)
                g = tl.load(gate_at)
                u = tl.load(up_at)
            else:
                in_k = k < h - start
                inside = in_k[:, None] & (n < f)[None, :]
                a = tl.load(x_at, mask=real[:, None] & in_k[None, :], other=0.0)
                g = tl.load(gate_at, mask=inside, other=0.0)
                u = tl.load(up_at, mask=inside, other=0.0)
            gate = tl.dot(a, g, gate, input_precision="ieee")
            up = tl.dot(a, u, up, input_precision="ieee")
            x_at += tile_k
            gate_at += tile_k
            up_at += tile_k
        value = gate / (1.0 + tl.exp(-gate)) * up
        at = inner + (block * rows + r)[:, None] * f + n[None, :]
        tl.store(at, value.to(inner.dtype.element_ty), mask=(n < f)[None, :])


@triton.jit
def down_projection(
    inner, weights, table, out, counter, blocks, slot_stride,
    f: tl.constexpr, h: tl.constexpr,
    rows: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
) -> None:  # fmt: skip
    """out[row] = weight · inner·downᵀ for the rows of each block; out [T·k, h].

    Grid (h / tile_n, B). The first program moves the counter on: :func:`upload` has read it.
    """
    block = tl.program_id(1)
    if block + tl.program_id(0) == 0:
        tl.store(counter, tl.load(counter) + 1)
    slot = tl.load(table + block)
    if slot >= 0:
        r = tl.arange(0, rows)
        row = tl.load(table + blocks + block * rows + r)
        bits = tl.load(table + blocks * (1 + rows) + block * rows + r)
        n = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
        k = tl.arange(0, tile_k)
        a_at = inner + (block * rows + r)[:, None] * f + k[None, :]
        down_at = weights + slot.to(tl.int64) * slot_stride + 2 * f * h
        down_at += n[None, :] * f + k[:, None]
        total = tl.zeros((rows, tile_n), tl.float32)
        for start in range(0, f, tile_k):
            if h % tile_n == 0 and f % tile_k == 0:
                a = tl.load(a_at)
                d = tl.load(down_at)
            else:
                in_k = k < f - start
                a = tl.load(a_at, mask=in_k[None, :], other=0.0)
                d = tl.load(down_at, mask=in_k[:, None] & (n < h)[None, :], other=0.0)
            total = tl.dot(a, d, total, input_precision="ieee")
            a_at += tile_k
            down_at += tile_k
        value = total * bits.to(tl.float32, bitcast=True)[:, None]
        at = out + row.to(tl.int64)[:, None] * h + n[None, :]
        tl.store(at, value.to(out.dtype.element_ty), mask=(row >= 0)[:, None] & (n < h)[None, :])
