"""Who stays: selection by (score, most recent use, lowest id) within a budget of bytes.

A candidate is the number ``layer · E + expert``. A selection drops the worst candidates until the
rest fits; one scored −inf is always dropped.
"""

from __future__ import annotations

import numpy as np

from oled_sim.engine.jit import inlined, lean

# ruff: noqa: ANN001, ANN201, ANN202

FEW = 16
"""So many are found faster by one walk through all than by building a heap."""


@lean
def add_candidate(pools, n, layer, expert):
    """Append a candidate; return the new number of candidates."""
    pools.candidates[n] = layer * pools.resident.shape[1] + expert
    pools.keys[n] = pools.score[layer, expert]
    pools.ages[n] = pools.used[layer, expert]
    pools.sizes[n] = pools.expert_bytes[layer]
    return n + 1


@lean
def add_residents(pools, n, layer):
    """Append the residents of a layer; return the new number of candidates."""
    candidates, resident = pools.candidates, pools.resident[layer]
    begin, first, size = n, layer * len(resident), pools.expert_bytes[layer]
    for expert in range(len(resident)):  # without branches: none of them could be predicted
        candidates[n] = first + expert
        n += int(resident[expert])
    for i in range(begin, n):
        expert = candidates[i] - first
        pools.keys[i] = pools.score[layer, expert]
        pools.ages[i] = pools.used[layer, expert]
        pools.sizes[i] = size
    return n


@lean
def add_pool(pools, n, layer, whole):
    """Append the residents of the pool that serves ``layer``: the layer's, or all of them."""
    if not whole:
        return add_residents(pools, n, layer)
    for other in range(pools.resident.shape[0]):
        n = add_residents(pools, n, other)
    return n


@lean
def retain(pools, n, limit_bytes):
    """Keep the best of ``n`` candidates within ``limit_bytes``.

    Returns:
        m: candidates ``[:m]`` stay, ``[m:n]`` are dropped.
    """
    total = 0
    hopeless = False
    for i in range(n):
        total += pools.sizes[i]
        hopeless = hopeless or pools.keys[i] == -np.inf
    if total <= limit_bytes and not hopeless:
        return n
    if not hopeless and total - limit_bytes <= FEW * pools.sizes[0] and _of_one_size(pools, n):
        return _drop_few(pools, n, (total - limit_bytes - 1) // pools.sizes[0] + 1)
    for i in range(n // 2 - 1, -1, -1):
        _sift_down(pools, i, n)
    kept = n
    while kept > 0 and (total > limit_bytes or pools.keys[0] == -np.inf):
        total -= pools.sizes[0]
        kept -= 1
        _swap(pools, 0, kept)
        _sift_down(pools, 0, kept)
    return kept


@inlined
def _of_one_size(pools, n):
    """Whether all candidates take equally many bytes."""
    others = 0
    for i in range(1, n):
        others += int(pools.sizes[i] != pools.sizes[0])
    return others == 0


@inlined
def _drop_few(pools, n, few):
    """Move the ``few`` worst to the end, the worst last; return how many are left.

    The end is kept in order while the rest is walked through: hardly any gets in.
    """
    kept = n - few
    for i in range(kept + 1, n):
        _sink(pools, i, kept)
    for i in range(kept):
        if _worse(pools, i, kept):
            _swap(pools, i, kept)
            for j in range(kept, n - 1):
                if not _worse(pools, j, j + 1):
                    break
                _swap(pools, j, j + 1)
    return kept


@inlined
def _sink(pools, i, first):
    """Move candidate i down to its place among the ones from ``first`` on, the best first."""
    while i > first and _worse(pools, i - 1, i):
        _swap(pools, i - 1, i)
        i -= 1


@inlined
def _worse(pools, a, b):
    """Whether candidate a is dropped before candidate b."""
    if pools.keys[a] != pools.keys[b]:
        return pools.keys[a] < pools.keys[b]
    if pools.ages[a] != pools.ages[b]:
        return pools.ages[a] < pools.ages[b]
    return pools.candidates[a] > pools.candidates[b]


@inlined
def _swap(pools, a, b):
    candidates, keys, ages, sizes = pools.candidates, pools.keys, pools.ages, pools.sizes
    candidates[a], candidates[b] = candidates[b], candidates[a]
    keys[a], keys[b] = keys[b], keys[a]
    ages[a], ages[b] = ages[b], ages[a]
    sizes[a], sizes[b] = sizes[b], sizes[a]


@inlined
def _sift_down(pools, i, n):
    """Restore the heap whose root is the worst candidate."""
    while True:
        child = 2 * i + 1
        if child >= n:
            return
        if child + 1 < n and _worse(pools, child + 1, child):
            child += 1
        if not _worse(pools, child, i):
            return
        _swap(pools, i, child)
        i = child
