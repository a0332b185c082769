"""The rules of a run: splits, warm-up, persistence, batches, confidence, and what is counted."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from oled_sim.engine.budget import Budget
from oled_sim.engine.feeding import feed
from oled_sim.engine.rules import Rules, split_requests
from oled_sim.engine.runner import Contender, simulate, simulate_all
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.trace.schema import Kind

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((1, 2), 8, 1)


@dataclass
class Diary(Policy):
    """Notes every hook call."""

    seen: list = field(default_factory=list)

    def place(self, setting):
        self.seen.append("place")

    def clear(self):
        self.seen.append("clear")

    def begin_request(self, info):
        self.seen.append(info)
        return ()

    def end_request(self, summary):
        self.seen.append(summary)


@dataclass
class Learner(Diary):
    """Learns from history."""

    learns = True


def trace_of(requests, experts=lambda r: [0]):
    return MemoryTrace(
        ONE,
        [
            request_by_hand(ONE, [[[[e] for e in experts(r)]]] * 3, request=r)
            for r in range(requests)
        ],
    )


def splits(total, **rules):
    found = split_requests(list(range(total)), Rules(**rules))
    return found.history, found.warmup, found.counted


class TestSplits:
    def test_first_third_is_history_then_one_warm_up(self):
        assert splits(8) == ((0, 1), (2,), (3, 4, 5, 6, 7))
        assert splits(2) == ((), (0,), (1,))

    def test_numbers_given(self):
        assert splits(8, history=0, warmup=0) == ((), (), tuple(range(8)))
        assert splits(8, requests=4, history=1, warmup=2) == ((0,), (1, 2), (3,))

    def test_the_only_request_left_is_counted_and_no_warm_up(self):
        assert splits(1) == ((), (), (0,))
        assert splits(3, history=2) == ((0, 1), (), (2,))
        assert splits(3, history=1) == ((0,), (1,), (2,))

    @pytest.mark.parametrize("rules", [{"warmup": 1}, {"history": 1}, {"warmup": 9}])
    def test_nothing_left_to_count_is_one_sentence(self, rules):
        with pytest.raises(UsageError, match=r"of 1 requests.*leaves none to count: lower"):
            splits(1, **rules)

    def test_batches_do_not_mix_splits(self):
        rules = Rules(batch=2, warmup=1)
        found = split_requests(list(range(9)), rules)
        fed = feed(trace_of(9), found, rules, costs_by_hand(), learns=True)
        groups = [(group.split, group.requests) for group, _ in fed]
        assert groups == [
            ("history", (0, 1)),
            ("history", (2,)),
            ("warmup", (3,)),
            ("counted", (4, 5)),
            ("counted", (6, 7)),
            ("counted", (8,)),
        ]


@pytest.mark.parametrize(
    "rules",
    [
        {"batch": 0},
        {"staging": 0},
        {"warmup": -1},
        {"history": -1},
        {"requests": 0},
        {"scope": "all"},
        {"confidence": "future"},
    ],
)
def test_impossible_rules_are_refused(rules):
    with pytest.raises(UsageError):
        Rules(**rules)


def run_policy(policy, source, cache=2, **rules):
    seen = []
    contender = Contender("policy", policy, Budget(cache=cache))

    def observe(_, record):
        seen.append((record.group.split, record.course.counts[:, 2].tolist()))

    result = simulate_all(source, [contender], costs_by_hand(), Rules(**rules), observe=observe)[0]
    return result, seen


def test_cache_persists_over_requests():
    _, seen = run_policy(Policy(), trace_of(2), history=0, warmup=1)
    assert seen == [("warmup", [0, 1, 1]), ("counted", [1, 1, 1])]


def test_cold_empties_it_at_each():
    _, seen = run_policy(Policy(), trace_of(2), history=0, warmup=1, cold=True)
    assert seen == [("warmup", [0, 1, 1]), ("counted", [0, 1, 1])]


def test_history_is_simulated_only_for_a_policy_that_learns():
    for policy, ran in ((Diary(), [1, 2]), (Learner(), [0, 1, 2])):
        source = trace_of(3)
        notes = policy.seen
        policy.__deepcopy__ = lambda memo, policy=policy: policy  # keep the notes at hand
        result, _ = run_policy(policy, source)
        infos = [n for n in notes if hasattr(n, "counted")]
        assert [i.request for i in infos] == ran
        assert [i.counted for i in infos][-2:] == [False, True]
        assert [i.history for i in infos] == [r == 0 for r in ran]
        assert result.splits.counted == (2,)
        assert [r.request for r in result.requests] == [2]


def test_learner_starts_the_run_with_an_empty_cache():
    _, seen = run_policy(Learner(), trace_of(3))
    # History fills the cache; the warm-up starts from nothing again.
    assert seen == [("history", [0, 1, 1]), ("warmup", [0, 1, 1]), ("counted", [1, 1, 1])]


def test_same_requests_are_counted_for_every_policy():
    source = trace_of(6)
    contenders = [Contender(p.__class__.__name__, p, Budget(cache=2)) for p in (Diary(), Learner())]
    results = simulate_all(source, contenders, costs_by_hand())
    assert [[r.request for r in result.requests] for result in results] == [[3, 4, 5]] * 2


def test_missing_signal_is_refused_before_anything_runs():
    class Wants(Policy):
        needs = frozenset({"ids", "full_gate"})

    with pytest.raises(TraceError, match="full_gate"):
        simulate(trace_of(3), Wants(), costs_by_hand(), 2)


class TestBatch:
    """Requests 0 (3 passes: prefill, denoise, commit) and 1 (prefill, denoise)."""

    LONG = request_by_hand(
        ONE, [[[[0]]], [[[1]]], [[[2]]]], request=0,
        kinds=[Kind.PREFILL, Kind.DENOISE, Kind.COMMIT],
    )  # fmt: skip
    SHORT = request_by_hand(ONE, [[[[0]]], [[[5]]]], request=1)

    def test_union_of_the_rows_present_and_no_refill(self):
        run = Run(Policy(), ONE, [self.LONG, self.SHORT], 4, batch=2)
        assert run.count("activated") == [1, 2, 1]
        assert run.count("tokens") == [2, 2, 1]
        assert run.record.batch.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.COMMIT]
        assert run.record.batch.owner.tolist() == [0, 1, 0, 1, 0]

    def test_rows_are_in_the_order_of_the_requests(self):
        run = Run(Policy(), ONE, [self.LONG, self.SHORT], 1, batch=2)
        # Pass 1: request 0 uses 1, then request 1 uses 5; the one slot keeps 5. Pass 2: 2.
        assert run.record.course.experts.tolist() == [0, 1, 5, 2]
        assert run.residents() == [2]

    def test_time_of_a_request_ends_with_its_last_pass(self):
        source = MemoryTrace(ONE, [self.LONG, self.SHORT], outputs={0: 4, 1: 2})
        result = simulate(source, Policy(), costs_by_hand(), 4, Rules(batch=2, history=0, warmup=0))
        long, short = result.requests
        # A pass takes 145 + 130 to the gate, then copies: the prefill 150 (one miss, 52 to
        # compute), the next 300 (two misses, the last 52), the last 150 + 52; then 10 + 200.
        prefill, second, third = 275 + 202 + 210, 275 + 352 + 210, 275 + 202 + 210
        assert (long.prefill_us, short.prefill_us) == (prefill, prefill)
        assert (long.decode_us, short.decode_us) == (second + third, second)
        assert (long.tpot_us, short.tpot_us) == ((second + third) / 4, second / 2)
        assert (long.commit_tpot_us, short.commit_tpot_us) == (third / 4, 0)
        assert result.summary.batch_tpot_us == (second + third) / 6
        assert result.summary.tpot_us == ((second + third) / 4 + second / 2) / 2
        # The first pass that accepts a token is the denoise pass.
        assert (long.ttft_us, short.ttft_us) == (prefill + second, prefill + second)


@dataclass
class Confident(Policy):
    """Notes the confidence at each gate, and what it is told later."""

    needs = frozenset({"ids", "confidence"})
    gates: list = field(default_factory=list)
    revised: list = field(default_factory=list)
    ends: list = field(default_factory=list)
    types: list = field(default_factory=list)

    def dispatch(self, event):
        self.types.append(event.confidence.dtype)
        self.gates.append(event.confidence.tolist())
        return super().dispatch(event)

    def revise(self, layer, event):
        self.types.append(event.confidence.dtype)
        self.revised.append((layer, event.confidence.tolist()))
        return np.full(self.experts, float(event.pass_index))

    def end_iteration(self, end):
        self.ends.append(end.confidence.tolist())


class TestConfidence:
    NAN = float("nan")
    TRACE = request_by_hand(
        ONE, [[[[0], [1]]]] * 3, confidence=[[0.5, NAN], [NAN, 0.25], [0.75, 0.125]]
    )

    def gates(self, mode):
        run = Run(Confident(), ONE, self.TRACE, 2, confidence=mode)
        return run.simulation.policy

    def test_previous_is_the_last_one_known_for_the_position(self):
        policy = self.gates("previous")
        # Nothing is known before the first pass: 1. Pass 1 knows 0.5 of position 0. Pass 2 still
        # has that, and 0.25 of position 1.
        assert policy.gates == [[1.0, 1.0], [0.5, 1.0], [0.5, 0.25]]
        assert policy.revised == []

    def test_current_is_the_pass_s_own_and_not_causal(self):
        assert self.gates("current").gates == [[0.5, 1.0], [1.0, 0.25], [0.75, 0.125]]
        source = MemoryTrace(ONE, [self.TRACE])
        rules = Rules(confidence="current", history=0, warmup=0)
        assert not simulate(source, Confident(), costs_by_hand(), 2, rules).causal

    @pytest.mark.parametrize("mode", ["previous", "end", "current"])
    def test_is_float64_whatever_the_mode(self, mode):
        assert self.TRACE.confidence.dtype == np.float32
        policy = self.gates(mode)
        assert set(policy.types) == {np.dtype(np.float64)}
        assert len(policy.types) == (6 if mode == "end" else 3)

    def test_end_revises_scores_after_the_head(self):
        policy = self.gates("end")
        assert policy.gates == [[1.0, 1.0], [0.5, 1.0], [0.5, 0.25]]
        assert policy.revised == [(0, [0.5, 1.0]), (0, [1.0, 0.25]), (0, [0.75, 0.125])]

    def test_revised_scores_decide_when_a_layer_shrinks(self):
        @dataclass
        class Shrinking(Confident):
            allocation_period = 1

            def score(self, layer, event):
                return np.arange(8.0)  # higher ids stay

            def revise(self, layer, event):
                return -np.arange(8.0)  # lower ids stay

            def allocate(self, history):
                return np.array([1.0, 3.0])

        trace = request_by_hand(TWO, [[[[0], [1]], [[0]]], [[[0], [1]], [[0]]]])
        for mode, left in (("previous", [1]), ("end", [0])):
            run = Run(Shrinking(), TWO, trace, 2, confidence=mode)
            assert run.residents(0) == left


class TestAllocation:
    def test_counts_decode_passes_over_requests_and_not_prefill(self):
        seen = []

        @dataclass
        class Counting(Policy):
            allocation_period = 2

            def allocate(self, history):
                seen.append(history)

        trace = request_by_hand(TWO, [[[[0], [1]], [[0]]]] * 4)
        run = Run(Counting(), TWO, trace, 2)
        # Three decode passes: one allocation after the second; the third is carried over.
        assert len(seen) == 1
        run.again(trace)
        assert len(seen) == 3
        # Decode events only: layer 0 activates 2 of 8, layer 1 activates 1; both fully resident.
        assert seen[0].activation_ratio.tolist() == [0.25, 0.125]
        assert seen[0].utilization.tolist() == [1.0, 0.5]
        assert (seen[0].capacity.tolist(), seen[0].budget) == ([2, 2], 4)

    @pytest.mark.parametrize(("cache", "rules"), [(0, {}), (8, {}), (2, {"scope": "global"})])
    def test_is_not_asked_where_it_has_no_meaning(self, cache, rules):
        class Asked(Policy):
            allocation_period = 1

            def allocate(self, history):
                raise AssertionError

        Run(Asked(), TWO, request_by_hand(TWO, [[[[0]], [[0]]]] * 3), cache, **rules)


def test_zero_over_zero_is_nan():
    # A request that puts nothing out and whose cache has no slot.
    source = MemoryTrace(ONE, [request_by_hand(ONE, [[[[0]]]] * 2)], outputs={0: 0})
    result = simulate(source, Policy(), costs_by_hand(), 0, Rules(history=0, warmup=0))
    assert np.isnan(result.requests[0].tpot_us)
    assert np.isnan(result.summary.utilization)
    assert result.summary.hit_rate == 0.0
    assert np.isnan(result.summary.effective_transfer_ratio)


def test_percentiles_over_requests_need_a_hundred():
    for n, given in ((99, False), (100, True)):
        rules = Rules(history=0, warmup=0)
        summary = simulate(trace_of(n), Policy(), costs_by_hand(), 2, rules).summary
        assert np.isnan(summary.tpot_p99_us) is np.bool_(not given)
        assert not np.isnan(summary.pass_p99_us)


def test_memory_counts_weights_budget_staging_and_keys():
    trace = request_by_hand(ONE, [[[[0]]]] * 2, context=[0, 7])
    rules = Rules(history=0, warmup=0, staging=3)
    costs = costs_by_hand()
    summary = simulate(MemoryTrace(ONE, [trace]), Policy(), costs, 2, rules).summary
    cost = costs.geometry
    # One MoE layer and the dense one: 2 slots, 3 staging slots, keys of 7 + 1 tokens in 2 layers.
    small = replace(cost, layers=2)
    keys = 8 * 2 * 2 * cost.kv_heads * cost.head_dim * 2
    wanted = small.resident_bytes + 5 * cost.expert_bytes + keys
    assert summary.peak_gpu_bytes == wanted
    assert summary.host_bytes == 8 * cost.expert_bytes
    assert summary.peak_resident_bytes == cost.expert_bytes
