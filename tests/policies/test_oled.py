"""OLED's rules, on paper."""

import numpy as np
import pytest

from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies._cooperative import priorities, room_for_misses, split_cooperatively
from oled_sim.policies.oled import OLED
from oled_sim.policy import LayerHistory
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)
TWO_PER_TOKEN = RoutingGeometry((1,), 8, 2)
PRIORITY = {"allocate_by": "uniform", "dispatch_by": "transfer"}


def test_priority_by_hand():
    # Token 0 (confidence 0.5) routes to 3 and 1 with gates 0.75 and 0.25, token 1 (confidence 1)
    # to 1 and 2 with 0.5 each. Sums: 3: 0.375, 1: 0.125 + 0.5 = 0.625, 2: 0.5; together 1.5.
    p = priorities(
        np.array([[3, 1], [1, 2]], np.uint8),
        np.array([[0.75, 0.25], [0.5, 0.5]], np.float32),
        np.array([0.5, 1.0]),
        5,
    )
    assert p.tolist() == [0.0, 0.625 / 1.5, 0.5 / 1.5, 0.375 / 1.5, 0.0]


def test_no_confidence_at_all_is_no_priority():
    routes, gates = np.array([[1]], np.uint8), np.ones((1, 1), np.float32)
    assert priorities(routes, gates, np.zeros(1), 3).tolist() == [0.0, 0.0, 0.0]


def priority_run(events, confidence, cache=2, **parameters):
    trace = request_by_hand(ONE, [[[[e] for e in es]] for es in events], confidence=confidence)
    policy = OLED(**(PRIORITY | parameters))
    return Run(policy, ONE, trace, cache, confidence="current").seen


def test_confident_tokens_keep_their_experts():
    # One gate of 1 per token: priorities are confidences, 0.9, 0.1, 0.5 over 1.5. 0 and 2 stay,
    # although 1 was used after 0.
    assert priority_run([[0, 1, 2]], [[0.9, 0.1, 0.5]]) == [[[0, 2]]]
    # ψ = one ignores confidence: equal priorities, the most recent two stay.
    assert priority_run([[0, 1, 2]], [[0.9, 0.1, 0.5]], psi="one") == [[[1, 2]]]


def test_stale_residents_have_priority_zero_and_leave_first():
    # 0 and 1 are resident; then 2 is activated with a confidence of 0.01: still above 0, and of
    # the stale ones the most recent, 1, stays.
    assert priority_run([[0, 1], [2]], [[0.9, 0.8], [0.01]]) == [[[0, 1]], [[1, 2]]]


def test_order_among_stale_residents():
    events, confidence = [[0, 1], [2]], [[0.9, 0.8], [0.5]]
    kept = {
        # Used last: 1. Last priority: 0 (0.9 > 0.8). Lowest id: 0.
        "recency": [1, 2],
        "last_priority": [0, 2],
        "id": [0, 2],
    }
    for stale, residents in kept.items():
        assert priority_run(events, confidence, stale=stale)[-1] == [residents]
    # With the confidences swapped the last priority of 1 is the higher one.
    swapped = [[0.8, 0.9], [0.5]]
    assert priority_run(events, swapped, stale="last_priority")[-1] == [[1, 2]]


class TestAllocation:
    def history(self, ratio, utilization):
        capacity = np.array([4, 4, 4])
        return LayerHistory(np.array(ratio), np.array(utilization), capacity, 12)

    def policy(self, **parameters):
        policy = OLED(**parameters)
        Run(policy, ONE, request_by_hand(ONE, [[[[0]]]]), 2)  # a run gives a copy its state
        policy._ratio = policy._utilization = np.full(3, np.nan)
        return policy

    def test_proportional_to_demand_times_utilization(self):
        # w = 0.5 · 1, 0.25 · 1, 0.5 · 0.5: shares 12 · (2, 1, 1) / 4.
        history = self.history([0.5, 0.25, 0.5], [1.0, 1.0, 0.5])
        assert self.policy().allocate(history).tolist() == [6.0, 3.0, 3.0]

    def test_smoothing(self):
        policy = self.policy()
        policy.allocate(self.history([0.5, 0.5, 0.5], [1.0, 1.0, 1.0]))
        # a: 0.5 · (1, 0.5, 0) + 0.25 = 0.75, 0.5, 0.25; u stays 1. 12 · (3, 2, 1) / 6.
        found = policy.allocate(self.history([1.0, 0.5, 0.0], [1.0, 1.0, 1.0]))
        assert found.tolist() == [6.0, 4.0, 2.0]

    def test_layer_without_an_event_keeps_its_values(self):
        policy, nan = self.policy(), float("nan")
        policy.allocate(self.history([0.5, 0.5, 0.5], [1.0, 1.0, 1.0]))
        found = policy.allocate(self.history([0.5, 0.5, nan], [1.0, 1.0, nan]))
        assert found.tolist() == [4.0, 4.0, 4.0]

    def test_no_weight_leaves_capacities_alone(self):
        assert self.policy().allocate(self.history([0.5] * 3, [0.0] * 3)) is None

    def test_every_fifth_decode_pass(self):
        # Two layers of 8 experts, C = 2, k = 1. Layer 0 activates 4 experts with 2 resident, layer
        # 1 activates one, resident after the prefill. Window of five decode passes, layer 0 first:
        # a = 4/8 and 1/8; u = 2/2 (LRU-like, the last two of four hit) and 1/2. Shares of 4 slots:
        # w = 0.5 and 0.0625: 3.56 and 0.44, the second lifted to min(k, C) = 1: 3 and 1.
        geometry = RoutingGeometry((1, 2), 8, 1)
        layers = [[[0], [1], [2], [3]], [[5]]]
        trace = request_by_hand(geometry, [layers] * 7)
        run = Run(OLED(dispatch_by="transfer"), geometry, trace, 2)
        assert run.count("capacity")[::2] == [2] * 6 + [3]
        assert run.count("capacity")[1::2] == [2] * 6 + [1]


class TestCooperativeDispatch:
    """Copies take 150, CPU experts 250 each plus 20: t = 250, ρ = 250 / 400 = 0.625."""

    def split(self, tokens, priority, costs=None, **parameters):
        costs = costs or costs_by_hand()
        trace = request_by_hand(ONE, [[[[0]]]])
        timer = Run(_Asking(), ONE, trace, 0, costs=costs).simulation.policy.timer
        lanes = np.ones(len(tokens), np.int64)
        options = {"mean_tokens": 0.0, "reuse_weight": 1.0, "swaps": 8, "slack": 0.1} | parameters
        split_cooperatively(
            timer.lanes, timer.queue, timer.tables, 0, 4,
            np.array(tokens), np.array(priority), lanes, room_for_misses(8), *options.values(),
        )  # fmt: skip
        return lanes.tolist()

    def test_baseline_transfers_the_highest_priorities(self):
        # ρ|M| = 0.625 · 4 = 2.5, rounded half up: 3. Without swaps the lowest priority goes.
        assert self.split([1] * 4, [0.4, 0.1, 0.3, 0.2], swaps=0) == [1, 2, 1, 1]

    def test_all_on_one_side_where_the_other_is_hopeless(self):
        slow_cpu = costs_by_hand(cpu_per_expert_us=1e6)
        assert self.split([1, 1], [0.5, 0.5], slow_cpu) == [1, 1]
        slow_link = costs_by_hand(h2d_gb_s=0.01)
        assert self.split([1, 1], [0.5, 0.5], slow_link) == [2, 2]

    def test_heavy_expert_is_exchanged_for_a_light_one_if_that_pays(self):
        # CPU: 200 per token. |M| = 2, loads 1 and 5, n̄ = 3: t = 600, ρ = 0.8, ρ|M| = 1.6: 2
        # transfers, at least ceil(1.44) = 2: nothing may move to the CPU. With slack 0.5 one may:
        # |G| from ceil(0.8) = 1 on.
        costs = costs_by_hand(cpu_per_expert_us=0.0, cpu_per_token_us=200.0)
        assert self.split([1, 5], [0.5, 0.5], costs) == [1, 1]
        # All transferred: 300 + 52 = 352. The first (load 1) on the CPU: CPU 220, GPU 150 + 52:
        # T = 220; saves 132, costs λ p = 150 · 2 · 0.5 = 150. Not worth it.
        assert self.split([1, 5], [0.5, 0.5], costs, slack=0.5) == [1, 1]
        # With half the weight on reuse it is.
        assert self.split([1, 5], [0.5, 0.5], costs, slack=0.5, reuse_weight=0.5) == [2, 1]

    def test_exchange_of_lowest_priority_for_highest_load(self):
        # CPU 100 + 50 per token. |M| = 2, loads 1 and 5, n̄ = 3: t = 250, ρ = 0.625, ρ|M| = 1.25:
        # 1 transfer, the first by priority. Then the CPU has 20 + 350 = 370; exchanged, 20 + 150
        # = 170, and the GPU lane ends at 150 + 52 = 202. It saves 168 and costs
        # λ Δp = 150 · 2 · 0.2 = 60.
        costs = costs_by_hand(cpu_per_expert_us=100.0, cpu_per_token_us=50.0)
        assert self.split([1, 5], [0.6, 0.4], costs) == [2, 1]
        assert self.split([1, 5], [0.6, 0.4], costs, swaps=0) == [1, 2]
        # A Δp of 0.8 costs 240: no exchange.
        assert self.split([1, 5], [0.9, 0.1], costs) == [1, 2]

    def test_mean_tokens_given(self):
        # CPU 50 per token only. n̄ = 1: t = 50, ρ = 0.25: 1 of 4. n̄ = 9: t = 450, ρ = 0.75: 3.
        costs = costs_by_hand(cpu_per_expert_us=0.0, cpu_per_token_us=50.0)
        p = [0.4, 0.3, 0.2, 0.1]
        assert self.split([2] * 4, p, costs, mean_tokens=1.0, swaps=0) == [1, 2, 2, 2]
        assert self.split([2] * 4, p, costs, mean_tokens=9.0, swaps=0) == [1, 1, 1, 2]

    def test_cpu_experts_cannot_become_resident(self):
        trace = request_by_hand(ONE, [[[[e] for e in range(4)]]], confidence=[[0.4, 0.1, 0.3, 0.2]])
        run = Run(OLED(swaps=0), ONE, trace, 4, confidence="current")
        assert run.residents() == [0, 2, 3]
        assert run.count("cpu_misses") == [1]


class _Asking(OLED):
    def place(self, setting):
        super().place(setting)
        self.timer = setting.timer


@pytest.mark.parametrize(
    "wrong",
    [
        {"allocate_every": 0},
        {"smoothing": 0.0},
        {"smoothing": 1.5},
        {"smoothing": float("nan")},
        {"mean_tokens": -1.0},
        {"reuse_weight": -1.0},
        {"swaps": -1},
        {"slack": -0.1},
    ],
)
def test_impossible_constants_are_refused(wrong):
    with pytest.raises(UsageError, match=f"oled: {next(iter(wrong))}=.* is out of range"):
        OLED(**wrong)
