"""HybriMoE's scores and schedule, on paper."""

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group
from oled_sim.engine.simulation import Simulation
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies._hybrid_schedule import RELEASED, Constants, line, measured, schedule
from oled_sim.policies.hybrimoe import HybriMoE
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import SIGNALS, Kind

ONE = RoutingGeometry((1,), 8, 1)
GPU, TRANSFER, CPU = 0, 1, 2
SLOW_CPU = {"cpu_per_expert_us": 1e6}


def sets(*events, geometry=ONE, prefill=False):
    kinds = [Kind.DENOISE] * len(events)
    if prefill:
        kinds[0] = Kind.PREFILL
    return request_by_hand(geometry, [[[[e] for e in event]] for event in events], kinds=kinds)


def lanes(hits, misses, constants=RELEASED, link_us=0.0):
    """Lanes of residents and misses with these tokens, in the order given."""
    tokens = np.array([*hits, *misses], np.int64)
    missed = np.arange(len(tokens)) >= len(hits)
    found = np.full(len(tokens), -1)
    schedule(constants, link_us, line(missed, tokens), missed, tokens, found)
    return found.tolist()


class TestSchedule:
    """Released constants, ms: 0.5 on the GPU, 0.418 a copy, n + 0.79 the first on the CPU."""

    def test_each_end_takes_its_own(self):
        # Line: hits of 2 and 1 tokens, misses of 3 and 1. The CPU would take the last by 1.79.
        # GPU: 0.5, 1.0, then the miss, copied by 0.418, at 1.5; the last would be done at 2.0.
        assert lanes([2, 1], [3, 1]) == [GPU, GPU, TRANSFER, CPU]

    def test_the_heaviest_miss_is_copied_first(self):
        # The line is sorted: the miss of one token is the last, wherever it comes in the event.
        assert lanes([1, 2], [1, 3]) == [GPU, GPU, CPU, TRANSFER]

    def test_the_cpu_may_take_a_resident(self):
        # Five residents of one token: GPU by 0.5, 1.0, 1.5; the fourth would be 2.0 against 1.79:
        # the CPU takes the fifth. Then 2.0 against 2.79: the GPU takes the fourth.
        assert lanes([1] * 5, []) == [GPU, GPU, GPU, GPU, CPU]

    def test_a_copy_is_waited_for(self):
        # Only misses. First: copied by 0.418, done by 0.918 against 1.79; second: 0.836 is before
        # 0.918, so 1.418; third: copied by 1.254, so 1.918 against 1.79: the last goes to the CPU.
        # 1.918 against 2.79 and so on: the GPU takes it.
        assert lanes([], [1, 1, 1, 1]) == [TRANSFER, TRANSFER, TRANSFER, CPU]

    def test_the_gpu_wins_a_tie(self):
        assert lanes([1], [], Constants(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)) == [GPU]

    def test_what_only_the_first_costs(self):
        # GPU: 3 more for the first: 4, 5, 6, 7 against 10 on the CPU. CPU: 10 with the first's 9:
        # GPU 4, 8, 12 against 10, then against 11: the CPU takes two.
        assert lanes([1] * 4, [], Constants(1.0, 3.0, 0.0, 10.0, 0.0, 0.0)) == [GPU] * 4
        found = lanes([1] * 4, [], Constants(4.0, 0.0, 0.0, 1.0, 0.0, 9.0))
        assert found == [GPU, GPU, CPU, CPU]

    def test_nothing_to_do(self):
        assert lanes([], []) == []

    @settings(max_examples=examples(100))
    @given(
        hits=st.lists(st.integers(1, 5), max_size=6),
        misses=st.lists(st.integers(1, 5), max_size=6),
    )
    def test_as_the_algorithm_is_described(self, hits, misses):
        # The reference's words, with lists: sort, then pop from either end.
        queue = sorted([(n, i) for i, n in enumerate(hits)], key=lambda x: -x[0])
        queue += sorted([(n, len(hits) + i) for i, n in enumerate(misses)], key=lambda x: -x[0])
        found, gpu, cpu, move = {}, 0.0, 0.0, 0.0
        idle = True
        while queue:
            is_miss = queue[0][1] >= len(hits)
            g = 500.0
            if is_miss and move + RELEASED.move > gpu:
                g += move + RELEASED.move - gpu
            c = 1000.0 * queue[-1][0] + (790.0 if idle else 0.0)
            if gpu + g <= cpu + c:
                gpu += g
                move += RELEASED.move * is_miss
                found[queue.pop(0)[1]] = TRANSFER if is_miss else GPU
            else:
                cpu, idle = cpu + c, False
                found[queue.pop()[1]] = CPU
        assert lanes(hits, misses) == [found[i] for i in range(len(found))]


def test_constants_come_from_the_profile():
    # 16 experts against one: 15 · 250 and 15 · 2 more. The first GPU expert takes 52.
    found = measured(costs_by_hand(), 150.0)
    assert found == pytest.approx((2.0, 50.0, 150.0, 250.0, 0.0, 0.0))
    # 20 per token: an expert of n tokens takes 100 + 20 n.
    costs = costs_by_hand(cpu_per_expert_us=100.0, cpu_per_token_us=20.0, cpu_fixed_us=30.0)
    assert measured(costs, 150.0) == pytest.approx((2.0, 50.0, 150.0, 100.0, 20.0, 30.0))


def test_a_layer_of_misses():
    # GPU: copied by 150, done by 202; the CPU would take the last by 20 + 250 = 270. Second:
    # copied by 300, done by 302 against 270: the CPU takes the last. 302 against 520, then the
    # third by 452 against 520: three are transferred.
    run = Run(HybriMoE(), ONE, sets([0, 1, 2, 3]), 0)
    assert (run.count("demand"), run.count("cpu_misses")) == ([3], [1])
    # A link that takes 500 makes the CPU's first 750; the GPU has done all by 602.
    slow = costs_by_hand(cpu_link_us=500.0)
    run = Run(HybriMoE(), ONE, sets([0, 1, 2, 3]), 0, costs=slow)
    assert (run.count("demand"), run.count("cpu_misses")) == ([4], [0])


class TestScores:
    """With a = 1/2, gate scores 1 and two scores per event; every miss is transferred."""

    def run(self, *events, cache, **parameters):
        policy = HybriMoE(initial="none", **parameters)
        return Run(policy, ONE, sets(*events), cache, costs=costs_by_hand(**SLOW_CPU))

    def test_scores_move_by_half(self):
        # s = 2/3, 1/3 | 2: 1 | 1: 1.  S0 = 1/3, 1/6, 1/12; S1 = 1/6, 1/12, 13/24; S2 = -, 1/2, 1/4.
        run = self.run([0, 0, 1], [2], [1], cache=2)
        scores = run.simulation.policy._s[0]
        assert scores[:3].tolist() == pytest.approx([1 / 12, 13 / 24, 1 / 4])
        assert run.seen == [[[0, 1]], [[0, 2]], [[1, 2]]]
        (note,) = run.simulation.policy.notes()
        assert note == "S follows top-k gates: the trace has no full_gate"

    def test_only_the_highest_enter(self):
        # Four tokens for 0, three for 1, one for 2, of eight. Two scores: 4/8 and 3/8, halved.
        run = self.run([0, 0, 0, 0, 1, 1, 1, 2], cache=8)
        assert run.simulation.policy._s[0][:3].tolist() == [0.25, 0.1875, 0.0]
        run = self.run([0, 0, 0, 0, 1, 1, 1, 2], cache=8, top=1)
        assert run.simulation.policy._s[0][:3].tolist() == [0.25, 0.0, 0.0]

    def test_the_first_token_alone(self):
        run = self.run([1, 0, 0], cache=8, tokens="first")
        assert run.simulation.policy._s[0][:2].tolist() == [0.0, 0.5]

    def test_the_last_arrival_stays_whatever_its_score(self):
        # 0 has three tokens, 1 one: the line copies 1 last, and it evicts the only resident, 0.
        assert self.run([0, 0, 0, 1], cache=1).seen == [[[1]]]
        assert self.run([0, 0, 0, 1], cache=1, admit="scored").seen == [[[0]]]

    def test_the_mean_full_gate_where_the_trace_has_it(self):
        geometry = RoutingGeometry((1, 3), 10, 2)
        rng = np.random.default_rng(0)
        trace = random_request(rng, geometry, passes=8, signals=SIGNALS)
        simulation = Simulation(HybriMoE(), geometry, costs_by_hand(), Budget(cache=3))
        batch = make_batch([trace], geometry, simulation.costs)
        simulation.run_group(Group("counted", (0,)), batch)
        expected = {0: [0.0] * 10, 1: [0.0] * 10}
        for v, row in enumerate(batch.full_gate):
            gate = row.astype(float).tolist()
            best = sorted(range(10), key=lambda e: (-gate[e], e))[:4]
            old = expected[v % 2]
            expected[v % 2] = [
                0.5 * s + (0.5 * gate[e] / sum(gate) if e in best else 0.0)
                for e, s in enumerate(old)
            ]
        for layer, scores in expected.items():
            assert simulation.policy._s[layer].tolist() == pytest.approx(scores)
        assert simulation.policy.notes() == ()


def test_prefill_runs_on_the_gpu_and_takes_free_slots_only():
    # Initially 0 and 1. Prefill transfers 4 and 5 and forgets them; so does a block with block=gpu.
    events = [4, 5], [6]
    assert Run(HybriMoE(), ONE, sets(*events, prefill=True), 2).seen[0] == [[0, 1]]
    run = Run(HybriMoE(block="gpu"), ONE, sets(*events, prefill=True), 2)
    assert run.seen == [[[0, 1]]] * 2 and run.count("demand") == [2, 1]
    # With free slots the arrivals of highest S stay: 4 has two tokens, 5 and 6 one.
    run = Run(HybriMoE(initial="none"), ONE, sets([5, 4, 4, 6], prefill=True), 1)
    assert run.seen == [[[4]]]
    # Scheduled like a block, prefill sends experts to the CPU.
    run = Run(HybriMoE(prefill="hybrid"), ONE, sets([4, 5, 6, 7], prefill=True), 0)
    assert run.count("cpu_misses") == [1]


def test_prefetch_asks_for_the_next_layers_highest_scores():
    two = RoutingGeometry((1, 2), 4, 1)
    # Layer 2: 2 has three tokens, 3 one: S = 3/8 and 1/8, and 3 comes last and is resident. In pass
    # 2 its gate comes after that of layer 1, where 2 is asked for: it arrives, takes the place of
    # 3 and is hit. Before, all S were 0 and the lowest id was asked for, in vain.
    events = [[[[0]], [[2], [2], [2], [3]]], [[[0]], [[2]]]]
    trace = request_by_hand(two, events, kinds=[Kind.DENOISE] * 2)
    parameters = {"initial": "none", "constants": "released"}
    run = Run(HybriMoE(prefetch_count=1, **parameters), two, trace, 1)
    assert run.seen[0][1] == [3] and run.seen[1][1] == [2]
    assert (run.count("hits"), run.count("useful")) == ([0, 0, 1, 1], [0, 0, 0, 1])
    assert Run(HybriMoE(**parameters), two, trace, 1).count("hits") == [0, 0, 1, 0]


def test_the_released_variant_and_mistakes():
    released = parse_policy("hybrimoe:released")
    assert (released.constants, released.tokens) == ("released", "first")
    for wrong in ({"a": 0.0}, {"a": 1.5}, {"top": -1}, {"prefetch_count": -1}):
        with pytest.raises(UsageError, match="is out of range"):
            HybriMoE(**wrong)


def test_in_one_pool_the_last_arrival_is_safe_in_its_own_event_alone():
    # Two slots for two layers. Layer 1 brings 0 (S = 1/3) and, last, 1 (S = 1/6). Then layer 2
    # brings 0, and 1 of layer 1 is no longer safe: it leaves. In the next pass layer 1 brings 2;
    # S of 0 is 1/6 there and 1/2 in layer 2.
    two = RoutingGeometry((1, 2), 4, 1)
    events = [[[[0], [0], [1]], [[0]]], [[[2]], [[0]]]]
    trace = request_by_hand(two, events, kinds=[Kind.DENOISE] * 2)
    costs = costs_by_hand(**SLOW_CPU)
    run = Run(HybriMoE(initial="none"), two, trace, 1, costs=costs, scope="global")
    assert run.seen == [[[0], [0]], [[2], [0]]]
    # In its own event it is safe: of 0, 1 and 2 (3, 2 and 1 tokens) 2 stays, with S = 0.
    events = [[[[0]] * 3 + [[1]] * 2 + [[2]], None]]
    trace = request_by_hand(two, events, kinds=[Kind.DENOISE])
    run = Run(HybriMoE(initial="none"), two, trace, 1, costs=costs, scope="global")
    assert run.seen == [[[0, 2], []]]
