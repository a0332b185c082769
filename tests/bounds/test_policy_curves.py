"""One pass for all cache sizes against a run for each."""

from dataclasses import dataclass

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.analysis.reuse import reuse
from oled_sim.bounds.policy_curves import policy_curve
from oled_sim.costs.lanes import load_costs
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.source import MemoryTrace, TraceSource
from oled_sim.errors import PolicyError, UsageError
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.policies.lru import LRU
from oled_sim.policy import Lane, Policy, param
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace import open_trace

ONE = RoutingGeometry((1,), 6, 1)
COSTS = costs_by_hand()
ALL = Rules(history=0, warmup=0)


@dataclass
class Scored(Policy):
    """Scores drawn at random per event, with ties: some order that no capacity changes."""

    seed: int = param(0, "seed")
    stack = True

    def place(self, setting):
        self._shape = len(setting.routing.layers), self.experts
        self.clear()

    def clear(self):
        self._rng = np.random.default_rng(self.seed)

    def score(self, layer, event):
        return self._rng.integers(0, 3, self.experts)


def separately(source, policy, rules, costs=COSTS, step=1):
    """Run every cache size by itself; return hits of decode and of prefill passes."""
    experts = source.geometry.experts
    contenders = [Contender("p", policy, Budget(cache=c)) for c in range(0, experts + 1, step)]
    events = {c.budget.cache: np.zeros(2, np.int64) for c in contenders}

    def observe(contender, record):
        if record.group.split == "counted":
            course = record.course
            decode = course.decode[course.event_pass]
            hits = course.counts[:, 2]
            events[contender.budget.cache] += [hits[decode].sum(), hits[~decode].sum()]

    simulate_all(source, contenders, costs, rules, observe=observe)
    return np.array(list(events.values())).T.tolist()


def test_by_hand():
    # LRU. Pass 0 (prefill) {0, 1, 2} in that order, then {0}, {3, 2}, {1}. Lists, best first:
    # 2 1 0 | 0 2 1 | 2 3 0 1 | 1 2 3 0. Places at the gates: 0 at 3; 3 nowhere, 2 at 2; 1 at 4.
    trace = request_by_hand(ONE, [[[[0], [1], [2]]], [[[0]]], [[[3], [2]]], [[[1]]]])
    curve = policy_curve(MemoryTrace(ONE, [trace]), LRU(), COSTS, ALL)
    assert curve.hits.tolist() == [0, 0, 1, 2, 3, 3, 4]  # with 6 slots 3 is there from the start
    assert curve.activations == 4
    assert curve.prefill_hits.tolist() == [0, 0, 0, 0, 0, 0, 3]
    assert curve.prefill_activations == 3
    assert curve.hit_rate.tolist() == [0, 0, 0.25, 0.5, 0.75, 0.75, 1]
    assert curve.hit_rate_with_prefill[6] == 1


@st.composite
def traces(draw):
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    geometry = RoutingGeometry(
        tuple(range(1, layers + 1)), experts, draw(st.integers(1, min(3, experts)))
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ragged = draw(st.booleans())
    return MemoryTrace(
        geometry,
        [
            random_request(
                rng, geometry, request=i, passes=draw(st.integers(1, 6)),
                tokens=draw(st.integers(1, 4)), ragged=ragged,
            )
            for i in range(draw(st.integers(1, 4)))
        ],
    )  # fmt: skip


def rules_of(mode, **others):
    """Rules with a batch mode, or with cold starts where it is None."""
    return Rules(batch_mode=mode or "lockstep", cold=mode is None, warmup=None, history=0, **others)


rules = st.builds(
    rules_of,
    mode=st.sampled_from(["lockstep", "barrier", "refill", None]),
    scope=st.sampled_from(["layer", "global"]),
    batch=st.integers(1, 3),
    staging=st.sampled_from([1, 16]),
)
policies = st.one_of(
    st.sampled_from(
        [
            "lru",
            "lfu",
            "oled:priority",
            "oled:priority,stale=id",
            "lfu:reset=request",
            "lfu:count=tokens",
        ]
    ).map(parse_policy),
    st.builds(Scored, seed=st.integers(0, 99)),
)


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(traces(), policies, rules)
def test_every_cache_size_has_the_hits_of_a_run_of_its_own(source, policy, rules):
    curve = policy_curve(source, policy, COSTS, rules)
    assert [curve.hits.tolist(), curve.prefill_hits.tolist()] == separately(source, policy, rules)


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("spec", ["lru", "lfu"])
def test_on_a_bundled_trace(spec, scope):
    source, rules = TraceSource(open_trace("nano-gsm8k")), Rules(requests=5, scope=scope)
    costs, policy = load_costs(find_geometry("llada2.0-mini")), parse_policy(spec)
    curve = policy_curve(source, policy, costs, rules)
    step = 1 if scope == "layer" else 8
    found = [curve.hits[::step].tolist(), curve.prefill_hits[::step].tolist()]
    assert found == separately(source, policy, rules, costs, step)


def test_progress_goes_to_the_end():
    steps = []
    requests = [request_by_hand(ONE, [[[[0]]]], request=i) for i in range(3)]
    source = MemoryTrace(ONE, requests)
    policy_curve(source, LRU(), COSTS, ALL, progress=lambda *step: steps.append(step))
    assert steps == [(1, 3), (2, 3), (3, 3)]


def test_is_what_analyze_says_of_lru():
    trace = open_trace("nano-humaneval")
    source = TraceSource(trace, ("ids",))
    table = reuse((source.read(r) for r in trace.requests), trace.geometry)["lru_hits"]
    curve = policy_curve(source, LRU(), load_costs(find_geometry("llada2.0-mini")), ALL)
    wanted = table[table["phase"] != "prefill"].groupby("capacity")["hits"].sum()
    assert curve.hits[:-1].tolist() == wanted.tolist()[:-1]


@pytest.mark.parametrize(
    "spec", ["lru:dispatch=load", "oled", "ideal", "belady", "least-stale", "ktransformers"]
)
def test_others_are_refused(spec):
    source = MemoryTrace(ONE, [request_by_hand(ONE, [[[[0]]]])])
    with pytest.raises(UsageError, match=f"policy '{spec}' is no stack policy.*oled-sim sweep"):
        policy_curve(source, parse_policy(spec), COSTS, ALL, spec=spec)


def test_one_pool_of_different_sizes_is_refused():
    two = RoutingGeometry((1, 2), 6, 1)
    source = MemoryTrace(two, [request_by_hand(two, [[[[0]], [[0]]]])])
    sizes, shared = np.array([1000, 2000]), Rules(history=0, warmup=0, scope="global")
    with pytest.raises(UsageError, match="different size has no curve"):
        policy_curve(source, LRU(), COSTS, shared, expert_bytes=sizes)
    assert policy_curve(source, LRU(), COSTS, ALL, expert_bytes=sizes).activations == 0


class Claims(Policy):
    """Says it is a stack policy."""

    stack = True


class Places(Claims):
    def place(self, setting):
        return np.ones((1, self.experts), np.bool_)


class Bypasses(Claims):
    def score(self, layer, event):
        return np.full(self.experts, -np.inf)


class ComputesOnTheCPU(Claims):
    def dispatch(self, event):
        return np.where(event.experts > 0, Lane.TRANSFER, Lane.CPU)


class Raises(Claims):
    def score(self, layer, event):
        raise ValueError("no")


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        (Places, "starts with nothing resident"),
        (Bypasses, "request 0, pass 0, layer 1: a stack policy scores every expert with a finite"),
        (ComputesOnTheCPU, "request 0, pass 0, layer 1: a stack policy transfers every miss"),
        (Raises, r"request 0, pass 0, layer 1: score\(\) raised ValueError: no"),
    ],
)
def test_what_a_policy_only_claims_is_found_out(policy, words):
    source = MemoryTrace(ONE, [request_by_hand(ONE, [[[[0]]]])])
    with pytest.raises(PolicyError, match=words):
        policy_curve(source, policy(), COSTS, ALL, spec="claims")
