"""Who is resident after each event, worked out on paper."""

from dataclasses import dataclass

import numpy as np
import pytest

from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.state import N_HITS, N_POOL_BYTES
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Policy, param
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((1, 2), 8, 1)


@dataclass
class Fixed(Policy):
    """The same scores at every event; capacities as told, once."""

    scores: tuple = param((0.0,) * 8, "value per expert")
    capacities: tuple = param((), "slots per layer after the first decode pass")

    def score(self, layer, event):
        return np.array(self.scores)

    @property
    def allocation_period(self):
        return 1 if self.capacities else 0

    def allocate(self, history):
        return np.array(self.capacities, float)


def sets(*events):
    """A trace of one layer whose events activate the given experts, one row each."""
    return request_by_hand(ONE, [[[[e] for e in event]] for event in events])


def history(trace, cache, policy=None, geometry=ONE, **rules):
    """Return a run and who is resident after each pass, per layer."""
    run = Run(policy or Policy(), geometry, trace, cache, **rules)
    return run, run.seen


def test_least_recently_used_leaves():
    run, seen = history(sets([0, 1], [2], [0], [1]), 2)
    assert seen == [
        [[0, 1]],  # two misses fill two slots; 1 was used after 0
        [[1, 2]],  # 2 misses: 0 is the oldest and leaves
        [[0, 2]],  # 0 misses: 1 leaves
        [[0, 1]],  # 1 misses: 2 leaves
    ]
    assert run.count("hits") == [0, 0, 0, 0]


def test_an_event_is_one_set_not_a_sequence():
    # As a sequence with C = 2 the second event would miss three times: 0 evicts 1, 1 evicts 2, ...
    # As a set it finds {1, 2} at the gate: two hits.
    run, seen = history(sets([0, 1, 2], [0, 1, 2]), 2)
    assert run.count("hits") == [0, 2]
    assert seen == [[[1, 2]], [[1, 2]]]


def test_more_activated_experts_than_slots_keeps_those_used_last():
    _, seen = history(sets([5, 3, 4, 1]), 2)
    assert seen == [[[1, 4]]]


def test_an_expert_counts_at_its_last_row():
    # 0 appears in the first and the last row, so 1 and 2 are older than 0: order 1, 2, 0.
    _, seen = history(sets([0, 1, 2, 0]), 2)
    assert seen == [[[0, 2]]]


def test_recency_inside_a_row_follows_its_slots():
    geometry = RoutingGeometry((1,), 8, 2)
    trace = request_by_hand(geometry, [[[[4, 3], [2, 4]]]])
    # Slots in order: 4, 3, 2, 4. Last uses: 3, 2, 4.
    _, seen = history(trace, 2, geometry=geometry)
    assert seen == [[[2, 4]]]


def test_score_comes_before_recency_and_recency_before_id():
    scores = (1.0, 1.0, 2.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    run, seen = history(sets([2, 0, 1], [3]), 2, Fixed(scores))
    # 2 has the highest score; of 0 and 1, equal in score, 1 was used last. Then 3 misses: it
    # equals 1 in score and is more recent.
    assert seen == [[[1, 2]], [[2, 3]]]
    assert run.count("kept") == [2, 1]


def test_minus_infinity_is_never_kept():
    scores = (-np.inf, 0.0, *(0.0,) * 6)
    _, seen = history(sets([0, 1], [0]), 4, Fixed(scores))
    assert seen == [[[1]], [[1]]]


def test_low_score_bypasses_the_cache():
    # 1 scores below 0, which therefore stays; 1 is transferred, computed and dropped.
    run, seen = history(sets([0], [1], [1]), 1, Fixed((1.0, 0.0, *(0.0,) * 6)))
    assert seen == [[[0]], [[0]], [[0]]]
    assert run.count("demand") == [1, 1, 1]


def test_shrinking_layer_drops_its_lowest_then_the_other_grows():
    # C = 2: both layers start with two slots. After the first decode pass, layer 0 gets 1 and
    # layer 1 gets 3 (clipped to no more than E = 8, no less than min(k, C) = 1).
    trace = request_by_hand(
        TWO, [[[[0], [1]], [[0], [1]]], [[[1]], [[2]]], [[[1]], [[3]]], [[[1]], [[4]]]]
    )
    scores = (5.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    run, seen = history(trace, 2, Fixed(scores, (1.0, 3.0)), TWO)
    assert seen == [
        [[0, 1], [0, 1]],
        # Layer 1 keeps 0 (score 5) and the more recent 2. The pass ends; layer 0 drops 1.
        [[0], [0, 2]],
        # In layer 0, 1 misses again; 0 has the higher score and stays alone.
        [[0], [0, 2, 3]],
        [[0], [0, 3, 4]],
    ]
    assert run.count("capacity") == [2, 2, 2, 2, 1, 3, 1, 3]


def test_one_pool_for_all_layers_evicts_the_oldest_of_any():
    trace = request_by_hand(TWO, [[[[0], [1]], [[5]]], [[[2]], [[5]]]])
    # C = 1: two slots in all. Layer 0 fills both. Layer 1's 5 evicts 0 of layer 0. In the second
    # pass layer 0's 2 evicts 1 of layer 0, and 5 is a hit.
    run, seen = history(trace, 1, geometry=TWO, scope="global")
    assert seen == [[[1], [5]], [[2], [5]]]
    assert run.count("hits") == [0, 0, 0, 1]


def test_one_pool_in_bytes_with_experts_of_different_size():
    # Experts of layer 0 take 1 MiB, those of layer 1 take 3 MiB; the pool holds 4 MiB.
    costs, rules = costs_by_hand(), Rules(scope="global")
    size = np.array([1 << 20, 3 << 20])
    simulation = Simulation(
        Policy(), TWO, costs, Budget(size_bytes=4 << 20), rules, expert_bytes=size
    )
    trace = request_by_hand(TWO, [[[[0], [1]], [[5]]], [[[0]], [[5]]]])
    batch = make_batch([trace], TWO, costs)
    record = simulation.run_group(Group("counted", (0,)), batch)
    # 0 and 1 of layer 0 (2 MiB), then 5 of layer 1: 5 MiB are too many, the oldest (0) leaves.
    # Then 0 misses and evicts 1, and 5 hits.
    assert record.course.counts[:, N_HITS].tolist() == [0, 0, 0, 1]
    assert record.course.counts[:, N_POOL_BYTES].tolist() == [2 << 20, 4 << 20, 4 << 20, 4 << 20]
    assert np.argwhere(simulation.state.pools.resident).tolist() == [[0, 0], [1, 5]]


def test_reuse_of_transfers_is_seen_at_the_next_event_of_the_layer():
    run, _ = history(sets([0, 1, 2], [1, 2], [3]), 2)
    # Event 0 transfers three experts, 1 and 2 are kept and used next: 2 of 3. Event 1 transfers
    # none. Event 2 has no next event.
    assert run.count("followed") == [3, 0, 0]
    assert run.count("reused") == [2, 0, 0]


def test_ragged_trace_runs_the_layers_that_are_there():
    trace = request_by_hand(TWO, [[[[0]], [[1]]], [None, [[1]]], [[[0]], None]])
    run = Run(Policy(), TWO, trace, 2)
    assert run.count("hits") == [0, 0, 1, 1]
    assert run.record.course.event_layer.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize("cache", [8, 9, 20])
def test_capacity_of_all_experts_is_full_residency(cache):
    run = Run(Policy(), ONE, sets([0, 1], [2]), cache)
    assert run.count("hits") == [2, 1]
    assert run.simulation.initial_residents == 8
    assert run.count("capacity") == [8, 8]
