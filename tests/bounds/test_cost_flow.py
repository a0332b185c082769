"""The least cost of misses against every way to keep experts, on instances small enough."""

from itertools import combinations

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.bounds.cost_flow import Uses, least_cost_us


def uses(events):
    """Return ``Uses`` of events given as {expert: CPU cost in µs}."""
    return Uses(
        np.concatenate([[0], np.cumsum([len(e) for e in events])]).astype(np.int64),
        np.array([expert for event in events for expert in event], np.int64),
        np.array([us for event in events for us in event.values()], np.float64),
    )


def cheapest(events, copy_us, limits):
    """Try every set that may be resident after every event."""
    costs = {frozenset(): 0.0}
    for event, limit in zip(events, limits, strict=True):
        after = {}
        for resident, spent in costs.items():
            reachable = resident | event.keys()
            for n in range(min(limit, len(reachable)) + 1):
                for kept in combinations(sorted(reachable), n):
                    total = spent + sum(
                        copy_us if e in kept else min(copy_us, us)
                        for e, us in event.items()
                        if e not in resident
                    )
                    key = frozenset(kept)
                    after[key] = min(after.get(key, np.inf), total)
        costs = after
    return min(costs.values())


def instances(experts=5):
    event = st.dictionaries(st.integers(0, experts - 1), st.integers(1, 30), min_size=1)
    return st.lists(event, min_size=1, max_size=7)


@settings(max_examples=examples(400), deadline=None)
@given(events=instances(), copy_us=st.integers(1, 20), slots=st.integers(0, 4))
def test_no_way_to_keep_experts_costs_less(events, copy_us, slots):
    found = least_cost_us(uses(events), float(copy_us), slots)
    assert found == cheapest(events, copy_us, [slots] * len(events))


@settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), events=instances(), copy_us=st.integers(1, 20))
def test_nor_with_slots_that_change(data, events, copy_us):
    limits = [data.draw(st.integers(0, 3)) for _ in events]
    assert least_cost_us(uses(events), float(copy_us), limits) == cheapest(events, copy_us, limits)


def test_on_paper():
    # A copy takes 10. Expert 0 costs the CPU 4 each time: three misses cost 12, to copy it once and
    # keep it 10. With expert 1 in between, which costs the CPU 9 at a time, the one slot is worth
    # more to 1: 10 once instead of 9 + 9, and 4 + 4 + 4 for expert 0 on the CPU.
    zero, one = {0: 4}, {1: 9}
    assert least_cost_us(uses([zero] * 3), 10.0, 1) == 10
    assert least_cost_us(uses([zero] * 2), 10.0, 1) == 8  # not worth a copy
    assert least_cost_us(uses([zero, one, zero, one, zero]), 10.0, 1) == 22
    assert least_cost_us(uses([zero, one, zero, one, zero]), 10.0, 2) == 20
    assert least_cost_us(uses([zero, one, zero, one, zero]), 10.0, 0) == 30


def test_a_hit_counts_once():
    # Keeping 0 over both gaps saves two misses, not four.
    assert least_cost_us(uses([{0: 10}, {0: 10}, {0: 10}]), 10.0, 3) == 10


@pytest.mark.parametrize("slots", [0, 3])
def test_no_use_costs_nothing(slots):
    assert least_cost_us(uses([{}]), 10.0, slots) == 0.0


def test_a_large_instance_agrees_with_belady_where_the_cpu_is_no_help():
    # If the CPU is never cheaper, every miss costs one copy, and the most hits cost least.
    rng = np.random.default_rng(5)
    events = [{int(e): 99.0 for e in rng.permutation(40)[:12]} for _ in range(150)]
    upcoming = [{e: j for j in range(len(events) - 1, i, -1) for e in events[j]}
                for i in range(len(events))]  # fmt: skip
    resident, misses = set(), 0
    for i, event in enumerate(events):
        misses += len(event.keys() - resident)
        near = sorted(resident | event.keys(), key=lambda e: upcoming[i].get(e, 999))
        resident = set(near[:15])
    assert least_cost_us(uses(events), 7.0, 15) == 7.0 * misses
