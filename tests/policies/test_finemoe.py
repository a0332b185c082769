"""FineMoE's steps, on paper."""

from dataclasses import replace

import numpy as np
import pytest

from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.runner import simulate
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import PASS_COUNTS
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies._expert_maps import ExpertMapStore, Found, Trajectory
from oled_sim.policies.finemoe import FineMoE, selection
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import SIGNALS

ONE = RoutingGeometry((1,), 8, 1)
FOUR = RoutingGeometry((1, 2, 3, 4), 8, 1)
"""A quarter of the depth is d = 1."""

# Of four tokens three go to expert 0 of the first layer and one to 1: probabilities 0.75 and 0.25.
PASS = [[[0], [0], [0], [1]], [[2]] * 4, [[3], [3], [3], [4]], [[5], [5], [6], [6]]]
TINY = 1e-6


def with_embedding(trace, *embeddings):
    return replace(trace, embedding=np.array(embeddings, np.float16))


class Recording(FineMoE):
    """Notes every list: at the start of each pass, and at each gate."""

    def begin_iteration(self, info):
        return self.noted("starts", super().begin_iteration(info))

    def prefetch(self, event):
        return self.noted("lists", super().prefetch(event))

    def noted(self, where, wanted):
        vars(self).setdefault(where, []).append(np.array(wanted).tolist())
        return wanted


def trajectory(*rows):
    """Return a trajectory of rows of 4 experts."""
    found = Trajectory(len(rows), 4)
    for layer, row in enumerate(rows):
        found.observe(layer, np.array(row, np.float64))
    return found


class TestSelection:
    # Sums: 0.5, 0.75, 0.875, 1.
    ROW = np.array([[0.125, 0.5, 0.125, 0.25]])

    @pytest.mark.parametrize(
        ("score", "rule", "chosen"),
        [
            (0.25, "released", [1, 3]),  # 1 - s = 0.75, reached by two
            (0.25, "paper", [1, 3]),
            (0.2, "released", [1, 3]),  # 0.8: two do not pass it
            (0.2, "paper", [0, 1, 3]),  # three reach it
            (0.6, "released", [1]),  # 0.4: none does not pass it, but at least one is wanted
            (0.6, "paper", [1]),
            (1.0, "released", [1]),
            (1.5, "paper", [1]),  # clipped to 0
            (-0.3, "released", [0, 1, 2, 3]),  # clipped to 1
        ],
    )
    def test_sum_against_similarity(self, score, rule, chosen):
        assert np.flatnonzero(selection(self.ROW, score, 1, rule)[0]).tolist() == chosen

    def test_at_least_so_many_of_equal_ones_the_lowest_ids(self):
        assert selection(self.ROW, 1.0, 3, "released")[0].tolist() == [True, True, False, True]

    def test_none_of_a_layer_without_probabilities(self):
        both = np.array([[0.0] * 4, [1.0, 0.0, 0.0, 0.0]])
        assert selection(both, 0.9, 2, "released").sum(axis=1).tolist() == [0, 2]


class TestStore:
    def test_trajectory_search_compares_the_layers_observed_so_far(self):
        store = ExpertMapStore(2, 4, 9, 0.5)
        store.insert(trajectory([1, 0, 0, 0], [0, 1, 0, 0]), None)
        store.insert(trajectory([0.6, 0.8, 0, 0], [0, 0, 1, 0]), None)
        seen = Trajectory(2, 4)
        seen.observe(0, np.array([1.0, 0, 0, 0]))
        assert store.nearest_trajectory(seen) == Found(1.0, 0)  # 1 against 0.6
        # Both layers, flattened: norms are sqrt(2). Row 0: 1 / 2. Row 1: (0.6 + 1) / 2.
        seen.observe(1, np.array([0.0, 0, 1, 0]))
        found = store.nearest_trajectory(seen)
        assert found.row == 1 and found.score == pytest.approx(0.8)

    def test_products_begin_anew_when_the_store_changes(self):
        store = ExpertMapStore(1, 4, 9, 0.5)
        seen = trajectory([1, 0, 0, 0])
        assert store.nearest_trajectory(seen) is None
        for row in ([0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]):
            store.insert(trajectory(row), None)
            found = store.nearest_trajectory(seen)
        assert found == Found(1.0, 1)  # the first of two equals

    def test_semantic_search(self):
        store = ExpertMapStore(1, 4, 9, 0.5)
        assert store.nearest_embedding(np.array([1.0, 0.0])) is None
        store.insert(trajectory([1, 0, 0, 0]), np.array([2.0, 0.0]))
        store.insert(trajectory([0, 1, 0, 0]), np.array([3.0, 4.0]))
        # (0.8, 0.6) by (1, 0): 0.8; by (0.6, 0.8): 0.96.
        found = store.nearest_embedding(np.array([8.0, 6.0]))
        assert found.row == 1 and found.score == pytest.approx(0.96)
        assert store.nearest_embedding(None) is None

    @pytest.mark.parametrize(
        ("weight", "row"),
        [
            (0.0, 0),  # by maps: 0.8 and 0.6
            (1.0, 1),  # by embeddings: 0 and 1
            (0.25, 1),  # 0.75 · 0.8 = 0.6 against 0.25 + 0.75 · 0.6 = 0.7
            (0.1, 0),  # 0.9 · 0.8 = 0.72 against 0.1 + 0.9 · 0.6 = 0.64
        ],
    )
    def test_the_most_redundant_is_replaced(self, weight, row):
        store = ExpertMapStore(1, 4, 2, weight)
        store.insert(trajectory([1, 0, 0, 0]), np.array([0.0, 1.0]))
        store.insert(trajectory([0, 1, 0, 0]), np.array([1.0, 0.0]))
        store.insert(trajectory([0.8, 0.6, 0, 0]), np.array([1.0, 0.0]))
        assert store.size == 2
        assert store.map(row).tolist() == [[0.8, 0.6, 0, 0]]
        assert store.map(1 - row).max() == 1.0

    def test_a_full_store_of_one(self):
        store = ExpertMapStore(1, 4, 1, 0.5)
        for row in ([1, 0, 0, 0], [0, 1, 0, 0]):
            store.insert(trajectory(row), None)
        assert store.map(0).tolist() == [[0, 1, 0, 0]] and store.size == 1

    def test_an_empty_map_is_no_row(self):
        store = ExpertMapStore(2, 4, 9, 0.5)
        store.insert(Trajectory(2, 4), None)
        assert store.size == 0

    def test_a_growing_store_finds_every_row_again(self):
        rng = np.random.default_rng(0)
        store, maps = ExpertMapStore(3, 4, 50, 0.5), rng.random((50, 3, 4))
        embeddings = rng.normal(size=(50, 6))
        for rows, embedding in zip(maps, embeddings, strict=True):
            store.insert(trajectory(*rows), embedding)
        for i in (0, 7, 31, 49):
            assert store.nearest_trajectory(trajectory(*maps[i])).row == i
            assert store.nearest_embedding(embeddings[i]).row == i


class TestLists:
    def run(self, passes=2, cache=1, trace=None, **parameters):
        trace = trace or request_by_hand(FOUR, [PASS] * passes)
        run = Run(Recording(**parameters), FOUR, trace, cache)
        return run, run.simulation.policy

    def test_trajectory_of_the_second_pass_finds_the_first(self):
        # d = 1. With an empty store pass 0 predicts nothing; without embeddings no start does.
        # Pass 1, gate 0: similarity 1, threshold 0, one expert per layer is selected (top-1).
        # Layers 2 and 3 with decay 1 - 0/5 and 1 - 1/5; one slot each. Expert 4 (last routed) has
        # that of layer 2, 6 that of layer 3, so 3 and 5 are asked for.
        _, policy = self.run()
        assert policy.starts == [[], []]
        assert policy.lists[:4] == [[]] * 4
        assert policy.lists[4] == [[2, 3, 0.75 + TINY], [3, 5, 0.5 * (1 - 1 / 5) + TINY]]
        # Gate 1: layer 3 alone, decay 1; it is still to come. From gate 2 on there is nothing
        # beyond: the list stays.
        assert policy.lists[5] == [[3, 5, 0.5 + TINY]]
        assert policy.lists[6:] == [[], []]

    def test_unselected_experts_follow_in_the_order_of_probability(self):
        # Three slots. Layer 2: 3 (0.75) selected; 4 (0.25), then 0 (of probability 0, lowest id)
        # at 1e-6. 3 and 4 are resident, so of layer 2 only 0 is left; likewise 0 of layer 3.
        _, policy = self.run(cache=3)
        assert policy.lists[4] == [[2, 0, TINY], [3, 0, TINY]]

    def test_distance(self):
        # d = 2: at gate 0 of pass 1 layer 3 alone, decay 1.
        _, policy = self.run(distance=2)
        assert policy.lists[4] == [[3, 5, 0.5 + TINY]]
        assert policy.lists[5:] == [[]] * 3

    @pytest.mark.parametrize(
        ("layers", "distance"), [(1, 1), (4, 1), (8, 2), (19, 5), (24, 6), (31, 8)]
    )
    def test_distance_is_a_quarter_of_the_depth(self, layers, distance):
        geometry = RoutingGeometry(tuple(range(layers)), 4, 1)
        trace = request_by_hand(geometry, [[[[0]]] * layers])
        run = Run(FineMoE(), geometry, trace, 1)
        assert run.simulation.policy._d == distance

    def test_semantic_search_predicts_the_first_layers_before_they_begin(self):
        # Embeddings (1, 0) and (1, 1): cosine 0.707, threshold 0.293, passed by 0.75: only the
        # top-1 of layer 0, expert 0. Expert 1, routed last, has the slot. The copy starts with the
        # pass and has ended at its first gate.
        trace = with_embedding(request_by_hand(FOUR, [PASS] * 2), (1, 0), (1, 1))
        run, policy = self.run(trace=trace)
        assert policy.starts == [[], [[0, 0, 0.75 + TINY]]]
        start_us = run.record.course.pass_times[1, 0]
        assert run.jobs("prefetch")[0][1] == start_us
        assert run.count("hits")[4] == 1  # expert 0; 1 has left for it
        measured = dict(zip(PASS_COUNTS, run.record.course.pass_counts[1], strict=True))
        assert measured["useful"] >= 1
        assert policy.notes() == [
            "expert maps are made of top-k gates; probabilities of others count as 0."
        ]

    def test_last_token_or_mean_of_the_block(self):
        # The map of the last token of PASS: 1, 2, 4 and 6, each with probability 1.
        _, policy = self.run(aggregate="token")
        assert policy._maps.size == 8  # four tokens, two passes
        assert policy.lists[4] == []  # 4 and 6 are resident already
        assert np.flatnonzero(policy._candidates.protected[3]).tolist() == [6]
        tokens = policy._maps
        assert [np.flatnonzero(tokens.map(r)[2]).tolist() for r in range(4)] == [[3], [3], [3], [4]]

    def test_union_of_the_tokens(self):
        # Three slots. In pass 1 three tokens are most like the stored maps of (0, 2, 3, 5) and the
        # last like (1, 2, 4, 6): 3 and 4 of layer 2, 5 and 6 of layer 3 are selected with a
        # probability of 1 each; expert 0, of probability 0, follows.
        _, policy = self.run(cache=3, aggregate="union")
        protected = policy._candidates.protected
        assert [np.flatnonzero(row).tolist() for row in protected] == [[], [], [], [0, 5, 6]]
        assert policy.lists[4] == [[2, 0, TINY], [3, 0, TINY]]  # the selected are resident

    def test_union_takes_the_highest_probability_of_each(self):
        policy = Run(FineMoE(aggregate="union"), FOUR, request_by_hand(FOUR, [PASS]), 2)
        policy = policy.simulation.policy
        policy._maps = ExpertMapStore(4, 8, 9, 0.25)
        for share in (0.75, 0.25):
            rows = Trajectory(4, 8)
            for layer in range(4):
                rows.map[layer, [layer, 7]] = share, 1 - share
            policy._maps.insert(rows, None)
        found = [Found(1.0, 0), None, Found(0.5, 1), Found(1.0, 1)]
        # Layer 2: experts 2 (0.75 and 0.25) and 7 (0.25 and 0.75), selected by one map each at
        # least (top-1), both with 0.75 and decay 1 (start 2, end 4): the lower id first.
        wanted = policy._list(found, 2, 4)
        assert wanted[:2].tolist() == [[2, 2, 0.75 + TINY], [2, 7, 0.75 + TINY]]
        assert wanted[2:, 2].tolist() == [0.75 * (1 - 1 / 5) + TINY] * 2

    def test_sigmoid_gates_are_normalised(self):
        trace = request_by_hand(ONE, [[[[0]]]])
        gate = np.zeros((1, 8), np.float16)
        gate[0, :3] = (0.5, 0.25, 0.25)
        run = Run(FineMoE(), ONE, replace(trace, full_gate=2 * gate), 1)
        assert run.simulation.policy._maps.map(0)[0].tolist() == [0.5, 0.25, 0.25, 0, 0, 0, 0, 0]
        assert "expert maps" not in " ".join(run.simulation.policy.notes())

    def test_without_gates_tokens_are_counted(self):
        trace = replace(request_by_hand(ONE, [[[[0], [0], [3], [0]]]]), gates=None)
        for aggregate, row in (("block", [0.75, 0, 0, 0.25]), ("token", [1, 0, 0, 0])):
            run = Run(FineMoE(aggregate=aggregate), ONE, trace, 1)
            policy = run.simulation.policy
            assert policy._maps.map(0)[0, :4].tolist() == row
            assert policy.notes()[0] == "without gate scores, expert maps are made of token counts."


class TestEviction:
    def policy(self, **parameters):
        """Return a placed policy with 0, 1 and 2 resident, of 2, 1 and 3 visits."""
        trace = request_by_hand(ONE, [[[[0], [1], [2]]], [[[0], [2]]], [[[2]]]])
        policy = Run(FineMoE(**parameters), ONE, trace, 3).simulation.policy
        policy._executing[:] = False
        policy._probability[0, :3] = (0.3, 0.5, 0.25)
        return policy

    def test_probability_by_visits(self):
        policy = self.policy()
        assert policy._visits[0, :3].tolist() == [2, 1, 3]
        resident = np.arange(8)[None] < 3
        # 0.6, 0.5, 0.75: expert 1 leaves first.
        assert policy._scores(resident, slice(None))[0, :3].tolist() == [0.6, 0.5, 0.75]

    def test_truncated_all_are_equal(self):
        policy = self.policy(evict="truncated")
        resident = np.arange(8)[None] < 3
        assert policy._scores(resident, slice(None))[0, :3].tolist() == [0, 0, 0]

    def test_who_executes_leaves_last_then_who_is_listed(self):
        policy = self.policy()
        policy._executing[0, 1] = policy._candidates.protected[0, 0] = True
        scores = policy._scores(np.arange(8)[None] < 3, slice(None))[0]
        assert scores[1] > scores[0] > scores[2]

    def test_visits_and_probability_end_with_residence(self):
        # One slot: 0 twice, then 1, then 0 again: its visits begin anew.
        trace = request_by_hand(ONE, [[[[0]]], [[[0]]], [[[1]]], [[[0]]]])
        policy = Run(FineMoE(), ONE, trace, 1).simulation.policy
        # At the last gate 1 is still resident, and 0 was found gone.
        assert policy._visits[0, :2].tolist() == [1, 1]

    def test_a_prefetch_counts_as_a_visit(self):
        # Expert 3 of layer 2 is prefetched in pass 1 and used in it: two visits. Its
        # predecessor 4 is used in the same event and dropped.
        run = Run(FineMoE(), FOUR, request_by_hand(FOUR, [PASS] * 2), 1)
        assert run.count("useful")[6] == 1
        assert run.simulation.policy._visits[2, 3] == 2


class TestRoom:
    @pytest.mark.parametrize("scope", ["layer", "global"])
    @pytest.mark.parametrize("protect", ["pool", "list"])
    def test_no_slot_at_all(self, scope, protect):
        trace = request_by_hand(FOUR, [PASS] * 3)
        run = Run(FineMoE(protect=protect), FOUR, trace, 0, scope=scope)
        assert run.jobs("prefetch", "late") == []

    def test_without_a_victim_nothing_is_sent(self):
        # One slot per layer, taken in pass 0: a literal list protects whoever has it.
        run = Run(FineMoE(protect="list"), FOUR, request_by_hand(FOUR, [PASS] * 3), 1)
        assert run.jobs("prefetch", "late") == []

    def test_full_residency_asks_for_nothing(self):
        run = Run(FineMoE(), FOUR, request_by_hand(FOUR, [PASS] * 3), 8)
        assert run.jobs("prefetch", "late", "demand") == []

    def test_a_late_prefetch_is_waited_for(self):
        # A copy takes 1500, a layer of hits some 200. In pass 1 all is resident but expert 5 of the
        # last layer, whose slot 6 has; asked for at gate 0, it is in flight at gate 3, and not sent
        # again.
        costs = costs_by_hand(h2d_gb_s=4.194304)
        passes = [[[[0]], [[2]], [[3]], [[5], [5], [6]]]] * 2
        run = Run(FineMoE(), FOUR, request_by_hand(FOUR, passes), 1, costs=costs)
        assert run.count("late") == [0] * 7 + [1]
        assert run.count("demand") == [1, 1, 1, 2, 0, 0, 0, 0]
        assert len(run.jobs("late")) == 1


class TestLearning:
    def prefetched(self, split, **parameters):
        """Run request 0 in ``split`` and request 1 cold; return the prefetches of the latter."""
        rules, costs = Rules(cold=True), costs_by_hand()
        simulation = Simulation(FineMoE(**parameters), FOUR, costs, Budget(cache=1), rules)
        for request, of in ((0, split), (1, "counted")):
            batch = make_batch([request_by_hand(FOUR, [PASS], request=request)], FOUR, costs)
            record = simulation.run_group(Group(of, (request,)), batch)
            if of == "history":
                simulation.end_history()
        return int(record.course.pass_counts[:, PASS_COUNTS.index("prefetched")].sum())

    def test_only_history_is_left_after_a_cold_start(self):
        assert self.prefetched("history") > 0
        assert self.prefetched("counted") == 0

    @pytest.mark.parametrize(("store", "rows"), [("online", 5), ("offline", 0)])
    def test_online_or_offline(self, store, rows):
        run = Run(FineMoE(store=store), FOUR, request_by_hand(FOUR, [PASS] * 5), 1)
        assert run.simulation.policy._maps.size == rows
        assert self.prefetched("history", store=store) > 0

    def test_ragged_passes_leave_maps_of_what_they_ran(self):
        passes = [PASS, [PASS[0], None, PASS[2], None], PASS]
        run = Run(FineMoE(), FOUR, request_by_hand(FOUR, passes), 1)
        found = run.simulation.policy._maps
        assert [found.map(r).any(axis=1).tolist() for r in range(3)] == [
            [True] * 4,
            [True, False, True, False],
            [True] * 4,
        ]


def test_notes_say_what_the_trace_lacked():
    def notes(signals):
        rng = np.random.default_rng(0)
        traces = [random_request(rng, FOUR, request=i, passes=4, signals=signals) for i in range(2)]
        source = MemoryTrace(FOUR, traces, signals)
        return simulate(source, FineMoE(), costs_by_hand(), 2).notes

    assert notes(SIGNALS) == ()
    gates, embedding = notes(("ids", "gates"))
    assert gates.startswith("expert maps are made of top-k gates")
    assert embedding == "without input embeddings the first 2 layers are never predicted."
    assert notes(("ids",))[0].startswith("without gate scores")


@pytest.mark.parametrize("wrong", ["distance", "least", "most", "capacity"])
def test_impossible_constants_are_refused(wrong):
    with pytest.raises(UsageError, match=f"finemoe: {wrong}=-1 is out of range"):
        FineMoE(**{wrong: -1})
