"""Who comes into the pools and who leaves them.

At a gate the best of the residents and of what is transferred stay (:func:`choose_residents`);
between events capacities change, and a clairvoyant sets whom it wants. Which of several are the
best, ``retention`` says. Here the accounts are kept: bytes, free slots, what was wasted.
"""

from __future__ import annotations

from oled_sim.engine.jit import inlined, lean
from oled_sim.engine.retention import (
    add_all_residents,
    add_candidate,
    add_residents,
    drop_worst,
    insert_in_order,
    retain,
)
from oled_sim.engine.state import (
    BUDGET_BYTES,
    DEMAND_EXPERT,
    DEMAND_KEPT,
    DEMANDS,
    EQUAL,
    EXPERT_BYTES,
    FREE_BYTES,
    FREED_BY_HITS,
    GLOBAL,
    H2D,
    KEPT,
    KIND,
    LASTING,
    LATE,
    LATE_KEPT,
    ON_GPU,
    POOL_BYTES,
    UNUSED,
    USES,
    WASTED,
)

# ruff: noqa: ANN001, ANN201, ANN202


@inlined
def choose_residents(state, layer, decided, flying):
    """Fix R' = the best of R and what is transferred; say which slots become free, and when."""
    pools, work, demand = state.pools, state.lanes.work, state.lanes.demand
    work[FREE_BYTES] = _limit_bytes(work, pools, layer) - _pool_bytes(work, pools, layer)
    if work[GLOBAL] == 1:
        _choose_of_all(state, layer, decided, flying)
    else:
        _choose_of_layer(pools, work, layer, decided)
    _welcome(work, pools, demand, layer, flying)


@inlined
def _choose_of_layer(pools, work, layer, decided):
    """Choose among the residents of a layer's own pool and what is transferred."""
    order, used, lasting = pools.order[layer], pools.used[layer], pools.ages
    first = (work[USES] - 1) * len(used)
    n = 0
    for i in range(pools.occupied[layer]):
        order[n] = order[i]
        n += int(used[order[i]] < first)
    for i in range(work[LASTING]):
        order[n + i] = lasting[i]
    n += work[LASTING]
    kept = drop_worst(pools, layer, n, n - pools.capacity[layer], work[EQUAL] == 1)
    for i in range(n - kept):
        _let_go(work, pools, layer, layer, pools.candidates[i], first, decided)


@inlined
def _choose_of_all(state, layer, decided, flying):
    """Choose among the residents of all layers and what is transferred."""
    pools, work, demand = state.pools, state.lanes.work, state.lanes.demand
    experts = pools.resident.shape[1]
    n = add_all_residents(pools)
    for row in range(work[DEMANDS]):
        n = add_candidate(pools, n, layer, demand[row, DEMAND_EXPERT])
    if work[KIND + H2D] == LATE:
        n = add_candidate(pools, n, layer, flying)
    first = (work[USES] - 1) * experts
    for i in range(retain(pools, n, work[BUDGET_BYTES]), n):
        owner, expert = pools.candidates[i] // experts, pools.candidates[i] % experts
        _let_go(work, pools, layer, owner, expert, first, decided)


@inlined
def _let_go(work, pools, layer, owner, expert, first, decided):
    """Drop a resident of layer ``owner``, or mark an arrival as one that does not stay."""
    if not pools.resident[owner, expert]:
        pools.lost[expert] = True
        return
    drop_resident(work, pools, owner, expert)
    # A slot that this event's hits kernel reads is free only afterwards.
    rank = pools.used[owner, expert] - first
    if owner == layer and rank >= 0 and decided[rank] == ON_GPU:
        work[FREED_BY_HITS] += work[EXPERT_BYTES]
    else:
        work[FREE_BYTES] += pools.expert_bytes[owner]


@inlined
def _welcome(work, pools, demand, layer, flying):
    """Make the transferred experts that stay residents, and remember the transfers."""
    lost, fresh = pools.lost, pools.fresh[layer]
    fresh[:] = 0
    for row in range(work[DEMANDS]):
        expert = demand[row, DEMAND_EXPERT]
        fresh[expert] = 1 - int(lost[expert])
        demand[row, DEMAND_KEPT] = int(not lost[expert])
        if not lost[expert]:
            add_resident(work, pools, layer, expert)
            work[KEPT] += 1
        lost[expert] = False
    if work[KIND + H2D] == LATE:
        work[LATE_KEPT] = int(not lost[flying])
        if not lost[flying]:
            add_resident(work, pools, layer, flying)
            work[KEPT] += 1
        lost[flying] = False


@inlined
def add_resident(work, pools, layer, expert):
    """Make an expert resident."""
    pools.resident[layer, expert] = True
    pools.occupied[layer] += 1
    work[POOL_BYTES] += pools.expert_bytes[layer]


@inlined
def drop_resident(work, pools, layer, expert):
    """Make a resident expert leave; a prefetched one that was never used was wasted."""
    pools.resident[layer, expert] = False
    pools.fresh[layer, expert] = 0
    pools.occupied[layer] -= 1
    work[POOL_BYTES] -= pools.expert_bytes[layer]
    if pools.unused[layer, expert]:
        pools.unused[layer, expert] = False
        work[UNUSED] -= 1
        work[WASTED] += 1


@inlined
def _limit_bytes(work, pools, layer):
    """Return the bytes that the pool of ``layer`` may hold."""
    if work[GLOBAL] == 1:
        return work[BUDGET_BYTES]
    return pools.capacity[layer] * pools.expert_bytes[layer]


@inlined
def _pool_bytes(work, pools, layer):
    """Return the bytes that the pool of ``layer`` holds."""
    if work[GLOBAL] == 1:
        return work[POOL_BYTES]
    return pools.occupied[layer] * pools.expert_bytes[layer]


@lean
def set_residents(state, layer, ids):
    """Make exactly ``ids`` resident in a layer, free of charge.

    Under global scope the lowest-scored experts of other layers leave if the pool overflows.
    """
    pools, work = state.pools, state.lanes.work
    experts = pools.resident.shape[1]
    for expert in range(experts):
        if pools.resident[layer, expert]:
            retained = pools.fresh[layer, expert]
            drop_resident(work, pools, layer, expert)
            pools.fresh[layer, expert] = retained  # until this gate
    for expert in ids:
        add_resident(work, pools, layer, expert)
    if work[GLOBAL] == 0:
        for n in range(len(ids)):
            insert_in_order(pools, layer, n, ids[n])
    elif work[POOL_BYTES] > work[BUDGET_BYTES]:
        n = 0
        for other in range(len(pools.occupied)):
            if other != layer:
                n = add_residents(pools, n, other)
        own = pools.occupied[layer] * pools.expert_bytes[layer]
        for i in range(retain(pools, n, work[BUDGET_BYTES] - own), n):
            owner, other = pools.candidates[i] // experts, pools.candidates[i] % experts
            drop_resident(work, pools, owner, other)


@lean
def change_capacities(pools, work, capacity):
    """Give layers new capacities, int64 [L]; those that shrink drop their lowest-scored first."""
    for layer in range(len(capacity)):
        n = pools.occupied[layer]
        kept = drop_worst(pools, layer, n, n - capacity[layer], work[EQUAL] == 1)
        for i in range(n - kept):
            drop_resident(work, pools, layer, pools.candidates[i])
        pools.capacity[layer] = capacity[layer]
