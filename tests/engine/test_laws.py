"""The laws of the simulation on random traces, policies, scopes, batches and capacities."""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from how_many import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oled_sim.engine import laws
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.state import HELD, KIND, PREFETCH, WASTED
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Lane, Policy, Prefetch, param
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request

SPECS = (
    "lru",
    "lru:dispatch=load",
    "lfu",
    "lfu:count=tokens,reset=request",
    "oled",
    "oled:priority",
    "oled:priority+adapt",
    "oled:dispatch=load",
    "oled:stale=last_priority",
    "ideal",
    "ideal:split=total",
    "belady",
)
FIXED = ("lru", "lru:dispatch=load", "lfu", "oled:allocate=uniform", "oled:priority")
"""Policies that neither prefetch nor move budget between layers."""

COSTS = {
    "plain": costs_by_hand(),
    "interfering": costs_by_hand(slowdown=1.3, gpu_per_token_us=0.7, cpu_per_token_us=11.0),
    "slow link": costs_by_hand(h2d_gb_s=9.7, cpu_per_expert_us=90.0),
    "slow GPU": costs_by_hand(gpu_fixed_us=5.0, gpu_per_expert_us=170.0, cpu_fixed_us=100.0),
}


@dataclass
class Erratic(Policy):
    """Decides at random: every lane an expert can take, scores with ties and −∞, prefetches."""

    seed: int = param(0, "seed")

    def place(self, setting):
        self._rng = np.random.default_rng(self.seed)
        self._layers = len(setting.routing.layers)

    @property
    def allocation_period(self):
        return 2

    def allocate(self, history):
        weight = self._rng.integers(0, 4, len(history.capacity)).astype(float)
        return None if weight.sum() == 0 else history.budget * weight / weight.sum()

    def dispatch(self, event):
        to_cpu = self._rng.random(len(event.experts)) < 0.3
        return np.where(to_cpu, Lane.CPU, super().dispatch(event))

    def score(self, layer, event):
        return self._rng.choice([-np.inf, 0.0, 1.0, 2.0], self.experts)

    def prefetch(self, event):
        wanted = self._rng.integers(0, [self._layers, self.experts], (3, 2))
        return [Prefetch(int(a), int(b), float(self._rng.integers(0, 3))) for a, b in wanted]


@st.composite
def scenarios(draw, batches=(1, 2, 3), **fixed):
    """A geometry, requests, costs, rules and a capacity."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 10))
    top_k = draw(st.integers(1, min(3, experts)))
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), experts, top_k)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ragged = draw(st.booleans())
    traces = [
        random_request(
            rng, geometry, request=i, passes=draw(st.integers(1, 8)),
            tokens=draw(st.integers(1, 4)), ragged=ragged,
        )
        for i in range(draw(st.sampled_from(batches)))
    ]  # fmt: skip
    rules = Rules(
        scope=draw(st.sampled_from(["layer", "global"])),
        batch=len(traces),
        staging=draw(st.sampled_from([1, 2, 3, 16])),
        cold=draw(st.booleans()),
        confidence=draw(st.sampled_from(["previous", "end", "current"])),
    )
    cache = draw(st.integers(0, experts + 1))
    costs = COSTS[draw(st.sampled_from(sorted(COSTS)))]
    return geometry, traces, replace(rules, **fixed), cache, costs


def run(policy, scenario, repeats=2):
    """Run the same requests ``repeats`` times on one simulation; return it and the records."""
    geometry, traces, rules, cache, costs = scenario
    simulation = Simulation(policy, geometry, costs, Budget(cache=cache), rules, keep_log=True)
    batch = make_batch(traces, geometry, costs, rules.confidence)
    group = Group("counted", tuple(t.request for t in traces))
    records = []
    for _ in range(repeats):
        records.append(simulation.run_group(group, batch))
        laws.check_all(records[-1], simulation.state, rules)
    return simulation, records


quick = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("spec", SPECS)
@quick
@given(scenario=scenarios())
def test_laws_hold(spec, scenario):
    run(parse_policy(spec), scenario)


@settings(quick, max_examples=examples(200))
@given(scenario=scenarios(), seed=st.integers(0, 1000))
def test_laws_hold_for_any_decisions(scenario, seed):
    simulation, records = run(Erratic(seed=seed), scenario)
    if scenario[2].cold:
        return
    # Every prefetch that started is used, late, wasted, in flight, held, or still resident unused.
    started, used, late, wasted = (
        sum(int(r.course.pass_counts[:, column].sum()) for r in records) for column in (1, 3, 4, 5)
    )
    left = int(simulation.state.pools.unused.sum()) + int(simulation.work[HELD])
    left += int(simulation.work[KIND + 1] == PREFETCH)
    # What was dropped after the last pass has not been noted in a pass yet.
    assert started == used + late + wasted + left + int(simulation.work[WASTED])


@pytest.mark.parametrize("spec", SPECS)
@settings(quick, max_examples=10)
@given(scenario=scenarios())
def test_same_input_same_output(spec, scenario):
    first, second = (run(parse_policy(spec), scenario)[1] for _ in range(2))
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.course, b.course, strict=True):
            assert x.tobytes() == y.tobytes()
        assert a.log.tobytes() == b.log.tobytes()


@pytest.mark.parametrize("spec", FIXED)
@quick
@given(scenario=scenarios(scope="layer"))
def test_ideal_has_the_most_hits_and_the_shortest_layers(spec, scenario):
    _, mine = run(parse_policy(spec), scenario)
    _, ideal = run(parse_policy("ideal"), scenario)
    for a, b in zip(mine, ideal, strict=True):
        assert (laws.columns(a)["hits"] <= laws.columns(b)["hits"]).all()
        layer = [r.course.times[:, 2] - r.course.times[:, 1] for r in (a, b)]
        assert (layer[1] <= 1.01 * layer[0]).all()  # tests/engine/test_exhaustive.py says why


@settings(quick, max_examples=examples(30))
@given(scenario=scenarios(scope="layer", cold=False))
def test_lru_hits_grow_with_capacity(scenario):
    # LRU is a stack algorithm: what a small cache holds, a larger one holds too.
    geometry, traces, rules, _, costs = scenario
    hits = [
        laws.columns(run(parse_policy("lru"), (geometry, traces, rules, cache, costs))[1][1])[
            "hits"
        ]
        for cache in range(geometry.experts + 1)
    ]
    for small, large in pairwise(hits):
        assert (small <= large).all()


@settings(quick, max_examples=examples(30))
@given(scenario=scenarios(), spec=st.sampled_from(["lru", "lfu", "oled", "ideal"]))
def test_full_residency_never_misses_and_no_cache_never_hits(scenario, spec):
    geometry, traces, rules, _, costs = scenario
    for cache in (geometry.experts, 0):
        _, records = run(parse_policy(spec), (geometry, traces, rules, cache, costs))
        for record in records:
            n = laws.columns(record)
            wanted = n["activated"] if cache else np.zeros_like(n["activated"])
            assert (n["hits"] == wanted).all()
