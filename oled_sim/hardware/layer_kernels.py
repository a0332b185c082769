# ruff: noqa: ANN001 - Triton reads annotations itself and knows tl.constexpr alone
"""Triton kernels of what a layer does between its matrix products: one launch instead of many.

Import on CUDA, or with ``TRITON_INTERPRET=1``. Arithmetic is fp32, rounded where the published
model rounds. T tokens, h hidden width, d head width; ``wide`` is a power of two that covers a row.
"""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports] - comes with torch for CUDA
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def rms_norm(
    x, weight, out, copy, eps: tl.constexpr, h: tl.constexpr,
    wide: tl.constexpr, copies: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, h] = x / rms(x) · weight; with ``copies`` also the same in fp32. Grid (T,)."""
    at = tl.arange(0, wide)
    real = at < h
    first = tl.program_id(0) * h
    value = tl.load(x + first + at, mask=real, other=0.0).to(tl.float32)
    value *= 1.0 / tl.sqrt(tl.sum(value * value, 0) / h + eps)
    value *= tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + first + at, rounded, mask=real)
    if copies:
        tl.store(copy + first + at, rounded.to(tl.float32), mask=real)


@triton.jit
def place_heads(
    qkv, norms, cos, sin, positions, queries, keys, values,
    tokens, key_stride, eps: tl.constexpr, heads: tl.constexpr, kv_heads: tl.constexpr,
    d: tl.constexpr, turned: tl.constexpr, wide: tl.constexpr,
) -> None:  # fmt: skip
    """Norm and rotate queries and keys; queries to [heads, T, d], keys and values to the cache.

    ``norms`` [2, d]: of queries, of keys. ``cos``, ``sin`` [positions, turned], the sine signed.
    Grid (heads + 2·kv heads, T).
    """
    half: tl.constexpr = turned // 2
    head, token = tl.program_id(0), tl.program_id(1)
    position = tl.load(positions + token)
    at = tl.arange(0, wide)
    real = at < d
    source = qkv + (token * (heads + 2 * kv_heads) + head) * d
    given = tl.load(source + at, mask=real, other=0.0)
    if head >= heads + kv_heads:
        target = values + (head - heads - kv_heads) * key_stride + position * d
        tl.store(target + at, given, mask=real)
    else:
        norm = norms + tl.where(head < heads, 0, d)
        value = given.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(value * value, 0) / d + eps)
        kind = qkv.dtype.element_ty
        weight = tl.load(norm + at, mask=real, other=0.0).to(tl.float32)
        value = (value * scale * weight).to(kind).to(tl.float32)
        other = tl.where(at < half, at + half, at - half)
        in_turn = at < turned
        partner = tl.load(source + other, mask=in_turn, other=0.0).to(tl.float32)
        weight = tl.load(norm + other, mask=in_turn, other=0.0).to(tl.float32)
        partner = (partner * scale * weight).to(kind).to(tl.float32)
        angle = position * turned + at
        c = tl.load(cos + angle, mask=in_turn, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=in_turn, other=0.0).to(tl.float32)
        rotated = (value * c + partner * s).to(kind)
        if head < heads:
            tl.store(queries + (head * tokens + token) * d + at, rotated, mask=real)
        else:
            key = keys + (head - heads) * key_stride + position * d
            tl.store(key + at, rotated, mask=real)


@triton.jit
def attend_chunk(
    queries, keys, values, end, sums, peaks, totals, count,
    key_stride, scale: tl.constexpr, d: tl.constexpr, wide: tl.constexpr, rows: tl.constexpr,
    chunk: tl.constexpr, step: tl.constexpr,
) -> None:  # fmt: skip
    """Attend from ``rows`` of the ``count`` folded query rows of a key head to a chunk of keys.

    Leaves what the softmax over all chunks needs: fp32 weighted values ``sums`` [chunks, kv heads,
    count, d], the highest score ``peaks`` and the total weight ``totals`` [chunks, kv heads,
    count]. Keys from ``end`` on are not seen; a chunk of them leaves nothing.
    Grid (chunks, kv heads, count / rows).
    """
    start = tl.program_id(0) * chunk
    last = tl.load(end)
    if start < last:
        head = tl.program_id(1)
        at = tl.arange(0, wide)
        real = at < d
        row = tl.program_id(2) * rows + tl.arange(0, rows)
        live = row < count
        q_at = queries + (head * count + row)[:, None] * d + at[None, :]
        q = tl.load(q_at, mask=live[:, None] & real[None, :], other=0.0)
        peak = tl.full((rows,), -1e30, tl.float32)
        total = tl.zeros((rows,), tl.float32)
        mixed = tl.zeros((rows, wide), tl.float32)
        for first in range(0, chunk, step):
            key = start + first + tl.arange(0, step)
            seen = key < last
            inside = seen[:, None] & real[None, :]
            offset = head * key_stride + key[:, None] * d + at[None, :]
            k = tl.load(keys + offset, mask=inside, other=0.0)
            v = tl.load(values + offset, mask=inside, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            score = tl.where(seen[None, :], score, -1e30)
            higher = tl.maximum(peak, tl.max(score, 1))
            weight = tl.where(seen[None, :], tl.exp(score - higher[:, None]), 0.0)
            shrink = tl.exp(peak - higher)
            total = total * shrink + tl.sum(weight, 1)
            mixed = mixed * shrink[:, None]
            mixed += tl.dot(weight.to(v.dtype), v, input_precision="ieee")
            peak = higher
        place = (tl.program_id(0) * tl.num_programs(1) + head) * count + row
        tl.store(peaks + place, peak, mask=live)
        tl.store(totals + place, total, mask=live)
        s_at = sums + place[:, None] * d + at[None, :]
        tl.store(s_at, mixed, mask=live[:, None] & real[None, :])


@triton.jit
def join_chunks(
    sums, peaks, totals, end, out, tokens,
    heads: tl.constexpr, kv_heads: tl.constexpr, d: tl.constexpr, wide: tl.constexpr,
    chunk: tl.constexpr,
) -> None:  # fmt: skip
    """out [T, heads·d]: what :func:`attend_chunk` left, in order of chunks. Grid (heads, T)."""
    head, token = tl.program_id(0), tl.program_id(1)
    share: tl.constexpr = heads // kv_heads
    at = tl.arange(0, wide)
    real = at < d
    row = (head // share) * share * tokens + (head % share) * tokens + token
    peak = tl.load(peaks + row)
    total = tl.load(totals + row)
    mixed = tl.load(sums + row * d + at, mask=real, other=0.0)
    for part in range(1, (tl.load(end) + chunk - 1) // chunk):
        place = part * heads * tokens + row
        its_peak = tl.load(peaks + place)
        higher = tl.maximum(peak, its_peak)
        shrink, grow = tl.exp(peak - higher), tl.exp(its_peak - higher)
        total = total * shrink + tl.load(totals + place) * grow
        mixed = mixed * shrink
        mixed += tl.load(sums + place * d + at, mask=real, other=0.0) * grow
        peak = higher
    value = (mixed / total).to(out.dtype.element_ty)
    tl.store(out + (token * heads + head) * d + at, value, mask=real)


@triton.jit
def route(
    logits, bias, ids, weights, factor: tl.constexpr, experts: tl.constexpr,
    groups: tl.constexpr, kept_groups: tl.constexpr, top_k: tl.constexpr, wide_k: tl.constexpr,
) -> None:  # fmt: skip
    """Choose a token's experts within its best groups: ids int64, weights fp32, [T, k] each.

    As :class:`oled_sim.model.moe.LLaDA2MoeGate`; among equals the lowest id. ``experts`` and
    ``groups`` are powers of two. ids and weights may lie in page-locked host memory. Grid (T,).
    """
    token = tl.program_id(0)
    expert = tl.arange(0, experts)
    score = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * experts + expert)))
    biased = score + tl.load(bias + expert)
    size: tl.constexpr = experts // groups
    grouped = tl.reshape(biased, (groups, size))
    member = tl.arange(0, size)
    best = tl.argmax(grouped, 1)
    rest = tl.where(member[None, :] == best[:, None], float("-inf"), grouped)
    strength = tl.max(grouped, 1) + tl.max(rest, 1)  # pyright: ignore
    group = tl.arange(0, groups)
    kept = tl.zeros((groups,), tl.int32)
    for _ in tl.static_range(kept_groups):  # pyright: ignore
        pick = tl.argmax(strength, 0)
        kept = tl.where(group == pick, 1, kept)
        strength = tl.where(group == pick, float("-inf"), strength)
    grouped = tl.where(kept[:, None] == 1, grouped, float("-inf"))
    left = tl.reshape(grouped, (experts,))
    slot = tl.arange(0, wide_k)
    chosen = tl.zeros((wide_k,), tl.int64)
    weight = tl.zeros((wide_k,), tl.float32)
    for j in tl.static_range(top_k):  # pyright: ignore
        pick = tl.argmax(left, 0)
        gate = tl.sum(tl.where(expert == pick, score, 0.0), 0)
        chosen = tl.where(slot == j, pick.to(tl.int64), chosen)
        weight = tl.where(slot == j, gate, weight)
        left = tl.where(expert == pick, float("-inf"), left)
    if top_k > 1:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    at = token * top_k + slot
    tl.store(ids + at, chosen, mask=slot < top_k)
    tl.store(weights + at, weight * factor, mask=slot < top_k)


@triton.jit
def gate_values(
    fused, out, inner: tl.constexpr, block: tl.constexpr
) -> None:  # fmt: skip
    """out [T, i] = silu(fused[:, :i]) · fused[:, i:]. Grid (T, i / block)."""
    token = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    real = at < inner
    source = fused + token * 2 * inner + at
    gate = tl.load(source, mask=real, other=0.0).to(tl.float32)
    up = tl.load(source + inner, mask=real, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + token * inner + at, value.to(out.dtype.element_ty), mask=real)


@triton.jit
def merge(
    routed, shared, from_cpu, hidden, top_k: tl.constexpr, h: tl.constexpr,
    block: tl.constexpr, with_cpu: tl.constexpr,
) -> None:  # fmt: skip
    """hidden [T, h] += routed [T·k, h] in order of k, shared, from_cpu. Grid (T, h / block)."""
    token = tl.program_id(0)
    at = tl.program_id(1) * block + tl.arange(0, block)
    real = at < h
    total = tl.zeros((block,), tl.float32)
    for j in tl.static_range(top_k):  # pyright: ignore
        row = (token * top_k + j) * h
        total += tl.load(routed + row + at, mask=real, other=0.0).to(tl.float32)
    here = token * h + at
    total += tl.load(shared + here, mask=real, other=0.0).to(tl.float32)
    if with_cpu:
        total += tl.load(from_cpu + here, mask=real, other=0.0).to(tl.float32)
    total += tl.load(hidden + here, mask=real, other=0.0).to(tl.float32)
    tl.store(hidden + here, total.to(hidden.dtype.element_ty), mask=real)
