"""OLED's exact dispatch against every split there is, and against the bounded swaps."""

from itertools import combinations, product

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.costs.lanes import load_costs
from oled_sim.engine.jit import direct
from oled_sim.engine.whatif import layer_us
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.policies._cooperative import room_for_misses, split_cooperatively
from oled_sim.policies._exact_dispatch import most_valuable, split_exactly
from oled_sim.policies.oled import OLED
from oled_sim.policy import Policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 16, 1)
EVENTS = 250

GPU_COUNTS_NO_TOKENS = {
    "plain": costs_by_hand(),
    "interfering": costs_by_hand(slowdown=1.3, cpu_per_token_us=11.0),
    "slow link": costs_by_hand(h2d_gb_s=9.7, cpu_per_expert_us=90.0),
    "slow GPU": costs_by_hand(gpu_fixed_us=5.0, gpu_per_expert_us=170.0, cpu_fixed_us=100.0),
    "CPU by tokens": costs_by_hand(cpu_per_expert_us=0.0, cpu_per_token_us=45.0),
}
PER_TOKEN_US = 3.0
GPU_COUNTS_TOKENS = {
    "fast GPU": costs_by_hand(gpu_per_token_us=PER_TOKEN_US, cpu_per_token_us=11.0),
    "interfering": costs_by_hand(gpu_per_token_us=1.0, slowdown=1.4, cpu_per_token_us=30.0),
    "slow GPU": costs_by_hand(gpu_per_expert_us=140.0, gpu_per_token_us=9.0),
    "measured": load_costs(find_geometry("llada2.0-mini")),
}


class Asking(Policy):
    """Keeps what the policy would be given."""

    def place(self, setting):
        self.setting = setting


class Bench:
    """One layer's costs, ready to split events and to time splits."""

    def __init__(self, costs):
        trace = request_by_hand(ONE, [[[[0]]]])
        setting = Run(Asking(), ONE, trace, 0, costs=costs).simulation.policy.setting
        policy = OLED()
        policy.experts = ONE.experts
        policy.place(setting)
        self.floors, timer = policy._floors, setting.timer
        self.timer = timer.lanes, timer.queue, timer.tables
        self.copy_us = timer.lanes.copy_us[0]
        self._layer_us = direct(layer_us)

    def j(self, tokens, priority, lanes, reuse_weight=1.0):
        us = self._layer_us(*self.timer, 0, int(tokens.max()), tokens, lanes)
        value = sum(p for p, lane in zip(priority, lanes, strict=True) if lane == 1)
        return us - reuse_weight * self.copy_us * len(lanes) * value

    def least(self, tokens, priority, missed, reuse_weight=1.0):
        """Return the least J over all splits of the misses."""
        found = []
        for choice in product((1, 2), repeat=int(missed.sum())):
            lanes = np.zeros(len(tokens), np.int64)
            lanes[missed] = choice
            found.append(self.j(tokens, priority, lanes, reuse_weight))
        return min(found)

    def exact(self, tokens, priority, lanes, reuse_weight=1.0):
        """Improve lanes in place; return J and the bound."""
        rows = int(tokens.max())
        return split_exactly(
            *self.timer, *self.floors, 0, rows, tokens, priority, lanes, reuse_weight
        )

    def coop(self, tokens, priority, missed, reuse_weight=1.0, swaps=8, slack=0.1):
        lanes = missed.astype(np.int64)
        split_cooperatively(
            *self.timer, 0, int(tokens.max()), tokens, priority, lanes, room_for_misses(16),
            0.0, reuse_weight, swaps, slack,
        )  # fmt: skip
        return lanes


def random_events(seed):
    """Yield tokens, priorities, who is missed, and λ, of events with up to seven misses."""
    rng = np.random.default_rng(seed)
    for _ in range(EVENTS):
        activated = int(rng.integers(1, 8))
        tokens = rng.integers(1, int(rng.choice([4, 7, 17])), activated)  # few loads: many alike
        priority = rng.dirichlet(np.full(activated, 0.7))
        missed = rng.random(activated) < 0.85
        yield tokens, priority, missed, float(rng.choice([0.0, 0.02, 0.25, 1.0, 4.0]))


@pytest.mark.parametrize("name", GPU_COUNTS_NO_TOKENS)
def test_no_split_is_better_where_kernels_count_no_tokens(name):
    bench = Bench(GPU_COUNTS_NO_TOKENS[name])
    for tokens, priority, missed, weight in random_events(1):
        lanes = missed.astype(np.int64)
        j, floor = bench.exact(tokens, priority, lanes, weight)
        assert j == pytest.approx(bench.j(tokens, priority, lanes, weight), abs=1e-6)
        assert j == pytest.approx(bench.least(tokens, priority, missed, weight), abs=1e-6)
        assert floor <= j + 1e-6
        assert ((lanes > 0) == missed).all()


@pytest.mark.parametrize("name", GPU_COUNTS_TOKENS)
def test_the_least_lies_between_what_is_returned_where_kernels_count_tokens(name):
    bench = Bench(GPU_COUNTS_TOKENS[name])
    for tokens, priority, missed, weight in random_events(2):
        lanes = missed.astype(np.int64)
        j, floor = bench.exact(tokens, priority, lanes, weight)
        assert j == pytest.approx(bench.j(tokens, priority, lanes, weight), abs=1e-6)
        assert floor - 1e-6 <= bench.least(tokens, priority, missed, weight) <= j + 1e-6


def test_loss_is_at_most_the_spread_of_kernels_that_arrivals_do_not_wait_for():
    # A kernel takes 52 + 3 n µs, 100 for the most tokens, and a copy 150: without residents every
    # arrival is computed before the next one.
    bench, losses = Bench(GPU_COUNTS_TOKENS["fast GPU"]), []
    for tokens, priority, _, weight in random_events(3):
        missed = np.ones(len(tokens), np.bool_)
        j, _ = bench.exact(tokens, priority, missed.astype(np.int64), weight)
        losses.append(j - bench.least(tokens, priority, missed, weight))
        assert losses[-1] <= PER_TOKEN_US * np.ptp(tokens) + 1e-6
    assert max(losses) > PER_TOKEN_US  # so the bound says something


events = given(
    tokens=st.lists(st.integers(1, 40), min_size=1, max_size=16),
    seed=st.integers(0, 1000),
    weight=st.sampled_from([0.0, 0.25, 1.0, 4.0]),
    swaps=st.sampled_from([0, 1, 8]),
    slack=st.sampled_from([0.0, 0.1, 1.0]),
)


@pytest.mark.parametrize("costs", [*GPU_COUNTS_NO_TOKENS.items(), *GPU_COUNTS_TOKENS.items()])
@settings(max_examples=examples(60), deadline=None, derandomize=True)
@events
def test_j_is_never_above_that_of_the_swaps(costs, tokens, seed, weight, swaps, slack):
    bench, rng, tokens = Bench(costs[1]), np.random.default_rng(seed), np.array(tokens)
    priority, missed = rng.dirichlet(np.ones(len(tokens))), rng.random(len(tokens)) < 0.8
    lanes = bench.coop(tokens, priority, missed, weight, swaps, slack)
    coop = bench.j(tokens, priority, lanes, weight)
    j, _ = bench.exact(tokens, priority, lanes, weight)
    assert j <= coop + 1e-9
    # Wherever it starts, what it finds is no worse.
    from_all = missed.astype(np.int64)
    assert bench.exact(tokens, priority, from_all, weight)[0] <= coop + 1e-6


def test_finds_what_swaps_near_the_ratio_do_not():
    # CPU 200 per token, loads 1 and 5, λ = 0.5 · 150 · 2 = 150. ρ|M| = 1.6 lets swaps leave no
    # transfer out. Both transferred: 300 + 52 - 150 = 202. The first on the CPU: the CPU takes 20 +
    # 200, the GPU lane 150 + 52; 220 - 150 · 0.5 = 145. The second: 1020. None: 1220.
    bench = Bench(costs_by_hand(cpu_per_expert_us=0.0, cpu_per_token_us=200.0))
    tokens, priority = np.array([1, 5]), np.array([0.5, 0.5])
    lanes = bench.coop(tokens, priority, np.array([True, True]), 0.5)
    assert lanes.tolist() == [1, 1]
    j, _ = bench.exact(tokens, priority, lanes, 0.5)
    assert (lanes.tolist(), j) == ([2, 1], pytest.approx(145.0))


def test_outside_the_profile_the_decision_stays():
    # Nobody measured a kernel over so many tokens.
    bench = Bench(costs_by_hand())
    lanes = np.array([1, 1])
    found = bench.exact(np.array([10**6, 10**6]), np.array([0.5, 0.5]), lanes)
    assert lanes.tolist() == [1, 1]
    assert np.isnan(found).all()


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(load=st.lists(st.integers(1, 5), min_size=1, max_size=9), seed=st.integers(0, 1000))
def test_most_valuable_sets(load, seed):
    value = np.random.default_rng(seed).random(len(load))
    most, taken = most_valuable(np.array(load), value)
    expected = np.full(most.shape, -np.inf)
    for g in range(len(load) + 1):
        for chosen in combinations(range(len(load)), g):
            v = sum(load[i] for i in chosen)
            expected[g, v] = max(expected[g, v], sum(value[i] for i in chosen))
    np.testing.assert_allclose(most, expected)
    for g, v in zip(*np.nonzero(np.isfinite(most)), strict=True):
        members, left, tokens = [], g, v
        for i in range(len(load) - 1, -1, -1):
            if taken[i // 8, left, tokens] >> (i % 8) & 1:
                members.append(i)
                left, tokens = left - 1, tokens - load[i]
        assert (left, tokens, len(members)) == (0, 0, g)
        assert value[members].sum() == pytest.approx(most[g, v])
