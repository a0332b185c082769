"""``ideal`` against every way to choose residents and lanes, on events small enough to try all."""

from itertools import product

import numpy as np
import pytest
from how_many import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.ideal import Ideal
from oled_sim.policy import Event, Policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

COSTS = {
    "plain": costs_by_hand(),
    "interfering": costs_by_hand(slowdown=1.3, cpu_per_token_us=11.0),
    "slow link": costs_by_hand(h2d_gb_s=9.7, cpu_per_expert_us=90.0),
    "slow GPU": costs_by_hand(gpu_fixed_us=5.0, gpu_per_expert_us=170.0, cpu_fixed_us=100.0),
}
# Where the GPU's time depends on tokens, the best share of the CPU need not be neighbours in load,
# and the search may miss it: a little where the GPU is fast, more where the CPU is as fast.
NEARLY = {
    "GPU counts tokens": (
        1.01, costs_by_hand(slowdown=1.3, gpu_per_token_us=0.7, cpu_per_token_us=11.0)
    ),
    "CPU as fast": (
        1.15, costs_by_hand(cpu_per_expert_us=20.0, cpu_per_token_us=3.0, gpu_per_token_us=2.0)
    ),
}  # fmt: skip


class Asking(Policy):
    """Keeps the event and the timer for the test."""

    def place(self, setting):
        self.timer = setting.timer

    def dispatch(self, event: Event):
        self.event = event
        return super().dispatch(event)


def shortest(geometry, trace, costs, cache):
    """Time every assignment with at most ``cache`` experts computed from residence."""
    run = Run(Asking(), geometry, trace, 0, costs=costs)
    policy = run.simulation.policy
    activated = len(policy.event.experts)
    return min(
        policy.timer.layer_us(policy.event, np.array(lanes))
        for lanes in product((0, 1, 2), repeat=activated)
        if lanes.count(0) <= cache
    )


events = given(
    tokens=st.lists(st.integers(1, 8), min_size=1, max_size=5),
    cache=st.integers(0, 5),
    seed=st.integers(0, 1000),
)


def ideal_and_shortest(costs, tokens, cache, seed):
    """Return the time of ideal's layer and the shortest possible one."""
    geometry = RoutingGeometry((1,), len(tokens) + 1, 1)  # one expert more, so C = |A| is not all
    rows = [[expert] for expert, n in enumerate(tokens) for _ in range(n)]
    np.random.default_rng(seed).shuffle(rows)
    trace = request_by_hand(geometry, [[rows]])
    run = Run(Ideal(), geometry, trace, min(cache, len(tokens)), costs=costs)
    assert run.count("hits") == [min(cache, len(tokens))]
    gate, end = run.record.course.times[0, 1:3]
    return end - gate, shortest(geometry, trace, costs, cache)


same_examples = settings(max_examples=examples(40), deadline=None, derandomize=True)


@pytest.mark.parametrize("name", COSTS)
@same_examples
@events
def test_ideal_is_the_shortest(name, tokens, cache, seed):
    ideal, best = ideal_and_shortest(COSTS[name], tokens, cache, seed)
    assert ideal == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("name", NEARLY)
@same_examples
@example(tokens=[7, 4, 5, 7], cache=0, seed=0)
@events
def test_ideal_is_near_the_shortest_where_the_gpu_counts_tokens(name, tokens, cache, seed):
    factor, costs = NEARLY[name]
    ideal, best = ideal_and_shortest(costs, tokens, cache, seed)
    assert best * (1 - 1e-9) <= ideal <= factor * best


def test_ideal_tells_experts_of_equal_load_apart_by_nothing():
    # Loads in the order of arrival: 7, 4, 7, 5. Best is to compute the second 7 on the CPU, which
    # leaves a short last kernel; ideal tries one of the sevens, the first, and takes the 4.
    ideal, best = ideal_and_shortest(NEARLY["GPU counts tokens"][1], [7, 4, 5, 7], 0, 0)
    assert (ideal, best) == (pytest.approx(612.57), pytest.approx(611.94))
