"""Laws of a prefetch list, whatever the priorities, the slots and the residents."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.policies._candidates import (
    UNLISTED,
    Candidates,
    by_class,
    ranked,
    scores_at_arrival,
)
from oled_sim.policies._similarity import add_products

LAYERS, EXPERTS = 3, 6


def candidates(scope, protect, most, slots, resident):
    setting = SimpleNamespace(
        routing=SimpleNamespace(layers=range(LAYERS), experts=EXPERTS),
        scope=scope,
        capacity=np.full(LAYERS, slots),
        budget=LAYERS * slots,
        residents=lambda: resident.copy(),
    )
    return Candidates(setting, protect, most)  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 2**32 - 1),
    scope=st.sampled_from(["layer", "global"]),
    protect=st.sampled_from(["pool", "list"]),
    most=st.integers(0, 8),
    slots=st.integers(0, EXPERTS),
)
def test_laws_of_a_list(seed, scope, protect, most, slots):
    rng = np.random.default_rng(seed)
    priority = rng.integers(0, 4, (LAYERS, EXPERTS)).astype(np.float64)  # with ties
    priority[rng.random(priority.shape) < 0.3] = UNLISTED
    resident = np.zeros(priority.shape, np.bool_)
    for row in resident:
        row[rng.permutation(EXPERTS)[: rng.integers(0, slots + 1)]] = True
    executing = np.zeros_like(resident)
    executing[0, rng.permutation(EXPERTS)[:2]] = True
    found = candidates(scope, protect, most, slots, resident)
    entries = found.replace(priority, executing)
    wanted = np.zeros_like(resident)
    wanted[tuple(entries[:, :2].astype(int).T)] = True
    listed = priority > UNLISTED
    assert wanted.sum() == len(entries)  # nothing twice
    assert not (wanted & (resident | executing | ~listed)).any()
    assert not (wanted & ~found.protected).any()
    layer, expert = entries[:, :2].astype(int).T
    assert (entries[:, 2] == priority[layer, expert]).all()
    pools = [(wanted, found.protected, resident, executing, LAYERS * slots)]
    if scope == "layer":
        pools = [
            (wanted[x], found.protected[x], resident[x], executing[x], slots) for x in range(LAYERS)
        ]
    for new, spared, held, running, room in pools:
        if protect == "pool":
            assert spared.sum() <= room
        else:  # a slot for each, beside those that it may not take
            assert new.sum() <= max(0, room - ((held & spared) | running).sum())
    if most:
        assert found.protected.sum() <= most


@given(
    seed=st.integers(0, 2**32 - 1), slots=st.integers(0, EXPERTS), start=st.integers(0, LAYERS - 1)
)
def test_a_list_in_known_order_is_the_list_that_sorting_makes(seed, slots, start):
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 4, (LAYERS, EXPERTS)).astype(np.float64)  # with ties
    resident, executing = rng.random((2, *values.shape)) < 0.3
    priority = values.copy()
    priority[:start] = UNLISTED
    sorting = candidates("layer", "pool", 0, slots, resident)
    entries = sorting.replace(priority, executing)
    knowing = candidates("layer", "pool", 0, slots, resident)
    assert knowing.by_pool
    found = knowing.replace_ordered(ranked(values)[start:], start, executing)
    assert found[:, :2].tolist() == entries[:, :2].astype(int).tolist()
    assert (ranked(values)[found[:, 0], found[:, 2]] == found[:, 1]).all()
    assert (knowing.protected == sorting.protected).all()


def test_the_best_are_listed_and_ties_go_to_the_lower_id():
    resident = np.zeros((LAYERS, EXPERTS), np.bool_)
    priority = np.full((LAYERS, EXPERTS), UNLISTED)
    priority[0] = (1, 3, 2, 3, 2, 0)
    priority[1, 4] = 5
    found = candidates("layer", "pool", 0, 3, resident).replace(priority)
    assert found.tolist() == [[0, 1, 3], [0, 3, 3], [0, 2, 2], [1, 4, 5]]
    # One pool of nine holds them all, layer by layer behind the best.
    found = candidates("global", "pool", 0, 3, resident).replace(priority)
    assert [e[:2] for e in found.tolist()[:4]] == [[1, 4], [0, 1], [0, 3], [0, 2]]
    # Three of all.
    found = candidates("layer", "pool", 3, 3, resident).replace(priority)
    assert [e[:2] for e in found.tolist()] == [[0, 1], [0, 3], [1, 4]]
    # Equal priorities, the larger tie first.
    tie = np.zeros_like(priority)
    tie[0, 3] = 1.0
    found = candidates("layer", "pool", 0, 1, resident).replace(priority, None, tie)
    assert found.tolist() == [[0, 3, 3], [1, 4, 5]]


def test_classes_compare_before_values():
    values = np.array([[5.0, -3.0, 2.0, 5.0]])
    scores = by_class(np.array([[0, 2, 1, 1]]), values)[0]
    assert scores.argsort().tolist() == [0, 2, 3, 1]
    assert by_class(np.zeros((1, 0), int), np.zeros((1, 0))).shape == (1, 0)


def test_an_arrival_replaces_anybody_but_the_protected():
    resident, protected = np.array([True, True, False, False]), np.array([True, False, True, False])
    scores = scores_at_arrival(resident, protected, np.array([-1.0, 9.0, 5.0, -2.0]))
    assert scores.argsort().tolist() == [1, 3, 2, 0]
    assert scores_at_arrival(resident, protected, np.zeros(4)).tolist() == [2, 0, 1, 1]


@given(st.integers(0, 2**32 - 1), st.integers(1, 33))
def test_equal_rows_have_equal_products(seed, size):
    # Or ties between stored rows would be decided by their place in memory.
    rng = np.random.default_rng(seed)
    row, query = rng.random(7), rng.random(7)
    columns, products = np.repeat(row[:, None], size + 3, axis=1), np.zeros(size + 3)
    add_products(columns, query, size, products)
    assert len(set(products[:size].tolist())) == 1 and not products[size:].any()
    assert products[0] == pytest.approx(float(row @ query))
