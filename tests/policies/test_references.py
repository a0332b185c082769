"""Nothing resident, and everything resident."""

import pytest

from oled_sim.contenders import contenders
from oled_sim.engine.budget import Budget
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.full import Full
from oled_sim.policies.lru import LRU
from oled_sim.policies.no_cache import NoCache
from oled_sim.testing.by_hand import Run, request_by_hand
from oled_sim.testing.contract import PolicyContract

ONE = RoutingGeometry((1,), 8, 1)
TRACE = request_by_hand(ONE, [[[[0], [1]]], [[[0], [1]]], [[[0]]]])


class TestNoCache(PolicyContract):
    def make(self):
        return NoCache()

    def test_full_residency_is_never_worse_than_no_cache(self):
        """It holds nothing even where everything would fit."""
        full, empty = self.simulate(self.geometry.experts), self.simulate(0)
        assert full.summary.hit_rate == empty.summary.hit_rate == 0.0
        assert full.summary.tpot_us == pytest.approx(empty.summary.tpot_us)


class TestFull(PolicyContract):
    """The contract at the one budget that it takes."""

    cache = PolicyContract.geometry.experts

    def make(self):
        return Full()

    def run(self, cache=4, **settings):
        return super().run(max(cache, self.geometry.experts), **settings)

    def simulate(self, cache=4, policy=None, **rules):
        return super().simulate(max(cache, self.geometry.experts), policy, **rules)

    def until(self, passes, traces, **rules):
        run = Run(Full(), self.geometry, traces, 10, costs=self.costs(), batch=len(traces), **rules)
        return run.record.course.times[: run.record.course.pass_event[passes]].tolist()

    # Capacities cannot change where every layer holds all experts, and nothing can be forgotten.
    test_laws_hold_while_capacities_change = None  # type: ignore[assignment]
    test_cold_runs_forget_everything_but_history = None  # type: ignore[assignment]

    def test_full_residency_is_never_worse_than_no_cache(self):
        """Nothing but hits, and faster than any cache."""
        full, lru = self.simulate(), super().simulate(4, LRU())
        assert full.summary.hit_rate == 1.0 and full.summary.demand_per_pass == 0.0
        assert full.summary.tpot_us < lru.summary.tpot_us


@pytest.mark.parametrize("cache", [0, 1, 8])
def test_no_cache_keeps_nothing(cache):
    # Passes activate 2, 2 and 1 experts, and each is transferred again. The engine loads all
    # experts before a run in which they fit (cache 8): the first event hits both and drops all.
    run = Run(NoCache(), ONE, TRACE, cache)
    assert run.seen == [[[]], [[]], [[]]]
    assert run.count("demand") == ([0, 2, 1] if cache == 8 else [2, 2, 1])
    assert run.count("cpu_misses") == [0, 0, 0]


def test_full_holds_everything_or_says_what_it_takes():
    run = Run(Full(), ONE, TRACE, 8)
    assert run.seen == [[list(range(8))]] * 3
    assert (run.count("hits"), run.count("demand")) == ([2, 2, 1], [0, 0, 0])
    for scope in ("layer", "global"):
        with pytest.raises(UsageError, match="give a cache of 8"):
            Run(Full(), ONE, TRACE, 7, scope=scope)


def test_a_reference_is_run_once_with_its_own_budget():
    policies = {"full": Full(), "lru": LRU(), "none": NoCache()}
    found = contenders(policies, [Budget(cache=2), Budget(size_bytes=5)], experts=8)
    assert [(c.spec, c.budget.cache, c.budget.size_bytes) for c in found] == [
        ("lru", 2, None), ("lru", None, 5), ("full", 8, None), ("none", 0, None),
    ]  # fmt: skip
