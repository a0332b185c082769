"""Demand-only policies ≤ belady ≤ oracle residency (spec §4), over whole runs.

Given the same capacities over time, the same scope and the same initial residents.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from how_many import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oled_sim.engine import laws
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.belady import Belady
from oled_sim.policy import Lane, Policy, param
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request

FIXED = ("lru", "lru:dispatch=load", "lfu", "oled:priority", "oled:allocate=uniform",
         "belady:dispatch=load", "least-stale", "hybrimoe:initial=none")  # fmt: skip
PLACING = ("ktransformers", "fiddler", "hybrimoe")
"""Policies with initial residents of their own."""
MOVING = ("oled", "oled:priority+adapt", "oled:allocate_every=1")
quick = settings(
    max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def same_start(policy, setting):
    """Return random initial residents, the same for every policy with the same ``seed``."""
    rng = np.random.default_rng(policy.seed)
    mask = np.zeros((len(setting.routing.layers), setting.routing.experts), bool)
    for layer, slots in enumerate(setting.capacity):
        mask[layer, rng.permutation(mask.shape[1])[:slots]] = True
    return mask


@dataclass
class Random(Policy):
    """Keeps and computes anything anywhere; starts with some residents."""

    seed: int = param(0, "seed")

    def place(self, setting):
        self._rng = np.random.default_rng(self.seed + 1)
        return same_start(self, setting)

    def dispatch(self, event):
        to_cpu = self._rng.random(len(event.experts)) < 0.2
        return np.where(to_cpu, Lane.CPU, super().dispatch(event))

    def score(self, layer, event):
        return self._rng.choice([-np.inf, 0.0, 1.0], self.experts)


@dataclass
class Placed(Belady):
    """`belady` with the same initial residents."""

    seed: int = param(0, "seed")

    def place(self, setting):
        super().place(setting)
        return same_start(self, setting)


@dataclass
class From(Belady):
    """`belady` from given residents."""

    mask: Any = None

    def place(self, setting):
        super().place(setting)
        return self.mask


@st.composite
def runs(draw, **fixed):
    """A geometry, requests, rules, and slots per layer."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 9))
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), experts, draw(st.integers(1, 2)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    traces = [
        random_request(rng, geometry, request=i, passes=draw(st.integers(1, 7)), tokens=3,
                       ragged=draw(st.booleans()))
        for i in range(draw(st.integers(1, 4)))
    ]  # fmt: skip
    rules = {
        "scope": draw(st.sampled_from(["layer", "global"])),
        "batch": draw(st.integers(1, 3)),
        "cold": draw(st.booleans()),
    } | fixed
    return geometry, traces, rules, draw(st.integers(0, experts))


def hits_by_layer(run, policies, **changed):
    """Return hits of each policy in each layer over the whole run, int [policies, L]."""
    geometry, traces, rules, cache = run
    found = {i: np.zeros(len(geometry.layers), int) for i in range(len(policies))}

    def note(contender, record):
        hits = laws.columns(record)["hits"]
        np.add.at(found[int(contender.spec)], record.course.event_layer, hits)

    contenders = [Contender(str(i), p, Budget(cache=cache)) for i, p in enumerate(policies)]
    settings_ = Rules(**({"history": 0, "warmup": 0} | rules | changed))
    simulate_all(
        MemoryTrace(geometry, traces), contenders, costs_by_hand(), settings_, observe=note
    )
    return np.array([found[i] for i in range(len(policies))])


@pytest.mark.parametrize("spec", FIXED)
@quick
@given(run=runs())
def test_no_policy_hits_more_than_belady_nor_belady_than_an_oracle(spec, run):
    policies = [parse_policy(s) for s in (spec, "belady", "ideal")]
    mine, belady, ideal = hits_by_layer(run, policies)
    if run[2]["scope"] == "layer":
        assert (mine <= belady).all() and (belady <= ideal).all()
    else:
        assert mine.sum() <= belady.sum()


@quick
@given(run=runs(), seed=st.integers(0, 10**6))
def test_also_from_the_same_initial_residents(run, seed):
    mine, belady = hits_by_layer(run, [Random(seed=seed), Placed(seed=seed)])
    assert (mine <= belady).all() if run[2]["scope"] == "layer" else mine.sum() <= belady.sum()


@pytest.mark.parametrize("spec", PLACING)
@quick
@given(run=runs())
def test_also_from_the_residents_that_a_policy_places(spec, run):
    geometry, _, rules, cache = run
    policy = parse_policy(spec)
    placed = Simulation(policy, geometry, costs_by_hand(), Budget(cache=cache), Rules(**rules))
    mask = placed.state.pools.resident.copy()
    mine, belady = hits_by_layer(run, [policy, From(mask=mask)], history=0)
    assert (mine <= belady).all() if run[2]["scope"] == "layer" else mine.sum() <= belady.sum()


@pytest.mark.parametrize("spec", MOVING)
@quick
@given(run=runs(scope="layer"))
def test_one_that_moves_budget_is_held_against_one_pool(spec, run):
    (mine,) = hits_by_layer(run, [parse_policy(spec)])
    (pool,) = hits_by_layer(run, [Belady()], scope="global")
    (fixed,) = hits_by_layer(run, [Belady()])
    assert mine.sum() <= pool.sum()
    assert fixed.sum() <= pool.sum()


def test_one_that_moves_budget_can_beat_fixed_shares():
    # Layer 1 alternates between three experts, layer 2 always wants the same one. With two slots
    # each, belady misses in layer 1; a policy that gives it three would not.
    def most(slots):
        geometry = RoutingGeometry((1, 2), 4, 1)
        request = request_by_hand(geometry, [[[[i % 3]], [[0]]] for i in range(9)])
        run = geometry, [request], {"scope": slots}, 2
        return int(hits_by_layer(run, [Belady()]).sum())

    # One pool: all but the four first uses hit. Two slots per layer: 8 hits in layer 2; in layer 1
    # a use is three events after the last one, and each slot bridges two such intervals in nine
    # events (0 to 3 to 6, 1 to 4 to 7).
    assert most("global") == 18 - 4
    assert most("layer") == 8 + 4
