"""Retention against every possible retention, on traces small enough to try all.

What a demand-only policy may keep is any subset of residents and activated experts that fits.
Keeping what is used soonest (`belady`: Belady's rule for sets, with bypass) is the best of all,
also while capacities change and in one pool for all layers, and over all requests of a run; and no
policy may come out above it.
"""

from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import N_HITS
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.belady import Belady
from oled_sim.policy import Policy, param
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand


def most_hits(events, limits):
    """Return the most hits that any retention can have.

    Args:
        events: sets of activated experts, in order.
        limits: slots at each event. What is kept from one to the next must fit both.
    """
    best = {frozenset(): 0}
    for i, activated in enumerate(events):
        limit = min(limits[i : i + 2])
        after = {}
        for resident, hits in best.items():
            total = hits + len(resident & activated)
            for kept in subsets(resident | activated, limit):
                after[kept] = max(after.get(kept, 0), total)
        best = after
    return max(best.values())


def subsets(of, limit):
    return (frozenset(kept) for n in range(limit + 1) for kept in combinations(of, n))


@dataclass
class Moving(Belady):
    """`belady`, with slots of layers as told, at every pass."""

    weights: list = field(default_factory=list)  # [passes][L]

    allocation_period = 1

    def allocate(self, history):
        weight = np.array(self.weights.pop(0))
        return history.budget * weight / weight.sum()


def activations(layers, experts):
    """Passes of events: per pass and layer a non-empty set of experts."""
    event = st.sets(st.integers(0, experts - 1), min_size=1, max_size=experts)
    return st.lists(st.lists(event, min_size=layers, max_size=layers), min_size=1, max_size=7)


def run(policy, layers, experts, passes, slots, **rules):
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), experts, 1)
    rows = [[[[e] for e in sorted(event)] for event in events] for events in passes]
    return Run(policy, geometry, request_by_hand(geometry, rows), slots, **rules)


def in_order(passes):
    return [(layer, event) for events in passes for layer, event in enumerate(events)]


def bound(found, passes):
    """Return the most hits possible with the capacities that a run had."""
    layers = found.record.course.event_layer
    capacity = np.array(found.count("capacity"))
    return sum(
        most_hits([events[layer] for events in passes], capacity[layers == layer].tolist())
        for layer in range(len(passes[0]))
    )


@settings(max_examples=examples(150), deadline=None)
@given(passes=activations(1, 6), slots=st.integers(0, 5))
def test_what_is_used_soonest_is_the_best_to_keep(passes, slots):
    found = run(Belady(), 1, 6, passes, slots)
    assert sum(found.count("hits")) == bound(found, passes)


@settings(max_examples=examples(150), deadline=None)
@given(passes=activations(2, 5), slots=st.integers(1, 4), seed=st.integers(0, 1000))
def test_also_while_capacities_change(passes, slots, seed):
    weights = np.random.default_rng(seed).integers(0, 4, (len(passes), 2)) + 0.01
    found = run(Moving(weights=weights.tolist()), 2, 5, passes, slots)
    assert sum(found.count("hits")) == bound(found, passes)


def test_capacities_do_change_in_the_test_above():
    passes = [[{0, 1}, {0}]] * 4
    found = run(Moving(weights=[[3, 1], [1, 3], [1, 1]]), 2, 5, passes, 2)
    # Pass by pass, layer by layer; the first pass is the prefill, which does not allocate.
    assert found.count("capacity") == [2, 2, 2, 2, 3, 1, 1, 3]


@settings(max_examples=examples(100), deadline=None)
@given(passes=activations(2, 3), slots=st.integers(0, 2))
def test_also_in_one_pool_for_all_layers(passes, slots):
    found = run(Belady(), 2, 3, passes, slots, scope="global")
    keys = [frozenset((layer, e) for e in event) for layer, event in in_order(passes)]
    assert sum(found.count("hits")) == most_hits(keys, [2 * slots] * len(keys))


@pytest.mark.parametrize("cold", [False, True])
@pytest.mark.parametrize("batch", [1, 2])
@settings(max_examples=examples(40), deadline=None)
@given(requests=st.lists(activations(1, 5), min_size=2, max_size=4), slots=st.integers(1, 3))
def test_also_over_the_requests_of_a_run(cold, batch, requests, slots):
    geometry = RoutingGeometry((1,), 5, 1)
    traces = [
        request_by_hand(geometry, [[[[e] for e in sorted(event)] for event in p] for p in passes],
                        request=i)
        for i, passes in enumerate(requests)
    ]  # fmt: skip
    groups = [[]]
    hits = 0

    def note(contender, record):
        nonlocal hits
        hits += int(record.course.counts[:, N_HITS].sum())
        course = record.course
        ends = zip(course.offset, course.offset[1:], strict=False)
        events = [frozenset(course.experts[a:b].tolist()) for a, b in ends]
        if cold:
            groups.append(events)
        else:
            groups[0] += events

    contender = Contender("belady", Belady(), Budget(cache=slots))
    rules = Rules(history=0, warmup=1, batch=batch, cold=cold)
    simulate_all(MemoryTrace(geometry, traces), [contender], costs_by_hand(), rules, observe=note)
    assert hits == sum(most_hits(g, [slots] * len(g)) for g in groups if g)


@pytest.mark.parametrize(
    "spec",
    ["lru", "lru:dispatch=load", "lfu", "oled", "oled:priority", "oled:allocate_every=1"],
)
@settings(max_examples=examples(40), deadline=None)
@given(passes=activations(2, 5), slots=st.integers(0, 4))
def test_no_policy_has_more_hits_under_its_own_capacities(spec, passes, slots):
    found = run(parse_policy(spec), 2, 5, passes, slots)
    assert sum(found.count("hits")) <= bound(found, passes)


@dataclass
class Random(Policy):
    """Keeps anything at all, or nothing."""

    seed: int = param(0, "seed")

    def place(self, setting):
        self._rng = np.random.default_rng(self.seed)

    def score(self, layer, event):
        return self._rng.choice([-np.inf, 0.0, 1.0], self.experts)


@settings(max_examples=examples(100), deadline=None)
@given(passes=activations(1, 5), slots=st.integers(0, 4), seed=st.integers(0, 1000))
def test_no_decision_whatever_has_more_hits(passes, slots, seed):
    found = run(Random(seed), 1, 5, passes, slots)
    assert sum(found.count("hits")) <= bound(found, passes)


def test_the_search_on_paper():
    # Two slots. 0 1 2 arrive at once; 1 and 2 are worth keeping (one hit each), then 3 passes by
    # while 2 waits for its next use: 3 hits. With one slot, 2 throughout: 2 hits.
    events = [frozenset(e) for e in ({0, 1, 2}, {1, 2}, {3}, {2})]
    assert most_hits(events, [2, 2, 2, 2]) == 3
    assert most_hits(events, [1, 1, 1, 1]) == 2
    assert most_hits(events, [0, 0, 0, 0]) == 0
    # No slot at the third event: 2 cannot wait there.
    assert most_hits(events, [2, 2, 0, 2]) == 2
