"""The least work of a request's misses: below what any policy makes the lanes do."""

from dataclasses import dataclass

import numpy as np
import pytest
from how_many import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oled_sim.bounds.report import Bounds, OneRequest
from oled_sim.bounds.request_cost import least_expert_cost
from oled_sim.costs.lanes import load_costs
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.policy import Lane, Policy, Prefetch, param
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request

COSTS = {
    "plain": costs_by_hand(),
    "cheap CPU": costs_by_hand(cpu_per_expert_us=20.0, cpu_per_token_us=25.0, slowdown=1.3),
    "dear CPU": costs_by_hand(cpu_per_expert_us=400.0),
    "measured": load_costs(find_geometry("llada2.0-mini")),
}
GEOMETRY = RoutingGeometry((1, 2), 8, 2)
SIZE = np.full(2, find_geometry("llada2.0-mini").expert_bytes, np.int64)


@dataclass
class Random(Policy):
    """Keeps, prefetches and computes anything anywhere."""

    seed: int = param(0, "seed")

    def place(self, setting):
        self._rng = np.random.default_rng(self.seed)

    def dispatch(self, event):
        to_cpu = self._rng.random(len(event.experts)) < 0.4
        return np.where(to_cpu, Lane.CPU, super().dispatch(event))

    def score(self, layer, event):
        return self._rng.choice([-np.inf, 0.0, 1.0], self.experts)

    def prefetch(self, event):
        return [Prefetch(int(self._rng.integers(2)), int(self._rng.integers(8)), 1.0)]


def bounds_of(traces, costs, request, bounds=None):
    source = OneRequest(MemoryTrace(GEOMETRY, traces), request)
    return Bounds(source, costs, Rules(history=0, warmup=0), SIZE, bounds or {})


@pytest.mark.parametrize("name", COSTS)
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**6), cache=st.integers(0, 8))
def test_no_policy_does_with_less_work(name, seed, cache):
    rng = np.random.default_rng(seed)
    trace = random_request(rng, GEOMETRY, passes=int(rng.integers(1, 9)), tokens=4, ragged=True)
    policies = {s: parse_policy(s) for s in ("lru", "lru:dispatch=load", "oled:allocate=uniform",
                                             "belady", "belady:dispatch=load")}  # fmt: skip
    policies["random"] = Random(seed=seed)
    (found,) = bounds_of([trace], COSTS[name], 0).compare(policies, [Budget(cache=cache)])
    assert found.least_work_us is not None
    for row in found.policies:
        assert row.work_us >= found.least_work_us * (1 - 1e-9), row.name


def test_on_paper():
    # Copies take 150 µs, the CPU 250 n; so every miss is copied. One slot per layer, and layer 1
    # goes 0 1 0: two copies and a hit, or three misses. Layer 2 has one expert: one copy.
    geometry_rows = [[[[0, 1]], [[5, 6]]], [[[0, 2]], [[5, 6]]], [[[0, 1]], [[5, 6]]]]
    trace = request_by_hand(GEOMETRY, geometry_rows)
    (found,) = bounds_of([trace], COSTS["plain"], 0).compare({}, [Budget(cache=2)])
    # Layer 1: 0, 1 and 2 are copied once each, if 1 stays over event 2: slots {0, 1}.
    assert found.least_work_us == pytest.approx(150.0 * (3 + 2))


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("tokens", [1.0, 3.0, 9.0])
def test_single_experts_never_sum_to_more_than_the_makespan(name, tokens):
    costs = COSTS[name]
    least = least_expert_cost(costs, tokens)
    assert least.fixed_us >= 0 and least.per_token_us >= 0
    rng = np.random.default_rng(0)
    for _ in range(300):
        loads = rng.integers(1, 30, int(rng.integers(1, 60)))
        mine = len(loads) * least.fixed_us + loads.sum() * least.per_token_us
        assert mine <= costs.cpu_experts_us(len(loads), int(loads.sum())) * (1 + 1e-12)


def test_where_costs_are_affine_the_floor_is_the_cost():
    # 40 to begin with, then 20 + 25 n per expert: many experts hide the 40.
    least = least_expert_cost(COSTS["cheap CPU"], 2.0)
    assert least.per_token_us == pytest.approx(25.0, rel=0.02)
    assert 20.0 <= least.fixed_us <= 21.0


def test_full_residency_misses_nothing():
    trace = random_request(np.random.default_rng(0), GEOMETRY, passes=3)
    assert bounds_of([trace], COSTS["plain"], 0).least_work_us(Budget(cache=8)) == 0.0


def test_one_request_of_several():
    traces = [random_request(np.random.default_rng(i), GEOMETRY, request=i) for i in (3, 4)]
    one = OneRequest(MemoryTrace(GEOMETRY, traces), 4)
    assert one.requests == [4] and one.read(4) is traces[1] and one.output_tokens(4) > 0
    with pytest.raises(UsageError, match="no request 7: it has 3 to 4"):
        bounds_of(traces, COSTS["plain"], 7).compare({}, [Budget(cache=2)])


def test_several_requests_have_no_least_work():
    traces = [random_request(np.random.default_rng(i), GEOMETRY, request=i) for i in range(2)]
    rules = Rules(history=0, warmup=0)
    bounds = Bounds(MemoryTrace(GEOMETRY, traces), COSTS["plain"], rules, SIZE, {})
    with pytest.raises(UsageError, match="one request alone"):
        bounds.least_work_us(Budget(cache=2))
    (found,) = bounds.compare({}, [Budget(cache=2)])
    assert found.least_work_us is None
