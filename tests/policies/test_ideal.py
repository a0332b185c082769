"""The ideal bound, on paper. Its optimality is tested in tests/engine/test_exhaustive.py."""

from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.ideal import Ideal
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((1, 2), 8, 1)


def test_activated_experts_are_resident_before_they_are_known():
    trace = request_by_hand(ONE, [[[[0], [1], [2]]], [[[5]]]])
    run = Run(Ideal(), ONE, trace, 2)
    # min(C, |A|) hits at every event, the first one too.
    assert run.count("hits") == [2, 1]


def test_heaviest_stay_and_the_rest_goes_where_it_is_faster():
    # Loads 0: 3, 1: 1, 2: 2 and one slot: 0 is the resident. Copies take 150, the CPU 20 + 250 n.
    # Both transferred: 300 + 52 = 352. Lightest on the CPU: max(270, 150 + 52) = 270. Both: 520.
    trace = request_by_hand(ONE, [[[[0], [1], [2], [0], [2], [0]]]])
    run = Run(Ideal(), ONE, trace, 1)
    assert [run.count(n) for n in ("hits", "demand", "cpu_misses", "cpu_hits")] == [
        [1],
        [1],
        [1],
        [0],
    ]
    gate, end = run.record.course.times[0, 1:3]
    assert end - gate == 270


def test_residents_go_to_the_cpu_where_that_is_faster():
    # The GPU takes 1000 per expert, the CPU 20 + 10 n: everything goes to the CPU, and what is
    # resident counts as a hit all the same.
    costs = costs_by_hand(gpu_per_expert_us=1000.0, cpu_per_expert_us=10.0)
    run = Run(Ideal(), ONE, request_by_hand(ONE, [[[[0], [1]]]]), 1, costs=costs)
    assert [run.count(n) for n in ("hits", "cpu_hits", "cpu_misses")] == [[1], [1], [1]]
    gate, end = run.record.course.times[0, 1:3]
    assert end - gate == 40


def test_no_slot_means_no_hit():
    run = Run(Ideal(), ONE, request_by_hand(ONE, [[[[0]]]]), 0)
    assert run.count("hits") == [0]


def test_one_pool_is_shared_equally():
    trace = request_by_hand(TWO, [[[[0], [1], [2]], [[0], [1], [2]]]])
    run = Run(Ideal(), TWO, trace, 2, scope="global")
    # Four slots in all, but two per layer.
    assert run.count("hits") == [2, 2]
