"""Hits with every number of slots, and the best fixed split of a budget over layers."""

from itertools import pairwise, product

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.bounds.curves import best_static_split, hits_by_slots
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
POLICIES = {"soonest": Belady(), "latest": LRU()}


def curves(geometry, traces, order, **rules):
    settings_ = Rules(history=0, warmup=0, **rules)
    source = MemoryTrace(geometry, traces)
    splits = split_requests(source.requests, settings_)

    def fed():
        return feed(source, splits, settings_, COSTS, learns=False)

    layers, cold = len(geometry.layers), settings_.cold
    return hits_by_slots(fed, layers, geometry.experts, order, cold=cold)


def simulated(geometry, traces, policy, budgets, **rules):
    """Return hits by budget and layer, int64 [budgets, L]."""
    found = np.zeros((len(budgets), len(geometry.layers)), np.int64)

    def note(contender, record):
        course = record.course
        np.add.at(found[int(contender.spec)], course.event_layer, course.counts[:, N_HITS])

    contenders = [Contender(str(i), policy, b) for i, b in enumerate(budgets)]
    source = MemoryTrace(geometry, traces)
    simulate_all(source, contenders, COSTS, Rules(history=0, warmup=0, **rules), observe=note)
    return found


@st.composite
def runs(draw, layers=3):
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), draw(st.integers(2, 8)), 2)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    traces = [
        random_request(rng, geometry, request=i, passes=draw(st.integers(1, 6)), ragged=True)
        for i in range(draw(st.integers(1, 3)))
    ]
    return geometry, traces


@pytest.mark.parametrize("order", POLICIES)
@settings(max_examples=examples(30), deadline=None)
@given(
    run=runs(),
    rules=st.sampled_from(
        [
            {"batch": 1},
            {"batch": 2, "cold": True},
            {"batch": 2, "batch_mode": "barrier"},
            {"batch": 2, "batch_mode": "refill"},
        ]
    ),
)
def test_every_capacity_is_what_a_run_has(order, run, rules):
    geometry, traces = run
    found = curves(geometry, traces, order, **rules)
    most = geometry.experts
    # With E slots in every layer the engine would start full, so one layer keeps fewer.
    budgets = [Budget(slots=(c, c, min(c, most - 1))) for c in range(most + 1)]
    hits = simulated(geometry, traces, POLICIES[order], budgets, **rules)
    for c in range(most):
        assert found[:, c].tolist() == hits[c].tolist()
    assert found[:2, -1].tolist() == hits[-1, :2].tolist()


@settings(max_examples=examples(60), deadline=None)
@given(run=runs())
def test_belady_gains_less_and_less(run):
    gains = np.diff(curves(*run, "soonest"), axis=1)
    assert (gains >= 0).all()
    assert (np.diff(gains, axis=1) <= 0).all()


@pytest.mark.parametrize("order", POLICIES)
@settings(max_examples=examples(25), deadline=None)
@given(run=runs(layers=2), cache=st.integers(0, 7))
def test_no_fixed_split_has_more_hits(order, run, cache):
    geometry, traces = run
    cache = min(cache, geometry.experts - 1)
    sizes = np.ones(2, np.int64)
    found = curves(geometry, traces, order)
    split = best_static_split(found, sizes, 2 * cache)
    assert split.sum() == 2 * cache
    every = range(geometry.experts + 1)
    splits = [s for s in product(every, every) if sum(s) == 2 * cache]
    hits = simulated(geometry, traces, POLICIES[order], [Budget(slots=s) for s in splits])
    assert hits.sum(axis=1).max() == found[[0, 1], split].sum()
    assert hits[splits.index(tuple(split.tolist()))].sum() == hits.sum(axis=1).max()


@settings(max_examples=examples(60), deadline=None)
@given(run=runs(), cache=st.integers(0, 8))
def test_marginal_gains_find_belady_s_best_split_too(run, cache):
    found = curves(*run, "soonest")
    split = best_static_split(found, np.ones(3, np.int64), 3 * cache)
    gains = sorted(np.diff(found, axis=1).ravel().tolist(), reverse=True)
    assert found[range(3), split].sum() == sum(gains[: 3 * cache])


def test_on_paper():
    # Belady: with one slot 0 waits for its second use (1 hit); with two slots 1 as well.
    # LRU: with one or two slots 0 is gone when it comes back.
    geometry = RoutingGeometry((1,), 4, 1)
    trace = request_by_hand(geometry, [[[[e]]] for e in (0, 1, 2, 0, 1)])
    assert curves(geometry, [trace], "soonest").tolist() == [[0, 1, 2, 2, 2]]
    assert curves(geometry, [trace], "latest").tolist() == [[0, 0, 0, 2, 2]]


def test_experts_of_other_sizes_take_more_of_the_budget():
    # One more slot gives layer 1 five hits and layer 2 six, but layer 2's costs twice as much.
    hits = np.array([[0, 5, 10], [0, 6, 7]])
    assert best_static_split(hits, np.array([3, 6]), 6).tolist() == [2, 0]
    assert best_static_split(hits, np.array([3, 6]), 9).tolist() == [1, 1]


def test_curves_never_fall():
    geometry = RoutingGeometry((1, 2), 12, 3)
    rng = np.random.default_rng(1)
    traces = [random_request(rng, geometry, request=i, passes=20) for i in range(2)]
    for order in POLICIES:
        found = curves(geometry, traces, order)
        assert all((a <= b).all() for a, b in pairwise(found.T))
    assert (curves(geometry, traces, "latest") <= curves(geometry, traces, "soonest")).all()
