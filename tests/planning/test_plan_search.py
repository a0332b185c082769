"""The search over cache sizes, on curves that are known."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.engine.budget import Budget
from oled_sim.planning.search import gap, knee, search


def simulator(curves, asked=None):
    """Return a simulation whose TPOT is a function of the cache, the same ±10 % in two requests."""

    def simulate(policies, caches) -> Any:
        if asked is not None:
            asked.extend((p, c) for p in policies for c in caches)
        return [
            SimpleNamespace(
                spec=p,
                budget=Budget(cache=c),
                requests=[
                    SimpleNamespace(request=i, tpot_us=curves[p](c) * factor)
                    for i, factor in enumerate((0.9, 1.1))
                ],
            )
            for c in caches
            for p in policies
        ]

    return simulate


def find(curves, target_us, least=8, largest=100, **options):
    limits = {"least": least, "largest": largest}
    return search(simulator(curves), list(curves), target_us=target_us, **limits, **options)


def test_the_smallest_cache_is_found_between_grid_points():
    found = find({"slow": lambda c: 200 - c, "fast": lambda c: 157 - c}, 100.0)
    assert found.choice is not None
    assert (found.choice.policy, found.choice.cache) == ("fast", 57)
    slow = found.smallest_of("slow")
    assert slow is not None and slow.cache == 100


def test_of_equal_caches_the_faster_policy_wins():
    found = find({"a": lambda c: 90.0, "b": lambda c: 80.0}, 100.0)
    assert found.choice is not None and found.choice.policy == "b"


def test_a_target_out_of_reach_gives_the_best():
    found = find({"a": lambda c: 200 - c, "b": lambda c: 300 - c}, 50.0)
    assert found.choice is None
    assert (found.fastest.policy, found.fastest.cache) == ("a", 100)


def test_the_safe_side_holds_interval_and_margin_against_the_target():
    found = find({"a": lambda c: 200.0 - c}, 132.0, margins={"a": 1.2})
    assert found.choice is not None and found.choice.cache == 68
    # The interval ends at the slower request: 1.1 · (200 − c) · 1.2 ≤ 132 from c = 100 on.
    assert found.safe is not None and found.safe.cache == 100
    assert find({"a": lambda c: 200.0 - c}, 131.0, margins={"a": 1.2}).safe is None
    assert find({"a": lambda c: 200.0 - c}, 132.0).safe is None  # nothing is known


@given(st.lists(st.integers(1, 50), min_size=100, max_size=100), st.integers(0, 5000))
def test_a_falling_curve_is_searched_exactly(steps, target):
    times = {8: 5000.0}
    for cache in range(9, 101):
        times[cache] = times[cache - 1] - steps[cache - 9]
    found = find({"a": times.__getitem__}, float(target))
    exact = min((c for c, t in times.items() if t <= target + 1e-6), default=None)
    assert (found.choice and found.choice.cache) == exact


def test_nothing_is_simulated_twice():
    asked: list[Any] = []
    curves = {"a": lambda c: 200 - c}
    search(simulator(curves, asked), ["a"], least=8, largest=100, target_us=120.0)
    assert len(set(asked)) == len(asked)


def test_gap():
    assert gap([(8, 3.0), (12, 1.0)], 2.0) == [9, 10, 11]
    assert gap([(8, 1.0), (12, 1.0)], 2.0) == []
    assert gap([(8, 3.0), (12, 3.0)], 2.0) == []


def test_knee_of_a_bent_line():
    assert knee([0, 1, 2, 3, 4], [10, 2, 1, 0.5, 0]) == 1


@pytest.mark.parametrize("y", [[4, 3, 2, 1], [1, 2, 3, 4], [2, 2, 2, 2], [0, 1.9, 1, 0]])
def test_a_straight_or_rising_line_has_no_knee(y):
    assert knee([0, 1, 2, 3], cast(Any, y)) is None
