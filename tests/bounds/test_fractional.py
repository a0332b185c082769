"""The bound on hits in one pool of experts of different size."""

from itertools import combinations

import numpy as np
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.bounds.fractional import most_hits_in_one_pool
from oled_sim.engine.budget import Budget
from oled_sim.engine.feeding import feed
from oled_sim.engine.rules import Rules, split_requests
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import N_HITS
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.belady import Belady
from oled_sim.policies.lru import LRU
from oled_sim.testing.by_hand import costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request

COSTS = costs_by_hand()
MIB = 2**20


def fractional(geometry, traces, sizes, budget, **rules):
    settings_ = Rules(history=0, warmup=0, scope="global", **rules)
    splits = split_requests([t.request for t in traces], settings_)

    def fed():
        return feed(MemoryTrace(geometry, traces), splits, settings_, COSTS, learns=False)

    cold = settings_.cold
    return most_hits_in_one_pool(fed, np.array(sizes), geometry.experts, budget, cold=cold)


def simulated(geometry, traces, policy, sizes, budget, **rules):
    hits = 0

    def note(contender, record):
        nonlocal hits
        hits += int(record.course.counts[:, N_HITS].sum())

    settings_ = Rules(history=0, warmup=0, scope="global", **rules)
    contender = Contender("policy", policy, Budget(size_bytes=budget))
    simulate_all(MemoryTrace(geometry, traces), [contender], COSTS, settings_,
                 expert_bytes=np.array(sizes), observe=note)  # fmt: skip
    return hits


def exhaustive(events, sizes, budget):
    """Try everything that may stay; events are (layer, set of experts)."""
    best = {frozenset(): 0}
    for layer, experts in events:
        keys = frozenset((layer, e) for e in experts)
        after = {}
        for resident, hits in best.items():
            total = hits + len(resident & keys)
            reachable = sorted(resident | keys)
            for n in range(len(reachable) + 1):
                for kept in combinations(reachable, n):
                    if sum(sizes[layer] for layer, _ in kept) <= budget:
                        key = frozenset(kept)
                        after[key] = max(after.get(key, 0), total)
        best = after
    return max(best.values())


@settings(max_examples=examples(60), deadline=None)
@given(
    passes=st.lists(
        st.lists(st.sets(st.integers(0, 2), min_size=1, max_size=2), min_size=2, max_size=2),
        min_size=1,
        max_size=5,
    ),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    budget=st.integers(1, 16),
)
def test_no_way_to_keep_experts_has_more_hits(passes, sizes, budget):
    geometry = RoutingGeometry((1, 2), 3, 1)
    rows = [[[[e] for e in sorted(event)] for event in events] for events in passes]
    trace = request_by_hand(geometry, rows)
    events = [(layer, event) for events in passes for layer, event in enumerate(events)]
    if budget >= 3 * sum(sizes):
        return  # everything is resident from the start
    found = fractional(geometry, [trace], [s * MIB for s in sizes], budget * MIB)
    best = exhaustive(events, sizes, budget)
    belady = simulated(geometry, [trace], Belady(), [s * MIB for s in sizes], budget * MIB)
    assert belady <= best <= found


@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 10**6), slots=st.integers(1, 20), cold=st.booleans())
def test_it_is_belady_s_where_sizes_are_equal(seed, slots, cold):
    geometry = RoutingGeometry((1, 2, 4), 8, 2)
    rng = np.random.default_rng(seed)
    traces = [random_request(rng, geometry, request=i, passes=5, ragged=True) for i in range(3)]
    run = geometry, traces
    sizes = [6 * MIB] * 3
    found = fractional(*run, sizes, slots * 6 * MIB + 1, cold=cold, batch=2)
    assert found == simulated(*run, Belady(), sizes, slots * 6 * MIB + 1, cold=cold, batch=2)


def test_the_average_can_be_the_lower_one():
    # Layer 1 has experts of 1 MiB, layer 2 of 9; the pool holds 9. If all were small, both could
    # stay; but 0 of layer 2 over two gaps costs 18 of 9 · 4 = 36 MiB · events each time.
    geometry = RoutingGeometry((1, 2), 4, 1)
    trace = request_by_hand(geometry, [[[[0]], [[0]]]] * 2)
    sizes = [MIB, 9 * MIB]
    assert fractional(geometry, [trace], sizes, 9 * MIB) == 2
    assert fractional(geometry, [trace], sizes, 4 * MIB) == 1
    assert simulated(geometry, [trace], LRU(), sizes, 4 * MIB) <= 1
