"""Fiddler's rule, on paper."""

import itertools

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from static_placement import Learned

from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.fiddler import Fiddler, _balanced, _cheaper_on_cpu
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)


def event(*tokens):
    """One pass over one layer: as many tokens for experts 0, 1, … as given."""
    rows = [[e] for e, n in enumerate(tokens) for _ in range(n)]
    return request_by_hand(ONE, [[rows]])


def lanes(policy, *tokens, cache=0, **costs):
    """Numbers of hits, transfers and CPU misses of one event."""
    run = Run(policy, ONE, event(*tokens), cache, costs=costs_by_hand(**costs))
    return [run.count(c)[0] for c in ("hits", "demand", "cpu_misses")]


def test_released_constants_send_nine_tokens_to_the_cpu_and_ten_to_the_gpu():
    # 9 · 7 = 63 < 70; 10 · 7 = 70 is a tie, which the GPU gets.
    policy = parse_policy("fiddler:released")
    assert lanes(policy, 9, 1) == [0, 0, 2]
    assert lanes(policy, 10, 9, 11) == [0, 2, 1]


def test_costs_come_from_the_profile():
    # GPU: 150 to copy, 50 + 2 to compute: 202. CPU: 100 + 20 per token: five tokens are 200, six
    # are 220.
    costs = {"cpu_per_expert_us": 100.0, "cpu_per_token_us": 20.0}
    assert lanes(Fiddler(), 5, 6, **costs) == [0, 1, 1]
    assert lanes(Fiddler(gpu_us=230.0), 5, 6, **costs) == [0, 0, 2]
    assert lanes(Fiddler(cpu_us=41.0), 4, 5, **costs) == [0, 1, 1]  # 164 and 205


def test_residents_run_on_the_gpu_whatever_they_cost():
    assert lanes(parse_policy("fiddler:released"), 1, 1, 9, cache=2) == [2, 0, 1]


def test_the_sum_and_the_larger_sum_differ():
    # CPU 100 per token and GPU 150 each: 3, 2, 1, 1, 1 tokens. One by one only the three single
    # tokens are cheaper on the CPU. Balanced: with 0 on the GPU the CPU has 800; 1: 150, 500;
    # 2: 300, 300; 3: 450, 200. Two on the GPU are best here too.
    costs = {"cpu_per_expert_us": 0.0, "cpu_per_token_us": 100.0, "gpu_fixed_us": 0.0}
    assert lanes(Fiddler(cost="max", gpu_us=150.0), 3, 2, 1, 1, 1, **costs) == [0, 2, 3]
    # Seven experts of one token: one by one all go to the CPU, 700; balanced three are copied:
    # 2: 300, 500; 3: 450, 400; 4: 600, 300.
    assert lanes(Fiddler(gpu_us=150.0), 1, 1, 1, 1, 1, 1, 1, **costs) == [0, 0, 7]
    assert lanes(Fiddler(cost="max", gpu_us=150.0), 1, 1, 1, 1, 1, 1, 1, **costs) == [0, 3, 4]


def test_transfers_are_never_kept():
    # Nothing is popular yet: experts 0 and 1 stay whatever is copied.
    trace = request_by_hand(ONE, [[[[5]] * 3], [[[5]] * 3], [[[6]] * 3]])
    run = Run(Fiddler(cpu_us=1e6), ONE, trace, 2)
    assert run.seen == [[[0, 1]]] * 3
    assert run.count("demand") == [1, 1, 1]


def test_popularity_comes_from_history():
    geometry = RoutingGeometry((1, 2), 4, 1)
    # Layer 1: expert 3 four times, 1 twice. Layer 2: expert 2 three times, 0 once.
    history = request_by_hand(geometry, [[[[3]] * 4 + [[1]] * 2, [[2]] * 3 + [[0]]]])
    # One slot per layer, two in all: the four and the three tokens. Of four slots the third and
    # fourth go to the two tokens and the one. With four tokens for 1 layer 2 gets nothing.
    heavier = request_by_hand(geometry, [[[[3]] * 4 + [[1]] * 4, [[2]] * 3 + [[0]]]])
    for scope in ("layer", "global"):
        for past, cache, found in (
            (history, 1, [[3], [2]]), (history, 2, [[1, 3], [0, 2]]), (heavier, 1, [[1, 3], []]),
        ):  # fmt: skip
            learned = Learned(Fiddler(), geometry, [past], cache, scope=scope)
            assert learned.residents() == found
        each = Learned(Fiddler(placement="layer"), geometry, [heavier], 1, scope=scope)
        assert each.residents() == [[1], [2]]  # 1 and 3 are equal


def test_a_run_without_history_says_so():
    assert Fiddler().notes() == ("without history every layer holds the experts of lowest id",)
    geometry = RoutingGeometry((1, 2), 4, 1)
    history = request_by_hand(geometry, [[[[3]], [[2]]]])
    assert Learned(Fiddler(), geometry, [history], 1).simulation.policy.notes() == ()


COSTS = st.lists(st.integers(1, 30).map(float), max_size=7)


def sums(cpu_us, chosen, gpu_us):
    return float(sum(itertools.compress(cpu_us, chosen))), gpu_us * (len(cpu_us) - sum(chosen))


@settings(max_examples=examples(150))
@given(cpu_us=COSTS, gpu_us=st.integers(1, 30).map(float))
def test_both_rules_are_the_best_of_all_choices(cpu_us, gpu_us):
    every = list(itertools.product([False, True], repeat=len(cpu_us)))
    for rule, total in ((_cheaper_on_cpu, sum), (_balanced, max)):
        found = rule(np.array(cpu_us), gpu_us).tolist()
        best = min(total(sums(cpu_us, chosen, gpu_us)) for chosen in every)
        assert total(sums(cpu_us, found, gpu_us)) == best


def test_impossible_costs_are_refused():
    with pytest.raises(UsageError, match="cannot be negative"):
        Fiddler(cpu_us=-1.0)
