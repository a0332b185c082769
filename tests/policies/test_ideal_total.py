"""``ideal:split=total`` against every way to share a pass's slots, on passes small enough."""

from itertools import product

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.engine import laws
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.sharing import least_cost_shares, spread_rest
from oled_sim.engine.source import MemoryTrace
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.ideal import Ideal
from oled_sim.policy import Policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request

COSTS = {
    "plain": costs_by_hand(),
    "slow link": costs_by_hand(h2d_gb_s=9.7, cpu_per_expert_us=90.0),
    "slow GPU": costs_by_hand(gpu_fixed_us=5.0, gpu_per_expert_us=170.0, cpu_fixed_us=100.0),
}


class Asking(Policy):
    """Keeps every event and the timer for the test."""

    def place(self, setting):
        self.timer, self.events = setting.timer, []

    def dispatch(self, event):
        self.events.append(event)
        return super().dispatch(event)


def shortest_layer(policy, event, slots):
    """Time every assignment with exactly the hits that ``slots`` allow."""
    times = [
        policy.timer.layer_us(event, np.array(lanes))
        for lanes in product((0, 1, 2), repeat=len(event.experts))
        if lanes.count(0) <= slots
    ]
    return min(times)


def shortest_pass(geometry, trace, costs, cache):
    """Try every share of the slots that leaves none unused where a layer could use it."""
    run = Run(Asking(), geometry, trace, 0, costs=costs)
    policy = run.simulation.policy
    counts = [len(event.experts) for event in policy.events]
    times = [
        [shortest_layer(policy, event, slots) for slots in range(count + 1)]
        for event, count in zip(policy.events, counts, strict=True)
    ]
    usable = min(cache * len(counts), sum(counts))
    return min(
        sum(layer[c] for layer, c in zip(times, slots, strict=True))
        for slots in product(*(range(n + 1) for n in counts))
        if sum(slots) == usable
    )


@pytest.mark.parametrize("name", COSTS)
@settings(max_examples=examples(25), deadline=None, derandomize=True)
@given(
    loads=st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=2, max_size=3),
    cache=st.integers(0, 4),
)
def test_the_pass_is_the_shortest(name, loads, cache):
    geometry = RoutingGeometry(tuple(range(1, len(loads) + 1)), 6, 1)
    tokens = max(sum(layer) for layer in loads)
    rows = []
    for layer in loads:
        layer = [*layer[:-1], layer[-1] + tokens - sum(layer)]  # every layer has every token
        rows.append([[expert] for expert, n in enumerate(layer) for _ in range(n)])
    trace = request_by_hand(geometry, [rows])
    run = Run(Ideal(split="total"), geometry, trace, cache, costs=COSTS[name])
    gate, end = run.record.course.times[:, 1:3].T
    assert sum(end - gate) == pytest.approx(shortest_pass(geometry, trace, COSTS[name], cache))
    activated = sum(len(layer) for layer in loads)
    assert sum(run.count("hits")) == min(cache * len(loads), activated)


def test_slots_go_where_they_save_time():
    # Layer 1 activates three experts, layer 2 one. With two slots each, one is idle in layer 2 and
    # layer 1 misses; the shared budget has a slot for everyone.
    geometry = RoutingGeometry((1, 2), 8, 1)
    trace = request_by_hand(geometry, [[[[0], [1], [2]], [[5], [5], [5]]]] * 2)
    run = Run(Ideal(split="total"), geometry, trace, 2)
    assert run.count("capacity") == [3, 1, 3, 1]
    assert run.count("hits") == [3, 1, 3, 1]
    assert Run(Ideal(), geometry, trace, 2).count("hits") == [2, 1, 2, 1]


def test_a_layer_that_does_not_run_gives_up_its_slots():
    geometry = RoutingGeometry((1, 2), 8, 1)
    rows = [[0], [1], [2], [3]]
    trace = request_by_hand(geometry, [[rows, rows], [rows, None], [rows[:1], rows], [None, rows]])
    run = Run(Ideal(split="total"), geometry, trace, 3)
    # Six slots: at least two in either layer of the first pass, then four in the one that runs.
    hits = run.count("hits")
    assert sum(hits[:2]) == 6 and hits[2:] == [4, 1, 4, 4]


@pytest.mark.parametrize("scope", ["layer", "global"])
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 10**6), cache=st.integers(0, 8), batch=st.integers(1, 2))
def test_laws_of_a_shared_budget(scope, seed, cache, batch):
    geometry = RoutingGeometry((1, 2, 4), 8, 2)
    rng = np.random.default_rng(seed)
    traces = [random_request(rng, geometry, request=i, passes=4, ragged=True) for i in range(2)]
    found = {"layer": [], "total": []}

    def note(contender, record):
        found[contender.spec].append(record)

    contenders = [Contender(s, Ideal(split=s), Budget(cache=cache)) for s in ("layer", "total")]
    rules = Rules(history=0, warmup=0, scope=scope, batch=batch)
    costs = costs_by_hand(slowdown=1.2, cpu_per_token_us=5.0, gpu_per_token_us=0.5)
    simulate_all(MemoryTrace(geometry, traces), contenders, costs, rules, observe=note)
    for fixed, total in zip(found["layer"], found["total"], strict=True):
        course, n = total.course, laws.columns(total)
        for p in range(len(course.pass_times)):
            events = slice(course.pass_event[p], course.pass_event[p + 1])
            activated = int(n["activated"][events].sum())
            assert n["hits"][events].sum() == min(3 * cache, activated)
            if scope == "layer":
                assert n["capacity"][events].sum() <= 3 * cache
        spent = [r.course.times[:, 2] - r.course.times[:, 1] for r in (fixed, total)]
        # Within 1 % because the search of a layer is (tests/engine/test_exhaustive.py).
        assert spent[1].sum() <= 1.01 * spent[0].sum()


@settings(max_examples=examples(200), deadline=None)
@given(data=st.data())
def test_the_sharing_is_exact(data):
    layers = data.draw(st.integers(1, 4))
    most = np.array([data.draw(st.integers(0, 4)) for _ in range(layers)])
    sizes = data.draw(st.sampled_from([(1, 1, 1, 1), (1, 2, 1, 3), (2, 3, 2, 3)]))
    size = np.array(sizes[:layers]) // np.gcd.reduce(sizes[:layers])
    units = data.draw(st.integers(0, 14))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    times = rng.integers(1, 50, (layers, 6)).astype(float)
    used = min(units, int((most * size).sum()))
    slots = least_cost_shares(times, most, size, units)

    def spent(chosen):
        return sum(times[layer, c] for layer, c in enumerate(chosen))

    fitting = [
        c for c in product(*(range(m + 1) for m in most)) if (np.array(c) * size).sum() <= used
    ]
    if len(set(size)) == 1:
        fitting = [c for c in fitting if (np.array(c) * size).sum() == used]
    assert spent(slots) == min(spent(c) for c in fitting)
    assert (slots <= most).all() and (slots * size).sum() <= used
    spread_rest(slots, size, units, 5)
    assert (slots * size).sum() <= units
    left = units - (slots * size).sum()
    assert all(c == 5 or s > left for c, s in zip(slots, size, strict=True))
