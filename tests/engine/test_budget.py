"""Budgets: sizes as users write them, and shares in whole slots."""

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.engine.budget import (
    Budget,
    apportion,
    parse_bytes,
    parse_capacities,
    uniform_capacity,
)
from oled_sim.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("800", 800),
        ("800k", 800_000),
        ("1.5G", 1_500_000_000),
        ("4000MiB", 4000 * 2**20),
        ("2 gib", 2 * 2**30),
        ("10kb", 10_000),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-5M", "12Q", "1e9", "4 0M"])
def test_what_is_no_size(text):
    with pytest.raises(UsageError, match="is not a size"):
        parse_bytes(text)


def test_negative_cache_is_refused():
    with pytest.raises(UsageError, match="-1 is impossible"):
        Budget(cache=-1)


def share(weights, total, lower=0, upper=100, unit=None):
    n = len(weights)
    return apportion(
        np.array(weights, float),
        np.full(n, lower),
        np.full(n, upper),
        np.ones(n, np.int64) if unit is None else np.array(unit),
        total,
    ).tolist()


def test_largest_remainder():
    # 10 · (3, 2, 1)/6 = (5, 3.33, 1.67): floors 5, 3, 1, and the last slot to the 0.67.
    assert share([3, 2, 1], 10) == [5, 3, 2]


def test_equal_remainders_go_to_the_lower_layer():
    # 4 / 3 each: floors 1, 1, 1, one slot left.
    assert share([1, 1, 1], 4) == [2, 1, 1]


def test_what_a_bound_cuts_off_is_shared_by_weight():
    # 12 · (8, 2, 1, 1)/12 = (8, 2, 1, 1), at most 6: 6 for the first, then
    # 6 · (2, 1, 1)/4 = 3, 1.5, 1.5.
    assert share([8, 2, 1, 1], 12, upper=6) == [6, 3, 2, 1]


def test_what_a_bound_adds_is_taken_by_weight():
    # 12 · (9, 3, 0)/12 = (9, 3, 0), at least 2: 2 for the last; 10 · (9, 3)/12 = 7.5, 2.5.
    assert share([9, 3, 0], 12, lower=2) == [8, 2, 2]


def test_unequal_sizes_stay_within_the_bytes():
    # Sizes 2 and 3, budget 10: equal slots 2 and 2 take 10.
    assert share([1, 1], 10, unit=[2, 3]) == [2, 2]
    # Budget 9: 1.8 each; floors 1 and 1 take 5; 4 left: one more of each does not fit (5), so
    # the first by remainder and order gets one (2 left), then another one.
    assert share([1, 1], 9, unit=[2, 3]) == [3, 1]


@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_shares_fit_and_are_complete(data):
    n = data.draw(st.integers(1, 6))
    weights = data.draw(st.lists(st.floats(0, 1e6), min_size=n, max_size=n))
    upper = data.draw(st.integers(1, 40))
    lower = data.draw(st.integers(0, upper))
    total = data.draw(st.integers(lower * n, upper * n))
    slots = share(weights, total, lower, upper)
    assert sum(slots) == total
    assert all(lower <= s <= upper for s in slots)
    # Monotone: where bounds leave room, a layer of more weight never gets a slot less.
    for a, b in ((i, j) for i in range(n) for j in range(n)):
        if weights[a] > weights[b]:
            assert slots[a] >= slots[b] - 1


def test_uniform_capacity_is_the_cache_size():
    size = np.array([6, 6, 6])
    assert uniform_capacity(Budget(cache=4).total_bytes(size), size, 10).tolist() == [4, 4, 4]
    assert uniform_capacity(Budget(cache=99).total_bytes(size), size, 10).tolist() == [10, 10, 10]
    assert uniform_capacity(Budget(size_bytes=32).total_bytes(size), size, 10).tolist() == [2, 2, 1]


@pytest.mark.parametrize("text", ["1000001", "99999999999999999999", "1:99999999999999999999:1"])
def test_more_slots_than_counters_hold_are_refused(text):
    with pytest.raises(UsageError, match="more than any cache"):
        parse_capacities(text)


def test_more_bytes_than_counters_hold_are_refused():
    with pytest.raises(UsageError, match="more than any cache"):
        parse_bytes("99999999999999999999999TB")
