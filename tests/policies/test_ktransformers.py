"""KTransformers' placements and lanes, on paper."""

import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from static_placement import Learned

from oled_sim.engine.laws import columns
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.ktransformers import KTransformers
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import Run, request_by_hand
from oled_sim.testing.traces import geometries, requests

TWO = RoutingGeometry((1, 2), 4, 1)

# Tokens: layer 1 has expert 2 three times, expert 0 twice, expert 3 once; layer 2 has expert 1
# twice, experts 0 and 3 once each.
HISTORY = request_by_hand(TWO, [[[[2], [0], [2]], [[1], [1], [3]]], [[[2], [0], [3]], [[0]]]])


def placed(placement, scope, cache=2, history=(HISTORY,), **parameters):
    policy = KTransformers(placement=placement, **parameters)
    return Learned(policy, TWO, history, cache, scope=scope).residents()


def test_uniform_takes_the_lowest_ids_of_every_layer():
    for scope in ("layer", "global"):
        assert placed("uniform", scope) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("scope", ["layer", "global"])
class TestOverAllLayers:
    def test_frequency_fills_one_budget_from_the_top(self, scope):
        # Of all: 2 (3 tokens) and 0 (2) of layer 1, 1 of layer 2 (2), and of those with one token
        # the one of the lower layer, 3.
        assert placed("frequency", scope) == [[0, 2, 3], [1]]
        # Three slots per layer are six: after those four come 0 and 3 of layer 2.
        assert placed("frequency", scope, cache=3) == [[0, 2, 3], [0, 1, 3]]

    def test_frequency_layer_gives_every_layer_its_share(self, scope):
        # In layer 2 experts 0 and 3 have one token each: the lower id.
        assert placed("frequency-layer", scope) == [[0, 2], [0, 1]]

    def test_frequency_without_history_is_uniform(self, scope):
        assert placed("frequency", scope, history=()) == placed("uniform", scope)

    def test_front_loading_fills_layer_after_layer(self, scope):
        # Three slots per layer: four experts of layer 1, two of layer 2.
        assert placed("front-loading", scope, cache=3) == [[0, 1, 2, 3], [0, 1]]

    def test_random_is_seeded_and_keeps_the_budget(self, scope):
        draws = [placed("random", scope, seed=seed) for seed in (42, 42, *range(8))]
        assert draws[0] == draws[1] and len({str(draw) for draw in draws}) > 2
        assert {sum(map(len, draw)) for draw in draws} == {4}
        assert any(len(draw[0]) != 2 for draw in draws)


def test_slots_follow_the_placement_and_come_back_with_it():
    # Front-loading leaves layer 2 without a slot; its misses go to the CPU, request by request.
    trace = request_by_hand(TWO, [[[[0], [2]], [[1]]]])
    run = Run(KTransformers(placement="front-loading"), TWO, trace, 2, cold=True)
    for _ in range(2):
        assert run.simulation.state.pools.capacity.tolist() == [4, 0]
        assert (run.count("hits"), run.count("cpu_misses")) == ([2, 0], [0, 1])
        run.again(trace)


def test_history_is_counted_once_and_nothing_after_it():
    learned = Learned(KTransformers(placement="frequency"), TWO, [HISTORY], 2)
    other = request_by_hand(TWO, [[[[1]] * 9, [[2]] * 9]], request=1)
    learned.run(other)
    learned.simulation.end_history()  # places anew, from history alone
    assert learned.residents() == [[0, 2, 3], [1]]


def test_misses_go_to_the_cpu_and_nothing_moves():
    # Residents 0 and 1. Layer 1 activates 0, 2, 3: two misses; layer 2 activates 1.
    trace = request_by_hand(TWO, [[[[0], [2], [3]], [[1]]]] * 2)
    run = Run(KTransformers(), TWO, trace, 2)
    assert run.seen == [[[0, 1], [0, 1]]] * 2
    assert run.count("hits") == [1, 1, 1, 1]
    assert run.count("cpu_misses") == [2, 0, 2, 0]
    assert run.count("demand") == [0, 0, 0, 0]


@settings(max_examples=examples(30))
@given(
    given=geometries().flatmap(lambda g: st.tuples(st.just(g), requests(g))),
    cache=st.integers(0, 12),
    spec=st.sampled_from(
        ["ktransformers", "ktransformers:gpu_prefill_tokens=2", "fiddler:cost=max"]
    ),
    scope=st.sampled_from(["layer", "global"]),
)
def test_static_residents_never_change(given, cache, spec, scope):
    geometry, trace = given
    run = Run(parse_policy(spec), geometry, trace, cache, scope=scope)
    first = list(range(min(cache, geometry.experts)))
    assert run.seen == [[first] * len(geometry.layers)] * trace.passes


def test_a_layer_lasts_as_long_as_its_slower_lane():
    # At the gate the CPU starts with the link and two experts, 20 + 2 · 250 = 520; the GPU has one
    # resident, 50 + 2 = 52, then the shared expert, 20. The merge takes 10.
    run = Run(KTransformers(), TWO, request_by_hand(TWO, [[[[0], [2], [3]], [[1]]]]), 2)
    gate, lanes, end = run.record.course.times[0, 1:4]
    assert lanes - gate == pytest.approx(520.0)
    assert end - lanes == pytest.approx(10.0)


def test_large_passes_run_on_the_gpu():
    # Two tokens or more: transferred, and forgotten. One token: the CPU.
    trace = request_by_hand(TWO, [[[[2], [3]], [[2]]], [[[2]], [[2]]]])
    run = Run(KTransformers(gpu_prefill_tokens=2), TWO, trace, 2)
    assert run.count("demand") == [2, 0, 0, 0]
    assert run.count("cpu_misses") == [0, 1, 1, 1]
    assert run.seen == [[[0, 1], [0, 1]]] * 2


def test_dynamic_update_takes_the_heaviest_of_the_pass():
    # Layer 1: 3 has two tokens, 2 one; residents 0 and 1 none: both leave. Layer 2: 2 has three
    # tokens, and of the idle 0 and 1 the lower id stays.
    trace = request_by_hand(TWO, [[[[3], [2], [3]], [[2], [2], [2]]], [[[0]], [[1]]]])
    run = Run(KTransformers(gpu_prefill_tokens=3, dynamic=True), TWO, trace, 2)
    assert run.seen == [[[2, 3], [0, 2]]] * 2
    assert columns(run.record)["cpu_misses"].tolist() == [0, 0, 1, 1]


def test_dynamic_update_keeps_idle_residents_rather_than_idle_others():
    # From history layer 1 holds 2 and 3. A large pass needs 3 alone: 2 stays, no other comes.
    history = request_by_hand(TWO, [[[[2], [3]], [[0], [1]]]])
    policy = KTransformers(placement="frequency", gpu_prefill_tokens=3, dynamic=True)
    learned = Learned(policy, TWO, [history], 2)
    learned.run(request_by_hand(TWO, [[[[3]] * 3, [[1]] * 3]], request=1))
    assert learned.residents() == [[2, 3], [0, 1]]


def test_mistakes_are_one_sentence():
    with pytest.raises(UsageError, match="does nothing without gpu_prefill_tokens"):
        KTransformers(dynamic=True)
    with pytest.raises(UsageError, match="gpu_prefill_tokens=-1"):
        KTransformers(gpu_prefill_tokens=-1)
