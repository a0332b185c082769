"""The split of misses with the least J that there is, to hold OLED's bounded swaps against."""

from __future__ import annotations

import numpy as np

from oled_sim.costs.tables import cpu_experts_us, cpu_link_us, gpu_experts_us, shared_expert_us
from oled_sim.engine.jit import kernel
from oled_sim.engine.whatif import layer_us

from ._exact_split import bound_us

# ruff: noqa: ANN001, ANN202

ON_GPU, BY_TRANSFER, ON_CPU = 0, 1, 2


@kernel
def split_exactly(
    lanes, queue, tables, slowdown, gpu_floor_us, layer, rows, tokens, priority, decided,
    reuse_weight,
):  # fmt: skip
    """Send those misses to the CPU that make J = T_comp − λ Σ p over the transferred least.

    All copies take equally long. So if T_comp depends only on the number of experts and of tokens
    in each lane, then of all sets of g transferred misses with v tokens the one with the greatest
    Σ p is as good as any: a dynamic program over (g, v) finds these sets, and the lane model of the
    engine times them in the order of a lower bound of J, until that exceeds the best J found.

    T_comp does depend on nothing else where no time of a GPU kernel depends on tokens. Otherwise
    it also matters which transferred expert arrives when, and another set of (g, v) may be better.
    Then the least J lies between the two returned numbers; and where lanes do not slow each other
    and the GPU is idle when an arrival lands, the loss is at most the difference between the
    dearest and the cheapest kernel over one of the missed experts. With the bundled profile the
    least J was missed in 37 of 1,000 random events of 2 to 8 misses, by 41 µs at most.

    Takes time and memory in proportion to misses² · tokens.

    Args:
        lanes, queue, tables: of a ``LayerTimer``.
        slowdown: float64 [3], least slow-downs of lanes. gpu_floor_us: no kernel takes less.
        layer: index of the layer. rows: tokens of the event.
        tokens: int64 [A]. priority: float64 [A].
        decided: int64 [A], any lanes to start with, changed in place if others have a lower J.
        reuse_weight: λ in units of T_H2D · |A|.

    Returns:
        J of ``decided`` in µs, and a bound that no split of these misses undercuts. Both are NaN
        if J lies outside the profile for all splits.
    """
    timing = lanes, queue, tables, layer, rows
    worth_us = reuse_weight * lanes.copy_us[layer] * len(decided)
    best_j = _objective(timing, tokens, priority, decided, worth_us)
    best_j = best_j if not np.isnan(best_j) else np.inf
    missed = np.flatnonzero(decided)
    load, hits = tokens[missed], len(decided) - len(missed)
    most, taken = most_valuable(load, priority[missed])
    gpu_us = shared_expert_us(tables, rows) + gpu_experts_us(
        tables, hits, tokens.sum() - load.sum()
    )
    bound = _bounds(lanes, tables, slowdown, gpu_floor_us, layer, rows, gpu_us, most, worth_us)
    states = np.flatnonzero(bound < best_j)
    floor_j = min(best_j, bound.min())
    trial = decided.copy()
    for i in states[np.argsort(bound[states], kind="mergesort")]:
        if not bound[i] < best_j:
            break
        _recall(taken, load, missed, i // most.shape[1], i % most.shape[1], trial)
        j = _objective(timing, tokens, priority, trial, worth_us)
        if j < best_j:
            best_j = j
            decided[:] = trial
    return (best_j, floor_j) if best_j < np.inf else (np.nan, np.nan)


@kernel
def most_valuable(load, value):
    """Find the most valuable set for every number of members and every sum of their loads.

    Args:
        load: int64 [M]. value: float64 [M].

    Returns:
        ``most``, float64 [M + 1, Σ load + 1]: the greatest value of g members of load v in all,
        −∞ where there are none; ``taken``, uint8 [M // 8 + 1, M + 1, Σ load + 1]: bit i of a state,
        counted over the first axis, says whether its best set among the first i + 1 has member i.
    """
    members, loads = len(load), load.sum() + 1
    most = np.full((members + 1, loads), -np.inf)
    most[0, 0] = 0.0
    taken = np.zeros((members // 8 + 1, members + 1, loads), np.uint8)
    so_far = 0
    for i in range(members):
        so_far += load[i]
        for g in range(i + 1, 0, -1):
            for v in range(load[i], so_far + 1):
                with_it = most[g - 1, v - load[i]] + value[i]
                if with_it > most[g, v]:
                    most[g, v] = with_it
                    taken[i >> 3, g, v] |= 1 << (i & 7)
    return most, taken


@kernel
def _recall(taken, load, missed, g, v, decided):
    """Write the set of a state into the lanes of missed experts."""
    for i in range(len(load) - 1, -1, -1):
        member = taken[i >> 3, g, v] >> (i & 7) & 1
        decided[missed[i]] = BY_TRANSFER if member else ON_CPU
        g -= member
        v -= member * load[i]


@kernel
def _bounds(lanes, tables, slowdown, gpu_floor_us, layer, rows, gpu_us, most, worth_us):
    """Return for every state a J that none of its sets undercuts, flat; ∞ for none or unknown.

    ``gpu_us``: residents and the shared expert.
    """
    misses, loads = most.shape[0] - 1, most.shape[1] - 1
    link_us, copy_us = cpu_link_us(tables, rows), lanes.copy_us[layer]
    found = np.full(most.shape, np.inf)
    for g in range(misses + 1):
        with_arrivals_us = gpu_us + gpu_floor_us if g > 0 else gpu_us
        for v in range(loads + 1):
            if most[g, v] == -np.inf:
                continue
            cpu_us = link_us + cpu_experts_us(tables, misses - g, loads - v) if g < misses else 0.0
            if with_arrivals_us >= 0.0 and cpu_us >= 0.0:  # not NaN: inside the profile
                us = bound_us(slowdown, with_arrivals_us, g * copy_us, cpu_us, gpu_floor_us)
                found[g, v] = us - worth_us * most[g, v]
    return found.ravel()


@kernel
def _objective(timing, tokens, priority, decided, worth_us):
    """Return J of a decision in µs, NaN outside the profile."""
    lanes, queue, tables, layer, rows = timing
    value = 0.0
    for i in range(len(decided)):
        if decided[i] == BY_TRANSFER:
            value += priority[i]
    return layer_us(lanes, queue, tables, layer, rows, tokens, decided) - worth_us * value
