"""Who stays: selection by (score, most recent use, lowest id) within a budget.

A layer with a pool of its own keeps its residents in the order in which equals would go
(``Pools.order``): an event moves what it activates to the end, so nothing is ever sorted by age.
One pool for all layers is a budget of bytes, and its candidates, numbered ``layer · E + expert``,
are compared in full. One scored −inf is always dropped.
"""

from __future__ import annotations

import numpy as np

from oled_sim.engine.jit import inlined, lean, merged
from oled_sim.engine.state import NAN_SCORE, PROBLEM

# ruff: noqa: ANN001, ANN201, ANN202


@merged
def drop_worst(pools, layer, n, over, equal):
    """Take the worst of a layer's first ``n`` in order out of it.

    Args:
        pools: the pools.
        layer: whose ``order`` holds the candidates.
        n: how many there are.
        over: how many must go at least; all scored −inf go.
        equal: whether all have one score, whatever ``score`` says.

    Returns:
        How many stay, in ``order``; ``candidates`` begins with those that go.
    """
    order, gone = pools.order[layer], pools.candidates
    if equal:
        over = max(over, 0)
        for i in range(over):
            gone[i] = order[i]
        for i in range(n - over):
            order[i] = order[i + over]
        return n - over
    score, keys = pools.score[layer], pools.keys
    hopeless = 0
    for i in range(n):
        keys[i] = score[order[i]]
        hopeless += int(keys[i] == -np.inf)
    over = max(over, hopeless)
    if over <= 0:
        return n
    level, ties = _dropping_level(keys, pools.levels, n, over)
    kept, dropped = 0, 0
    for i in range(n):
        expert, key = order[i], keys[i]
        if key < level or (key == level and ties > 0):
            ties -= int(key == level)
            gone[dropped] = expert
            dropped += 1
        else:
            order[kept] = expert
            kept += 1
    return kept


@inlined
def _dropping_level(keys, scratch, n, over):
    """Return the ``over``-th lowest key, and how many of the keys equal to it are among ``over``.

    The key of the first, least recently used, is often the lowest: of residents that the event
    does not activate, many score alike.
    """
    level = keys[0]
    below, equal = _rank(keys, n, level)
    if not below < over <= below + equal:
        level = _nth_lowest(keys, scratch, n, over - 1)
        below, equal = _rank(keys, n, level)
    return level, over - below


@inlined
def _rank(keys, n, level):
    """Return how many of the first n keys are below a level, and how many equal it."""
    below, equal = 0, 0
    for i in range(n):
        below += int(keys[i] < level)
        equal += int(keys[i] == level)
    return below, equal


@lean
def _nth_lowest(keys, scratch, n, nth):
    """Return the key that would stand at place ``nth`` if the first n were sorted (quickselect)."""
    for i in range(n):
        scratch[i] = keys[i]
    low, high = 0, n - 1
    while low < high:
        pivot = scratch[(low + high) // 2]
        i, j = low, high
        while i <= j:
            while scratch[i] < pivot:
                i += 1
            while scratch[j] > pivot:
                j -= 1
            if i <= j:
                scratch[i], scratch[j] = scratch[j], scratch[i]
                i += 1
                j -= 1
        if nth <= j:
            high = j
        elif nth >= i:
            low = i
        else:
            break
    return scratch[nth]


@merged
def insert_in_order(pools, layer, n, expert):
    """Insert an expert among the first ``n`` in a layer's order; return their new number."""
    order, used = pools.order[layer], pools.used[layer]
    at = n
    while at > 0:
        other = order[at - 1]
        if used[other] < used[expert] or (used[other] == used[expert] and other > expert):
            break
        order[at] = other
        at -= 1
    order[at] = expert
    return n + 1


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
def add_all_residents(pools):
    """Make the residents of all layers candidates; return how many there are."""
    n = 0
    for layer in range(pools.resident.shape[0]):
        n = add_residents(pools, n, layer)
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


@inlined
def note_scores(score, scores):
    """Take scores over; return how many are NaN. Several at a time: the loop has no way out."""
    unknown = 0
    for expert in range(len(scores)):
        score[expert] = scores[expert]
        unknown += int(scores[expert] != scores[expert])
    return unknown


@inlined
def nan_problem(work, scores):
    """Note the first expert whose score is NaN; return NAN_SCORE."""
    for expert in range(len(scores) - 1, -1, -1):
        if np.isnan(scores[expert]):
            work[PROBLEM] = expert
    return NAN_SCORE
