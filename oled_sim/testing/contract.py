"""The contract every policy must keep, as a test class to derive from.

A third party's policy is tested like a built-in one::

    from oled_sim.testing.contract import PolicyContract

    class TestMine(PolicyContract):
        def make(self):
            return Mine(decay=0.5)
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import is_dataclass
from typing import Any

import numpy as np

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine import laws
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.runner import Result, simulate
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Policy, parameters
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import SIGNALS

GEOMETRY = RoutingGeometry((1, 2, 4), 10, 2)


class PolicyContract:
    """Derive from it, and say how to make the policy.

    Attributes:
        causal: whether the policy sees only what is known at the time.
    """

    causal = True

    def make(self) -> Policy:
        """Return a new policy with the parameters under test."""
        raise NotImplementedError

    def run(self, cache: int = 4, *, seed: int = 0, **rules: Any) -> list[GroupRecord]:
        """Run two batches of random requests and check every law; return what was measured."""
        settings = Rules(**{"batch": 2, **rules})
        simulation = Simulation(
            self.make(), GEOMETRY, self.costs(), Budget(cache=cache), settings, keep_log=True
        )
        records = []
        for split in ("history", "counted"):
            traces = self.requests(seed, split)
            batch = make_batch(traces, GEOMETRY, self.costs(), settings.confidence)
            group = Group(split, tuple(t.request for t in traces))
            records.append(simulation.run_group(group, batch))
            laws.check_all(records[-1], simulation.state, settings)
        return records

    def costs(self) -> LaneCosts:
        """Return lane costs in which no lane is always the slowest."""
        return costs_by_hand(slowdown=1.2, cpu_per_token_us=5.0, gpu_per_token_us=0.5)

    def requests(self, seed: int, split: str) -> list[Any]:
        """Return two random requests with every signal."""
        rng = np.random.default_rng([seed, len(split)])
        return [
            random_request(rng, GEOMETRY, request=i, passes=12, tokens=4, signals=SIGNALS)
            for i in range(2)
        ]

    def simulate(self, cache: int = 4, **rules: Any) -> Result:
        """Run the whole way that the command line takes."""
        rng = np.random.default_rng(3)
        traces = [
            random_request(rng, GEOMETRY, request=i, passes=10, tokens=4, signals=SIGNALS)
            for i in range(4)
        ]
        source = MemoryTrace(GEOMETRY, traces, SIGNALS)
        return simulate(source, self.make(), self.costs(), cache, Rules(**rules))

    def test_is_a_documented_dataclass(self) -> None:
        """A policy is a dataclass; its docstring and every parameter's help say what they mean."""
        policy = type(self.make())
        assert issubclass(policy, Policy) and is_dataclass(policy)
        assert policy.__doc__ and not policy.__doc__.startswith(f"{policy.__name__}(")
        assert all(field.metadata.get("help") for field in parameters(policy).values())
        assert policy.needs <= {*SIGNALS, "future"}

    def test_variants_name_known_parameters(self) -> None:
        """Every variant sets parameters that exist."""
        policy = type(self.make())
        known = set(parameters(policy))
        assert all(set(values) <= known for values in policy.variants.values())

    def test_can_be_copied_and_sent_to_another_process(self) -> None:
        """The engine copies policies, and sweeps pickle them."""
        policy = self.make()
        assert copy.deepcopy(policy).describe() == policy.describe()
        assert pickle.loads(pickle.dumps(policy)).describe() == policy.describe()

    def test_laws_hold_at_every_capacity(self) -> None:
        """From no slot to more slots than experts, fewer and more than an event activates."""
        for cache in (0, 1, 2, 5, 9, 10, 12):
            self.run(cache)

    def test_laws_hold_under_every_rule(self) -> None:
        """One pool, one staging slot, cold starts, every confidence mode, one request at a time."""
        cases: list[dict[str, Any]] = [
            {"scope": "global"},
            {"staging": 1},
            {"cold": True},
            {"confidence": "end"},
            {"confidence": "current"},
        ]
        for rules in cases:
            self.run(**rules)

    def test_same_input_same_bytes(self) -> None:
        """A run is a function of its inputs."""
        for first, second in zip(self.run(), self.run(), strict=True):
            assert first.course.counts.tobytes() == second.course.counts.tobytes()
            assert first.course.times.tobytes() == second.course.times.tobytes()

    def test_a_run_leaves_the_policy_as_it_was(self) -> None:
        """The engine works on a copy, so one policy serves many runs."""
        rng = np.random.default_rng(1)
        source = MemoryTrace(
            GEOMETRY,
            [random_request(rng, GEOMETRY, request=i, signals=SIGNALS) for i in range(3)],
            SIGNALS,
        )
        policy = self.make()
        first, second = (simulate(source, policy, self.costs(), 4).summary for _ in range(2))
        assert repr(first) == repr(second)  # NaN differs from itself

    def test_cold_runs_forget_everything_but_history(self) -> None:
        """Under --cold the same request costs the same whenever it comes."""
        simulation = Simulation(
            self.make(), GEOMETRY, self.costs(), Budget(cache=3), Rules(batch=2, cold=True)
        )
        traces = self.requests(7, "counted")
        batch = make_batch(traces, GEOMETRY, self.costs())
        group = Group("counted", (0, 1))
        first, second = (simulation.run_group(group, batch).course.counts for _ in range(2))
        assert first.tobytes() == second.tobytes()

    def test_results_say_whether_it_is_causal(self) -> None:
        """Results of a policy that sees the future are marked."""
        assert self.simulate().causal is self.causal
        assert self.simulate(confidence="current").causal is False

    def test_full_residency_is_never_worse_than_no_cache(self) -> None:
        """Everything resident is at least as fast as nothing resident."""
        full, empty = self.simulate(GEOMETRY.experts), self.simulate(0)
        assert full.summary.hit_rate == 1.0 and empty.summary.hit_rate == 0.0
        assert full.summary.tpot_us <= empty.summary.tpot_us
