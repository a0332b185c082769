"""Batches in one compiled call give the same bytes as hooks called at every gate."""

from dataclasses import dataclass

import numpy as np
import pytest

from oled_sim.costs.lanes import load_costs
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.compiled import offers
from oled_sim.engine.jit import lean
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.runner import simulate
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import TraceSource
from oled_sim.engine.state import PASS_COUNTS
from oled_sim.engine.view import gate_of
from oled_sim.errors import PolicyError, ProfileError
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.policies._kernels import decide_fiddler, decide_lru, split_data
from oled_sim.policies.lru import LRU
from oled_sim.policy import Compiled
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.reader import bundled_traces, open_trace

GEOMETRY = RoutingGeometry((1, 2, 3), 12, 3)
COSTS = costs_by_hand(slowdown=1.37, gpu_per_token_us=0.3, cpu_per_token_us=7.1, h2d_gb_s=17.3)
POLICIES = [
    "lru", "lru:dispatch=load", "lfu", "lfu:count=tokens,dispatch=load", "lfu:reset=request",
    "oled", "oled:priority", "oled:priority+adapt,allocate_every=2", "oled:dispatch=load",
    "oled:psi=square,stale=last_priority", "oled:psi=sqrt,stale=id,allocate_every=1",
    "oled:psi=one,swaps=2,mean_tokens=3,slack=0.5",
    "fiddler", "fiddler:released", "fiddler:placement=layer,cpu_us=9",
    "hybrimoe", "hybrimoe:released,prefetch=2", "hybrimoe:admit=scored,a=0.3,top=3,prefetch=20",
    "hybrimoe:prefill=hybrid,block=gpu,initial=none",
    "moe-infinity", "moe-infinity:request", "moe-infinity:predict=prompt,match=all",
    "moe-infinity:match=observed,count=event,evict=prefetch-bug", "moe-infinity:demand",
    "finemoe", "finemoe:select=paper,evict=truncated,distance=1,store=offline",
]  # fmt: skip
RULES = {
    "alone": Rules(),
    "batch": Rules(batch=2, staging=3),
    "global": Rules(batch=2, scope="global"),
    "end": Rules(confidence="end", cold=True),
    "current": Rules(batch=2, confidence="current", staging=1),
}


class ThroughHooks(Simulation):
    """A simulation that takes no offer."""

    def _compiled(self):
        return None


def bytes_of(kind, spec, rules, cache, *, ragged):
    """Return all that a run measured and left, as bytes."""
    simulation = kind(parse_policy(spec), GEOMETRY, COSTS, Budget(cache=cache), rules)
    rng = np.random.default_rng([cache, ragged])
    signals = ("ids", "gates", "confidence", "token_state", *(("full_gate",) if cache % 2 else ()))
    found = []
    for i in range(0, 4, rules.batch):
        requests = tuple(range(i, i + rules.batch))
        traces = [
            random_request(
                rng, GEOMETRY, request=r, passes=11 + r, tokens=4, signals=signals,
                ragged=ragged and "oled" not in spec,
            )
            for r in requests
        ]  # fmt: skip
        batch = make_batch(traces, GEOMETRY, COSTS, rules.confidence)
        record = simulation.run_group(Group("counted", requests), batch)
        found += [np.ascontiguousarray(a).tobytes() for a in record.course]
    pools = simulation.state.pools
    return found + [np.ascontiguousarray(a).tobytes() for a in pools[:10]]


# Every policy under one set of rules, and every set of rules with one policy, quickly.
@pytest.mark.parametrize(
    ("spec", "rules"),
    [
        pytest.param(
            spec, rules, marks=[] if rules == "batch" or spec == "oled" else [pytest.mark.slow]
        )
        for spec in POLICIES
        for rules in RULES
    ],
)
def test_same_bytes_on_random_traces(spec, rules):
    for cache in (0, 2, 5, 12):
        for ragged in (False, True):
            through, compiled = (
                bytes_of(kind, spec, RULES[rules], cache, ragged=ragged)
                for kind in (ThroughHooks, Simulation)
            )
            assert compiled == through


@pytest.mark.parametrize("spec", POLICIES)
def test_every_built_in_offer_is_taken(spec, monkeypatch):
    def refuse(*_):
        raise AssertionError("a hook was called")

    simulation = Simulation(parse_policy(spec), GEOMETRY, COSTS, Budget(cache=4))
    monkeypatch.setattr(type(simulation.policy), "dispatch", refuse)
    trace = random_request(np.random.default_rng(0), GEOMETRY)
    simulation.run_group(Group("counted", (0,)), make_batch([trace], GEOMETRY, COSTS))


@pytest.mark.parametrize("spec", ["lru", "lru:dispatch=load", "lfu", "oled", "oled:priority"])
def test_same_results_on_a_bundled_trace(spec, monkeypatch):
    source = TraceSource(open_trace(bundled_traces()["nano-gsm8k"]))
    rules = Rules(requests=4, history=0)
    compiled = repr(simulate(source, parse_policy(spec), COSTS, 8, rules))  # NaN ≠ NaN
    monkeypatch.setattr(Simulation, "_compiled", ThroughHooks._compiled)
    assert repr(simulate(source, parse_policy(spec), COSTS, 8, rules)) == compiled


@dataclass
class Changed(LRU):
    """A subclass with a rule of its own."""

    def score(self, layer, event):
        return -np.arange(self.experts, dtype=float)


@lean
def scores_nan(own, gate, v, layer, resident, lanes, scores):
    lanes[:] = 2
    scores[:] = np.nan


@dataclass
class Wrong(LRU):
    """Offers a kernel that breaks the contract."""

    def compiled(self):
        return Compiled(scores_nan, ())


@lean
def ask_beyond(own, gate, v, layer, resident, wanted):
    wanted[0] = 0.0
    wanted[1, 0], wanted[1, 1], wanted[1, 2] = layer, resident.shape[1], 1.0
    return 2


@dataclass
class Astray(LRU):
    """Offers a kernel that asks for an expert that does not exist."""

    def prefetch(self, event):
        return ()

    def compiled(self):
        return Compiled(decide_lru, split_data(self._setting, "transfer"), False, ask_beyond)


@lean
def ask_nonsense(own, gate, v, layer, resident, wanted):
    return wanted.nonsense


@dataclass
class Nonsense(LRU):
    """Offers a kernel that numba cannot compile."""

    def prefetch(self, event):
        return ()

    def compiled(self):
        return Compiled(decide_lru, split_data(self._setting, "transfer"), False, ask_nonsense)


@dataclass
class Unspoken(LRU):
    """Prefetches, and offers no kernel that does."""

    def prefetch(self, event):
        return [(event.layer, e, 1.0) for e in range(self.experts)]

    def compiled(self):
        return Compiled(decide_lru, split_data(self._setting, "transfer"), False)


def test_prefetches_of_a_kernel_are_checked():
    simulation = Simulation(Astray(), GEOMETRY, COSTS, Budget(cache=3), name="astray")
    batch = make_batch([random_request(np.random.default_rng(1), GEOMETRY)], GEOMETRY, COSTS)
    with pytest.raises(PolicyError, match=r"'astray' at request 0, pass 0, layer 1: .* row 1$"):
        simulation.run_group(Group("counted", (0,)), batch)


def test_a_kernel_that_does_not_compile_is_the_policys_fault():
    simulation = Simulation(Nonsense(), GEOMETRY, COSTS, Budget(cache=3), name="nonsense")
    batch = make_batch([random_request(np.random.default_rng(1), GEOMETRY)], GEOMETRY, COSTS)
    with pytest.raises(PolicyError, match=r"'nonsense' at .*pass 0.* the kernel of compiled\(\)"):
        simulation.run_group(Group("counted", (0,)), batch)


def test_without_a_kernel_for_prefetches_hooks_are_asked():
    simulation = Simulation(Unspoken(), GEOMETRY, COSTS, Budget(cache=3), Rules(staging=3))
    batch = make_batch([random_request(np.random.default_rng(1), GEOMETRY)], GEOMETRY, COSTS)
    record = simulation.run_group(Group("counted", (0,)), batch)
    assert record.course.pass_counts[:, PASS_COUNTS.index("prefetched")].sum() > 0


def test_a_kernel_says_what_the_profile_lacks():
    tokens = 5000  # of one expert; the profile goes to 4096
    trace = random_request(np.random.default_rng(1), GEOMETRY, tokens=1)
    batch = make_batch([trace], GEOMETRY, COSTS)
    gate = gate_of(batch, {"ids"})
    many = gate._replace(tokens=np.full_like(gate.tokens, tokens))
    tables = load_costs(find_geometry("llada2.0-mini")).tables
    own = tables, 0.0, np.ones(3), np.zeros((3, 12)), False
    lanes, scores = np.zeros(int(gate.offset[1]), np.int64), np.zeros(12)
    decide_fiddler(own, gate, 0, 0, np.zeros(12, np.bool_), lanes, scores)
    with pytest.raises(ProfileError, match="no CPU time"):
        decide_fiddler(own, many, 0, 0, np.zeros(12, np.bool_), lanes, scores)


def test_a_subclass_inherits_no_offer():
    policy = Changed()
    policy.experts = 12
    assert not offers(policy)
    simulation = Simulation(Changed(), GEOMETRY, COSTS, Budget(cache=3))
    trace = random_request(np.random.default_rng(1), GEOMETRY)
    simulation.run_group(Group("counted", (0,)), make_batch([trace], GEOMETRY, COSTS))
    kept = np.nonzero(simulation.state.pools.resident)[1]
    assert kept.mean() < 4  # it keeps low ids


def test_answers_of_a_kernel_are_checked():
    simulation = Simulation(Wrong(), GEOMETRY, COSTS, Budget(cache=3), name="wrong")
    trace = random_request(np.random.default_rng(1), GEOMETRY)
    batch = make_batch([trace], GEOMETRY, COSTS)
    with pytest.raises(PolicyError, match=r"'wrong' at request 0, pass 0, layer 1: .* NaN"):
        simulation.run_group(Group("counted", (0,)), batch)
