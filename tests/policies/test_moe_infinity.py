"""MoE-Infinity's steps, on paper."""

import time
from dataclasses import replace

import numpy as np
import pytest

from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import PASS_COUNTS
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies._eam import EAMCollection, RunningEAM
from oled_sim.policies.moe_infinity import MoEInfinity, collect_eams, load_eams, save_eams
from oled_sim.policy import RequestInfo
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((3, 7), 8, 1)


def eam(*layers):
    """Return an EAM of 8 experts per layer from {expert: count}."""
    table = np.zeros((len(layers), 8))
    for layer, counts in enumerate(layers):
        for expert, count in counts.items():
            table[layer, expert] = count
    return table


def stored(tmp_path, *eams):
    """Write a collection and return its name."""
    path = tmp_path / "eams.npz"
    save_eams(path, np.array(eams), force=True)
    return str(path)


class Recording(MoEInfinity):
    """Notes every list: what is asked for at which gate."""

    def prefetch(self, event):
        wanted = super().prefetch(event)
        vars(self).setdefault("lists", []).append(np.array(wanted).tolist())
        return wanted


class TestEAM:
    def after(self, passes, geometry=TWO, **parameters):
        run = Run(MoEInfinity(**parameters), geometry, request_by_hand(geometry, passes), 2)
        return run.simulation.policy._rows.counts

    PASSES = ([[[0], [0], [1]], [[5]]], [[[0]], [[6]]])

    def test_tokens_over_all_passes_of_a_request(self):
        # Layer 3: two tokens and one to expert 0, one to 1. Layer 7: one each to 5 and 6.
        [found] = self.after(self.PASSES)
        assert found.tolist() == eam({0: 3, 1: 1}, {5: 1, 6: 1}).tolist()

    def test_events_instead_of_tokens(self):
        [found] = self.after(self.PASSES, count="event")
        assert found.tolist() == eam({0: 2, 1: 1}, {5: 1, 6: 1}).tolist()

    def test_requests_of_a_batch_have_their_own(self):
        traces = [request_by_hand(TWO, [[[[r]], [[r + 1]]]], request=r) for r in (2, 4)]
        run = Run(MoEInfinity(), TWO, traces, 2, batch=2)
        found = run.simulation.policy._rows.counts
        assert found[0].tolist() == eam({2: 1}, {3: 1}).tolist()
        assert found[1].tolist() == eam({4: 1}, {5: 1}).tolist()

    def test_a_block_each(self):
        # Passes 0 and 1 belong to block 0, pass 2 to block 1: two EAMs.
        trace = request_by_hand(ONE, [[[[0]]], [[[1]]], [[[2]]]])
        trace = replace(trace, block=np.array([0, 0, 1], np.int32))
        rows = Run(MoEInfinity(eam="block"), ONE, trace, 1).simulation.policy._rows
        assert rows.counts.tolist() == [eam({0: 1, 1: 1}).tolist(), eam({2: 1}).tolist()]

    def test_those_of_a_trace_need_no_simulation(self):
        source = MemoryTrace(TWO, [request_by_hand(TWO, self.PASSES)])
        assert collect_eams(source).tolist() == self.after(self.PASSES).tolist()
        by_event = collect_eams(source, 1, count="event")
        assert by_event.tolist() == self.after(self.PASSES, count="event").tolist()
        assert collect_eams(source, 0).shape == (0, 2, 8)


class TestCollection:
    def test_least_accessed_row_after_the_persistent_ones_is_replaced(self):
        a, b, c, d, e = (eam({i: 1}) for i in range(5))
        rows = EAMCollection(1, 8, 3, np.array([a]))
        rows.insert(b)
        rows.insert(c)
        assert rows.access.tolist() == [1, 1, 1]
        rows.note_access(1)  # b: 2
        rows.insert(d)  # c has the fewest of b and c
        assert rows.counts.tolist() == [a.tolist(), b.tolist(), d.tolist()]
        rows.note_access(2)  # d: 2, as b: the first goes
        rows.insert(e)
        assert rows.counts.tolist() == [a.tolist(), e.tolist(), d.tolist()]

    def test_persistent_rows_alone_are_never_replaced(self):
        rows = EAMCollection(1, 8, 1, np.array([eam({0: 1})]))
        rows.insert(eam({1: 1}))
        assert rows.counts.tolist() == [eam({0: 1}).tolist()]

    def test_an_empty_eam_is_no_row(self):
        rows = EAMCollection(1, 8, 4, np.zeros((0, 1, 8)))
        rows.insert(eam({}))
        assert rows.size == 0

    def test_a_growing_collection_keeps_its_rows(self):
        rows = EAMCollection(2, 8, 100, np.zeros((0, 2, 8)))
        for i in range(40):
            rows.insert(eam({i % 8: i + 1}, {i % 7: 1}))
        running = RunningEAM(2, 8)
        running.add(0, eam({3: 2})[0])
        running.add(1, eam({4: 2})[0])
        # Row 11 = 8 + 3 = 7 + 4 alone has expert 3 in layer 0 and expert 4 in layer 1.
        assert rows.match(running, 1, "all") == 11

    RUNNING = eam({0: 3, 1: 4}, {2: 5}, {3: 6})
    ROWS = (
        # Cosines with RUNNING by layer: 0.6, 0, 0. The norms are 5, 5 and 6.
        eam({0: 1}, {0: 1}, {0: 1}),
        eam({1: 1}, {0: 1}, {0: 1}),  # 0.8, 0, 0
        eam({7: 1}, {2: 9}, {3: 1}),  # 0, 1, 1
        eam({0: 3, 1: 4}, {0: 1}, {3: 2, 4: 2}),  # 1, 0, 0.707
    )

    @pytest.mark.parametrize(
        ("rule", "layer", "row"),
        [
            ("observed", 0, 3),  # layer 0 alone: 0.6, 0.8, 0, 1
            ("observed", 1, 2),  # layers 0 and 1: 0.6, 0.8, 1, 1: the first of two equals
            ("released", 0, 2),  # layers 1 and 2: 0, 0, 2, 0.707
            ("released", 1, 2),  # layer 2: 0, 0, 1, 0.707
            ("released", 2, None),  # nothing above: all tie
            ("all", 0, 2),  # 0.6, 0.8, 2, 1.707
        ],
    )
    def test_which_layers_decide(self, rule, layer, row):
        rows, running = EAMCollection(3, 8, 9, np.array(self.ROWS)), RunningEAM(3, 8)
        for i, counts in enumerate(self.RUNNING):
            running.add(i, counts)
        assert rows.match(running, layer, rule) == row

    def test_products_follow_rows_and_counts(self):
        rows, running = EAMCollection(1, 8, 2, np.zeros((0, 1, 8))), RunningEAM(1, 8)
        running.add(0, eam({0: 1})[0])
        assert rows.match(running, 0, "all") is None  # no row
        rows.insert(eam({1: 1}))
        assert rows.match(running, 0, "all") == 0
        rows.insert(eam({0: 1}))
        assert rows.match(running, 0, "all") == 1
        running.add(0, eam({1: 5})[0])
        assert rows.match(running, 0, "all") == 0

    def test_nothing_observed_is_no_match(self):
        rows = EAMCollection(3, 8, 9, np.array(self.ROWS))
        assert rows.match(RunningEAM(3, 8), 0, "all") is None


class TestFile:
    def test_same_eams_same_bytes(self, tmp_path, monkeypatch):
        eams = np.array([eam({0: 3}, {1: 2})])
        save_eams(tmp_path / "a.npz", eams)
        later = time.time() + 1e7
        monkeypatch.setattr(time, "time", lambda: later)
        save_eams(tmp_path / "b.npz", eams.astype(np.float32))
        assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()
        assert load_eams(tmp_path / "a.npz", 2, 8).tolist() == eams.tolist()

    def test_nothing_is_overwritten_unasked(self, tmp_path):
        save_eams(tmp_path / "a.npz", np.array([eam({0: 1})]))
        with pytest.raises(UsageError, match="exists"):
            save_eams(tmp_path / "a.npz", np.array([eam({0: 1})]))
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.npz"]

    def test_what_cannot_be_loaded_is_one_sentence(self, tmp_path):
        good = tmp_path / "good.npz"
        save_eams(good, np.array([eam({0: 1}, {0: 1})]))
        with pytest.raises(UsageError, match=r"no EAM collection .*: save one first"):
            load_eams(tmp_path / "none.npz", 2, 8)
        with pytest.raises(UsageError, match=r"shape \[2, 8\], but the trace has 3 MoE layers"):
            load_eams(good, 3, 9)
        (tmp_path / "torn.npz").write_bytes(good.read_bytes()[:100])
        with pytest.raises(UsageError, match="is no EAM collection"):
            load_eams(tmp_path / "torn.npz", 2, 8)
        np.savez(tmp_path / "other.npz", x=np.zeros(1))
        with pytest.raises(UsageError, match="is no EAM collection"):
            load_eams(tmp_path / "other.npz", 2, 8)
        save_eams(tmp_path / "empty.npz", np.zeros((1, 2, 8)))
        with pytest.raises(UsageError, match="holds an empty EAM"):
            load_eams(tmp_path / "empty.npz", 2, 8)

    def test_more_rows_than_capacity_are_refused(self, tmp_path):
        name = stored(tmp_path, eam({0: 1}), eam({1: 1}))
        with pytest.raises(UsageError, match="holds 2 EAMs, but the collection 1: give capacity=2"):
            Run(MoEInfinity(collection=name, capacity=1), ONE, request_by_hand(ONE, [[[[0]]]]), 1)


class TestPrediction:
    # Collected: layer 3 used experts 0 and 2 (4 and 2 tokens), layer 7 used 1 and 3 (3 and 1).
    ROW = eam({0: 4, 2: 2}, {1: 3, 3: 1})

    def lists(self, tmp_path, cache=2, passes=1, **parameters):
        policy = Recording(collection=stored(tmp_path, self.ROW), **parameters)
        trace = request_by_hand(TWO, [[[[0]], [[1]]]] * passes)
        self.run = Run(policy, TWO, trace, cache)
        return self.run.simulation.policy.lists

    def test_priorities(self, tmp_path):
        # At the gate of layer 3 (l = 0, L = 2): decay 1 for itself, 1 - 1/3 for layer 7. Expert 0
        # comes on demand. Two slots per layer: two of each layer.
        first, second = self.lists(tmp_path)
        assert first == [
            [0, 2, 2 + 1e-8],
            [1, 1, (3 + 1e-8) * (1 - 1 / 3)],
            [1, 3, (1 + 1e-8) * (1 - 1 / 3)],
        ]
        # At that of layer 7: expert 1 is used; 3 is left, with decay 1.
        assert second == [[1, 3, 1 + 1e-8]]

    def test_useful_late_and_wasted(self, tmp_path):
        """Users could not measure prefetches: MoE-Infinity issue 32."""
        # Demand of expert 0 275..425, then by priority (3, 2) 425..575, (7, 1) 575..725. Layer 3
        # ends at 425 + 52 + 10 = 487, the gate of layer 7 at 617 finds (7, 1) in flight: late.
        self.lists(tmp_path)
        assert self.run.jobs("demand", "late", "prefetch") == [
            ("demand", 275, 425), ("prefetch", 425, 575), ("late", 575, 725),
            ("prefetch", 725, 875),
        ]  # fmt: skip
        assert self.run.count("late") == [0, 1]
        measured = dict(zip(PASS_COUNTS, self.run.record.course.pass_counts[0], strict=True))
        assert (measured["prefetched"], measured["useful"], measured["late"]) == (3, 0, 1)
        assert measured["wasted"] == 0 and self.run.simulation.leftover_prefetches >= 1

    def test_every_expert_is_eligible(self, tmp_path):
        # With 7 slots: after the counted ones those with count 0, by id: 1, 3, 4, 5, 6.
        first = self.lists(tmp_path, cache=7)[0]
        assert [e for layer, e, _ in first if layer == 0] == [2, 1, 3, 4, 5, 6]
        assert first[1] == [0, 1, 1e-8]
        assert first[-1] == [1, 6, 1e-8 * (1 - 1 / 3)]

    def test_a_list_can_be_capped(self, tmp_path):
        # The best two of all are (3, 0), in use, and (3, 2).
        assert [entry[:2] for entry in self.lists(tmp_path, most=2)[0]] == [[0, 2]]
        assert [entry[:2] for entry in self.lists(tmp_path, most=3)[0]] == [[0, 2], [1, 1]]

    def test_no_list_without_a_collection(self):
        policy = Recording()
        run = Run(policy, TWO, request_by_hand(TWO, [[[[0]], [[1]]]]), 2)
        assert run.simulation.policy.lists == [[], []]
        assert run.jobs("prefetch") == []

    def test_none_at_all(self, tmp_path):
        assert self.lists(tmp_path, predict="none") == [[], []]

    def test_first_row_or_sum_of_rows_before_anything_is_observed(self, tmp_path):
        # At the first gate nothing above it has been observed. The first row knows expert 5 of
        # layer 7; by the sum of both rows expert 6 has 2 + 2 = 4 against 3.
        name = stored(tmp_path, eam({0: 1}, {5: 3, 6: 2}), eam({0: 1}, {6: 2}))
        trace = request_by_hand(TWO, [[[[0]], [[1]]]])
        for unseen, best in (("first", 5), ("sum", 6)):
            run = Run(Recording(collection=name, unseen=unseen), TWO, trace, 1)
            ahead = [e for e in run.simulation.policy.lists[0] if e[0] == 1]
            assert [e[1] for e in ahead] == [best]

    def test_requests_teach_later_ones(self):
        # Request 0 teaches experts 0 and 5. Request 1 begins with expert 1, whose only likely
        # successor in layer 7 is 5, resident still; and in layer 3 it is 0, also still resident.
        # After expert 1 has taken the place of 0, the next gate of layer 3 asks for 0 again.
        run = Run(Recording(), TWO, request_by_hand(TWO, [[[[0]], [[5]]]] * 3), 1)
        run.simulation.policy.lists.clear()
        run.again(request_by_hand(TWO, [[[[1]], [[5]]]] * 2, request=1))
        assert run.simulation.policy.lists == [[], [], [[0, 0, 3 + 1e-8]], []]

    def test_last_request_of_a_batch_wins(self, tmp_path):
        # After pass 0, request 0 resembles the first row by layer 7, request 1 the second; at the
        # first gate of pass 1 the second row's list stands: 3 and 7 of layer 7, not 2 and 6.
        name = stored(tmp_path, eam({0: 9}, {2: 9, 6: 5}), eam({1: 9}, {3: 9, 7: 5}))
        traces = [request_by_hand(TWO, [[[[r]], [[r + 2]]]] * 2, request=r) for r in (0, 1)]
        run = Run(Recording(collection=name), TWO, traces, 2, batch=2)
        assert [e[:2] for e in run.simulation.policy.lists[2] if e[0] == 1] == [
            [1, 3],
            [1, 7],
        ]
        assert run.simulation.policy._rows.access[1] == 2  # inserted, and matched once


class TestProtection:
    def policy(self, tmp_path, **parameters):
        row = eam({0: 5, 1: 4, 2: 3}, {5: 5, 6: 4, 7: 3})
        return Recording(collection=stored(tmp_path, row), **parameters)

    def test_without_a_victim_nothing_is_sent(self, tmp_path):
        """The evictor found no victim and span: MoE-Infinity pull request 98."""
        # Pass 0 leaves both pools full. From then on a literal list, which protects every expert
        # of the layers to come, finds no victim in them and sends nothing.
        trace = request_by_hand(TWO, [[[[3], [4]], [[3], [4]]]] * 4)
        run = Run(self.policy(tmp_path, protect="list"), TWO, trace, 2)
        assert run.simulation.policy.lists[2:] == [[]] * 6
        assert run.count("hits")[2:] == [2] * 6

    def test_a_literal_list_takes_slots_of_earlier_layers(self, tmp_path):
        # One pool of 4. Gate of layer 3: empty, two executing, so room for two: (3, 0), (3, 1).
        # Demand 275..575, (3, 0) 575..725, (3, 1) in flight at the gate of layer 7 at 767. There
        # the list is layer 7's alone; it protects no resident (3, 4 and 0 of layer 3), so there
        # is room for all but the two executing.
        trace = request_by_hand(TWO, [[[[3], [4]], [[3], [4]]]])
        run = Run(self.policy(tmp_path, protect="list"), TWO, trace, 2, scope="global")
        lists = run.simulation.policy.lists
        assert [[e[:2] for e in some] for some in lists] == [[[0, 0], [0, 1]], [[1, 5], [1, 6]]]

    def test_an_arrival_takes_the_slot_of_who_is_not_listed(self, tmp_path):
        # C = 2, layer 7 holds 3 and 4 after pass 0; at the gate of layer 3 in pass 1 the list
        # protects 5 and 6 of it, which replace them as they arrive.
        trace = request_by_hand(TWO, [[[[3], [4]], [[3], [4]]]] + [[[[3], [4]], None]] * 3)
        run = Run(self.policy(tmp_path), TWO, trace, 2)
        assert run.residents(1) == [5, 6]

    def test_slots_of_the_running_event_are_not_overwritten(self, tmp_path):
        """A later eviction overwrote a slot that was in use: mlx-lm pull request 1588."""
        # An expert computes for 1000. Copies of 3 and 4 275..575, the prefetch of 0, alone on the
        # list, 575..725, while 3 computes 425..1475 and 4 1475..2525. It waits for the end of the
        # layer and only then takes the slot of 3 (equal visits, the lower id).
        costs = costs_by_hand(gpu_per_expert_us=1000.0)
        policy = MoEInfinity(collection=stored(tmp_path, eam({0: 5})), most=1)
        run = Run(policy, ONE, request_by_hand(ONE, [[[[3], [4]]]] * 2), 2, costs=costs)
        assert run.jobs("prefetch")[0] == ("prefetch", 575, 725)
        assert run.jobs("arrivals")[:2] == [("arrivals", 425, 1475), ("arrivals", 1475, 2525)]
        assert run.count("residents_after") == [2, 2]
        # Pass 1 needs 3 and 4 again, of which 4 is there; 0, resident at the gate, is not asked for
        # and leaves for 3.
        assert run.seen == [[[0, 4]], [[3, 4]]]
        assert run.count("hits") == [0, 1]

    @pytest.mark.parametrize("scope", ["layer", "global"])
    @pytest.mark.parametrize("protect", ["pool", "list"])
    def test_no_slot_at_all(self, tmp_path, scope, protect):
        trace = request_by_hand(TWO, [[[[3], [4]], [[5], [6]]]] * 2)
        run = Run(self.policy(tmp_path, protect=protect), TWO, trace, 0, scope=scope)
        assert run.jobs("prefetch", "late") == []
        assert run.count("demand") == [2, 2, 2, 2]

    def test_more_activated_than_slots(self, tmp_path):
        # Three experts, two slots: all are locked; the fewest visits, then the lowest id leave.
        trace = request_by_hand(ONE, [[[[4], [2], [6]]], [[[2]]], [[[4], [2], [6]]]])
        run = Run(MoEInfinity(), ONE, trace, 2)
        # Pass 0: one visit each, 2 leaves. Pass 1: 2 executes, of 4 and 6 the lower id leaves.
        # Pass 2: 2 has three visits, 4 and 6 have two: 4 leaves.
        assert run.seen == [[[4, 6]], [[2, 6]], [[2, 6]]]


class TestEviction:
    def test_fewest_visits_then_lowest_id(self):
        # 5 has two visits, 6 and 3 one each: of these the lowest id, 3, leaves for 1.
        trace = request_by_hand(ONE, [[[[5], [6], [3]]], [[[5]]], [[[1]]]])
        assert Run(MoEInfinity(), ONE, trace, 3).seen[-1] == [[1, 5, 6]]

    def test_visits_are_not_reset_by_eviction(self):
        # 5 has two visits when it leaves for 1 and 2, executing; back, it has three, and 2 with
        # two visits leaves for 4.
        events = [[5], [5], [1, 2], [2], [5], [4]]
        trace = request_by_hand(ONE, [[[[e] for e in es]] for es in events])
        assert Run(MoEInfinity(), ONE, trace, 2).seen[-1] == [[4, 5]]

    def test_of_equal_visits_the_lowest_id_then_the_lowest_layer(self):
        # One pool of 4: 2 and 5 in both layers, a visit each. 1 of layer 3 takes the place of 2
        # of layer 3; 1 of layer 7 that of 1 (the lowest id), locked no more.
        trace = request_by_hand(TWO, [[[[2], [5]], [[2], [5]]], [[[1]], None], [None, [[6]]]])
        run = Run(MoEInfinity(), TWO, trace, 2, scope="global")
        assert run.seen == [[[2, 5], [2, 5]], [[1, 5], [2, 5]], [[5], [2, 5, 6]]]

    def test_share_of_the_request_and_nearness(self):
        # One pool of 2. Layer 3 (nearness 1): 0 has a share of 1. Layer 7 (1/2): 4 has a share of
        # 2/3 · 1/2. Then 5 of layer 7 executes (locked) and 4 has (2/3) / 2 = 0.33, 0 has 1.
        passes = [[[[0]], [[4]]], [None, [[4]]], [None, [[5]]]]
        run = Run(MoEInfinity(evict="paper"), TWO, request_by_hand(TWO, passes), 1, scope="global")
        assert run.seen[-1] == [[0], [5]]
        # By visits 0, with one against two of 4, would have left.
        run = Run(MoEInfinity(), TWO, request_by_hand(TWO, passes), 1, scope="global")
        assert run.seen[-1] == [[], [4, 5]]

    def values(self, evict, arriving):
        run = Run(
            MoEInfinity(evict=evict), TWO, request_by_hand(TWO, [[[[0], [0], [1]], [[4]]]]), 2
        )
        policy = run.simulation.policy
        policy._arriving, policy._running = arriving, {0: RunningEAM(2, 8)}
        policy._running[0].add(0, eam({0: 2, 1: 1})[0])
        policy._running[0].add(1, eam({4: 1})[0])
        resident = np.zeros((2, 8), np.bool_)
        resident[0, :2] = resident[1, 4] = True
        return policy, policy._values(slice(None), resident)

    def test_as_the_code_sorts_for_a_prefetch(self):
        policy, values = self.values("prefetch-bug", True)
        assert values.tolist() == (-policy._visits).tolist()
        policy, values = self.values("prefetch-bug", False)
        assert values.tolist() == (policy._visits + policy._tie).tolist()

    def test_paper_values(self):
        _, values = self.values("paper", False)
        # Shares 2/3 and 1/3 with nearness 1; share 1 with nearness 1 - 1/2.
        assert values[0, :2].tolist() == [2 / 3 + 1e-6, 1 / 3 + 1e-6]
        assert values[1, 4] == (1 + 1e-6) * 0.5
        assert values[1, 5] == 1e-6 * 0.5

    def test_priority_values(self):
        # The running layer is 7 (index 1): layer factor 1 everywhere, 1/16 each once normalised.
        # Shares 2/3, 1/3 and 1, over their sum of 2. Visits 1 each of the three residents.
        _, values = self.values("priority", False)
        tiny = 1e-6
        by_hand = (1 / 16 + tiny) * (2 / 3 / 2 + tiny) * (1 / 3 + tiny)
        assert values[0, 0] == pytest.approx(by_hand, rel=1e-12)
        assert values[1, 4] == pytest.approx((1 / 16 + tiny) * (0.5 + tiny) * (1 / 3 + tiny))
        assert values[0, 5] == pytest.approx((1 / 16 + tiny) * tiny * tiny)

    def test_priority_discounts_later_layers_and_spares_the_list(self, tmp_path):
        # While layer 3 runs (index 0 of L = 2), layer 7 has the factor 1 / (2 + 1).
        policy = MoEInfinity(evict="priority")
        run = Run(policy, TWO, request_by_hand(TWO, [[[[0]], None]]), 1)
        found = run.simulation.policy._values(slice(None), np.zeros((2, 8), np.bool_))
        # No resident has a visit: all are taken to have one. Layer 7 has no share: 1/8 each.
        assert found[1, 0] == pytest.approx(
            (1 / 3 / (8 + 8 / 3) + 1e-6) * (1 / 8 / 2 + 1e-6) * (1 / 16 + 1e-6)
        )


class TestPopulation:
    ROW = eam({0: 5, 1: 4}, {5: 5, 6: 4})

    def test_pools_are_filled_at_the_start_and_misses_are_not_kept(self, tmp_path):
        # C = 1: experts 0 and 5 are fetched at the start, 0..150 and 150..300; nothing else stays.
        policy = MoEInfinity(predict="request", collection=stored(tmp_path, self.ROW))
        run = Run(policy, TWO, request_by_hand(TWO, [[[[2]], [[3]]], [[[0]], [[5]]]]), 1)
        assert run.jobs("prefetch") == [("prefetch", 0, 150), ("prefetch", 150, 300)]
        assert run.seen == [[[0], [5]]] * 2
        assert run.count("hits") == [0, 0, 1, 1]

    def test_after_the_prefill_by_what_it_showed(self, tmp_path):
        # The prefill keeps what it uses. It resembles the second row, so from the next pass on 2
        # and 3 have the slots (and are there already): 1 is not kept.
        other = eam({2: 5}, {3: 5})
        policy = MoEInfinity(predict="prompt", collection=stored(tmp_path, self.ROW, other))
        trace = request_by_hand(TWO, [[[[2]], [[3]]], [[[1]], [[1]]], [[[2]], [[3]]]])
        run = Run(policy, TWO, trace, 1)
        assert run.seen == [[[2], [3]]] * 3
        assert run.jobs("prefetch") == []
        # A prompt that resembles the first row. Of equal visits the lower ids left, 0 and 3, so
        # of 0 and 5 the first is fetched.
        trace = request_by_hand(TWO, [[[[2], [0], [0]], [[3], [5], [5]]], [[[1]], [[1]]]])
        run = Run(policy, TWO, trace, 1)
        assert (len(run.jobs("prefetch")), run.seen[-1]) == (1, [[0], [5]])

    def test_without_a_collection_it_keeps_what_it_uses(self):
        run = Run(MoEInfinity(predict="request"), ONE, request_by_hand(ONE, [[[[2]]]] * 2), 1)
        assert run.count("hits") == [0, 1]


class TestHistory:
    def test_history_survives_a_cold_start_and_nothing_else_does(self):
        policy = MoEInfinity()
        run = Run(policy, ONE, request_by_hand(ONE, [[[[0]]]]), 1)
        placed = run.simulation.policy
        placed.begin_request(RequestInfo(7, False, history=True))
        placed._running[7].add(0, eam({3: 1})[0])
        placed._finish(7)
        placed._rows.insert(eam({4: 1}))
        assert placed._rows.size == 3
        placed.clear()
        # What request 0, of no history, taught before is there because it was there when history
        # ended; what came after is gone.
        assert placed._rows.counts[:, 0].argmax(axis=1).tolist() == [0, 3]

    @pytest.mark.parametrize(("split", "prefetched"), [("history", 1), ("counted", 0)])
    def test_only_history_is_left_after_a_cold_start(self, split, prefetched):
        # Request 0 teaches 0 and 5. Request 1 starts cold: 5 is prefetched at its first gate, if
        # request 0 was of history.
        rules, costs = Rules(cold=True), costs_by_hand()
        simulation = Simulation(MoEInfinity(), TWO, costs, Budget(cache=1), rules)
        for request, of in ((0, split), (1, "counted")):
            batch = make_batch(
                [request_by_hand(TWO, [[[[0]], [[5]]]], request=request)], TWO, costs
            )
            record = simulation.run_group(Group(of, (request,)), batch)
            if of == "history":
                simulation.end_history()
        found = record.course.pass_counts[:, PASS_COUNTS.index("prefetched")]
        assert found.tolist() == [prefetched]


@pytest.mark.parametrize("wrong", [{"most": -1}, {"capacity": 0}, {"epsilon": -1.0}])
def test_impossible_constants_are_refused(wrong):
    with pytest.raises(UsageError, match=f"moe-infinity: {next(iter(wrong))}=.* is out of range"):
        MoEInfinity(**wrong)


def test_populating_contradicts_a_literal_list():
    with pytest.raises(UsageError, match="leave protect out"):
        MoEInfinity(predict="request", protect="list")
