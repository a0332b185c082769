"""Least-Stale, on paper."""

from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.least_stale import LeastStale
from oled_sim.policies.lru import LRU
from oled_sim.testing.by_hand import Run, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((1, 2), 8, 1)


def seen(policy, *events, cache=2):
    trace = request_by_hand(ONE, [[[[e] for e in event]] for event in events])
    return [layers[0] for layers in Run(policy, ONE, trace, cache).seen]


def test_first_in_first_out_among_the_stale():
    # 0 comes in first, then 1; then 0 and 2 are touched, and 1 leaves. 3 comes: of 0 (in since the
    # first pass) and 2 (since the third) 0 leaves, though it was used last.
    events = [0], [1], [2, 0], [3]
    assert seen(LeastStale(), *events) == [[0], [0, 1], [0, 2], [2, 3]]
    assert seen(LeastStale(order="lru"), *events)[-1] == [0, 3] == seen(LRU(), *events)[-1]


def test_who_is_touched_stays_however_long_ago_it_came_in():
    # 0 is in since pass 1, 1 since pass 3. Pass 4 needs 0 and brings 2: 1 is stale and leaves.
    assert seen(LeastStale(), [0], [0], [1], [0, 2])[-1] == [0, 2]


def test_two_classes_or_one_per_pass():
    # 0 is in since pass 1 and touched in pass 3; 1 is in and touched since pass 2. When 2 comes
    # both are stale and 0 was in first; by age 1 is staler.
    events = [0], [1], [0], [2]
    assert seen(LeastStale(), *events)[-1] == [1, 2]
    assert seen(LeastStale(stale="age"), *events)[-1] == [0, 2]


def test_the_oldest_of_too_many_touched_leaves():
    assert seen(LeastStale(), [0], [0, 1], cache=1) == [[0], [1]]


def test_coming_back_is_coming_in_anew():
    # 0 leaves when 1 and 2 are there, and comes back in pass 4, when 1 leaves. In pass 5 of 2 (in
    # since 3) and 0 (since 4) the former leaves.
    assert seen(LeastStale(), [0], [1], [2], [0], [3])[2:] == [[1, 2], [0, 2], [0, 3]]


def test_in_one_pool_later_layers_are_stale():
    # Two slots for two layers. Pass 1 brings 0 of both. Pass 2: 1 of layer 1 comes; both residents
    # are stale and in since pass 1, and layer 1's was used first: it leaves. Pass 3: 2 of layer 1;
    # layer 2's 0 was in first and leaves, though its layer comes next; there it comes back, and
    # 1 of layer 1 leaves, since 2 is touched by this pass.
    trace = request_by_hand(TWO, [[[[0]], [[0]]], [[[1]], [[0]]], [[[2]], [[0]]]])
    run = Run(LeastStale(), TWO, trace, 1, scope="global")
    assert run.seen == [[[0], [0]], [[1], [0]], [[2], [0]]]
    assert run.count("hits") == [0, 0, 0, 1, 0, 0]
    # LRU drops 1 of layer 1 instead, and hits.
    assert Run(LRU(), TWO, trace, 1, scope="global").count("hits") == [0, 0, 0, 1, 0, 1]
