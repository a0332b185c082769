"""Whether a prefetch that has arrived gets into its pool."""

from __future__ import annotations

from oled_sim.engine.jit import inlined, lean
from oled_sim.engine.residents import add_resident, drop_resident
from oled_sim.engine.retention import (
    add_all_residents,
    add_candidate,
    drop_worst,
    insert_in_order,
    nan_problem,
    note_scores,
    retain,
)
from oled_sim.engine.state import BUDGET_BYTES, EQUAL, GLOBAL, UNUSED, USED, WASTED

# ruff: noqa: ANN001, ANN201, ANN202


@lean
def admit(state, scores):
    """Let an arrived prefetch into its pool, or drop it. Return 0 or NAN_SCORE."""
    pools, work = state.pools, state.lanes.work
    layer, expert = state.queue.arrived[0], state.queue.arrived[1]
    if note_scores(pools.score[layer], scores) > 0:
        return nan_problem(work, scores)
    work[USED] -= 1
    if pools.resident[layer, expert]:
        work[WASTED] += 1
        return 0
    if work[GLOBAL] == 1:
        stays = _admit_to_all(work, pools, layer, expert)
    else:
        stays = _admit_to_layer(work, pools, layer, expert)
    if stays:
        add_resident(work, pools, layer, expert)
        pools.unused[layer, expert] = True
        work[UNUSED] += 1
    else:
        work[WASTED] += 1
    return 0


@inlined
def _admit_to_layer(work, pools, layer, expert):
    """Whether an arrival stays in the layer's own pool; who has to make room leaves."""
    n = insert_in_order(pools, layer, pools.occupied[layer], expert)
    kept = drop_worst(pools, layer, n, n - pools.capacity[layer], work[EQUAL] == 1)
    stays = True
    for i in range(n - kept):
        if pools.candidates[i] == expert:
            stays = False
        else:
            drop_resident(work, pools, layer, pools.candidates[i])
    return stays


@inlined
def _admit_to_all(work, pools, layer, expert):
    """Whether an arrival stays in the pool of all layers; who has to make room leaves."""
    experts = pools.resident.shape[1]
    n = add_candidate(pools, add_all_residents(pools), layer, expert)
    stays = True
    for i in range(retain(pools, n, work[BUDGET_BYTES]), n):
        if pools.candidates[i] == layer * experts + expert:
            stays = False
        else:
            owner, other = pools.candidates[i] // experts, pools.candidates[i] % experts
            drop_resident(work, pools, owner, other)
    return stays
