"""LRU, LFU and the load-only split, on paper."""

import numpy as np
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.geometry import RoutingGeometry
from oled_sim.policies._load_split import load_split
from oled_sim.policies.lfu import LFU
from oled_sim.policies.lru import LRU
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)


def sets(*events, request=0):
    return request_by_hand(ONE, [[[[e] for e in event]] for event in events], request=request)


def seen(policy, *events, cache=2):
    return [layers[0] for layers in Run(policy, ONE, sets(*events), cache).seen]


def test_lru_follows_recency():
    assert seen(LRU(), [0], [1], [0], [2]) == [[0], [0, 1], [0, 1], [0, 2]]


def test_lfu_keeps_the_more_frequent():
    # Counts: 0:1 | 0:2 | 1:1 | 2:1, equal to 1 and more recent | 1:2, above 2 | 2:2, now all are
    # equal, and 0 is the oldest.
    assert seen(LFU(), [0], [0], [1], [2], [1], [2]) == [[0], [0], [0, 1], [0, 2], [0, 1], [1, 2]]


def test_lfu_counts_outlive_residence():
    # 0 is used twice, 1 and 2 three times: 0 leaves at its count of 2. When it comes back its
    # third use makes 3 = 3 = 3, and the two most recent stay: 2 and 0.
    events = [[0], [0], [1], [1], [1], [2], [2], [2], [0]]
    assert seen(LFU(), *events)[-1] == [0, 2]
    # Had the count started anew, 0 would have 1 and be dropped.


def test_lfu_counts_one_per_event_or_by_tokens():
    # 0 serves three tokens once; 1 serves one token twice.
    events = ([0, 0, 0], [1], [1], [2])
    # By events: 0:1, 1:2, then 2:1, more recent than 0.
    assert seen(LFU(), *events)[-1] == [1, 2]
    # By tokens: 0:3, 1:2, 2:1: the newcomer is dropped.
    assert seen(LFU(count="tokens"), *events)[-1] == [0, 1]


def test_lfu_reset_at_a_request():
    for reset, kept in (("never", [0, 1]), ("request", [1, 2])):
        run = Run(LFU(reset=reset), ONE, sets([0], [0], [1], [1]), 2)
        # Second request: counts 0:2, 1:2 or none; then 1 once, 2 once.
        run.again(sets([1], [2], request=1))
        assert run.residents() == kept


class TestLoadSplit:
    """Copies take 150, CPU experts 250 each plus 20 for the link."""

    def split(self, tokens, **costs):
        tables = costs_by_hand(**costs).tables
        return load_split(tables, np.array(sorted(tokens, reverse=True)), 4, 150.0)

    def test_balances_by_number(self):
        # g copies against 20 + 250 (5 − g): 3 gives max(450, 520), 4 gives max(600, 270).
        assert self.split([1] * 5) == 3

    def test_heavy_experts_are_transferred(self):
        # CPU 100 per token: loads 6, 1, 1. g = 1 leaves 2 tokens: max(150, 20 + 200) = 220;
        # g = 0: 820; g = 2: max(300, 120).
        costs = {"cpu_per_expert_us": 0.0, "cpu_per_token_us": 100.0}
        assert self.split([1, 6, 1], **costs) == 1

    def test_no_miss(self):
        assert self.split([]) == 0

    def test_slow_cpu_gets_nothing(self):
        assert self.split([1, 1], cpu_per_expert_us=1e6) == 2

    @settings(max_examples=examples(100), deadline=None)
    @given(
        tokens=st.lists(st.integers(1, 9), min_size=1, max_size=7),
        per_expert=st.sampled_from([0.0, 40.0, 250.0]),
        per_token=st.sampled_from([1.0, 30.0, 100.0]),
    )
    def test_is_the_best_of_all_subsets_by_load(self, tokens, per_expert, per_token):
        # Equal copies: no other subset beats "the g heaviest".
        costs = costs_by_hand(cpu_per_expert_us=per_expert, cpu_per_token_us=per_token)
        ordered = sorted(tokens, reverse=True)
        g = load_split(costs.tables, np.array(ordered), 4, 150.0)

        def longest(transferred):
            rest = [n for i, n in enumerate(ordered) if not transferred >> i & 1]
            cpu = costs.cpu_link_us(4) + costs.cpu_experts_us(len(rest), sum(rest)) if rest else 0.0
            return max(cpu, 150.0 * (len(ordered) - len(rest)))

        best = min(longest(subset) for subset in range(1 << len(ordered)))
        assert longest((1 << g) - 1) == pytest.approx(best)


def test_dispatch_by_load_in_a_run():
    # Three misses, loads 1, 2, 1. g = 1: max(150, 520); g = 2: max(300, 270) = 300. The two
    # transferred are the heaviest, 1, and of the equal ones the first, 0.
    run = Run(LRU(dispatch_by="load"), ONE, sets([0, 1, 1, 2]), 4)
    assert (run.count("demand"), run.count("cpu_misses")) == ([2], [1])
    assert run.residents() == [0, 1]
