"""Times of single layers against arithmetic done by hand.

Costs (µs) unless a test says otherwise: embedding 5, dense part 100, gate 30, MLP of the dense
layer 40, shared expert 20, n experts on the GPU 50 + 2n, n experts on the CPU 250n plus 20 for the
link, copy of an expert 150, merge 10, LM head 200.

A pass begins with embedding and the dense layer: 5 + 100 + 40 = 145. The first gate is then at
145 + 100 + 30 = 275.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import Host, Quantiles
from oled_sim.costs.store import load_profile
from oled_sim.engine.batch import make_batch
from oled_sim.engine.members import lockstep
from oled_sim.engine.merge import pass_load
from oled_sim.engine.state import QUEUED
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Lane, Policy, Prefetch, param
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand

ONE = RoutingGeometry((1,), 8, 1)
TWO = RoutingGeometry((1, 2), 8, 1)
GATE = 275


@dataclass
class Scripted(Policy):
    """Resident from the start, lanes and prefetches as told."""

    residents: tuple = param((), "(layer, expert) pairs")
    cpu: tuple = param((), "experts that the CPU computes")
    wanted: dict = field(default_factory=dict)
    last: tuple = param((), "experts that are never kept")

    def place(self, setting):
        mask = np.zeros((len(setting.routing.layers), self.experts), bool)
        for layer, expert in self.residents:
            mask[layer, expert] = True
        return mask

    def dispatch(self, event):
        lanes = super().dispatch(event)
        lanes[np.isin(event.experts, self.cpu)] = Lane.CPU
        return lanes

    def prefetch(self, event):
        return [Prefetch(*p) for p in self.wanted.get(event.layer, ())]

    def score(self, layer, event):
        scores = np.zeros(self.experts)
        scores[list(self.last)] = -np.inf
        return scores


def times(run, layer=0):
    """(gate, end of lanes, end) of the first pass's event of a layer."""
    return run.record.course.times[layer, 1:4].tolist()


def single(policy, rows, cache=4, geometry=ONE, costs=None, **rules):
    trace = request_by_hand(geometry, [[rows]])
    return Run(policy, geometry, trace, cache, costs=costs, **rules)


def test_all_hit():
    run = single(Scripted(residents=((0, 0), (0, 1))), [[0], [1]])
    # Two residents in one kernel: 275 + 54 = 329; shared expert: 349; merge: 359.
    assert times(run) == [GATE, 349, 359]
    # LM head: 559.
    assert run.record.course.pass_times[0, :2].tolist() == [0, 559]


def test_the_lm_head_judges_a_block():
    """Of a prefill pass of five tokens, the last two where decode passes have two; else all."""
    prompt, block = [[0], [1], [2], [3], [4]], [[0], [1]]
    both, alone = (
        request_by_hand(ONE, [[rows] for rows in r]) for r in ([prompt, block], [prompt])
    )
    assert pass_load(lockstep([both]), 2)[:, 3].tolist() == [2, 2]
    assert pass_load(lockstep([both, alone]), 2)[:, 3].tolist() == [2 + 5, 2]
    costs = LaneCosts(load_profile("h200-llada2.0-mini"))
    rest_us = costs.tables.per_pass_us
    head_us = make_batch([both], ONE, costs).course.head_us - rest_us
    assert head_us.tolist() == pytest.approx([costs.lm_head_us(2)] * 2)
    head_us = make_batch([alone], ONE, costs).course.head_us - rest_us
    assert head_us.tolist() == pytest.approx([costs.lm_head_us(5)])


def test_one_miss():
    run = single(Scripted(), [[0]])
    # Shared expert 275..295 beside the copy 275..425; then one expert: 425 + 52 = 477.
    assert times(run) == [GATE, 477, 487]
    assert run.jobs("demand", "shared", "arrivals") == [
        ("shared", 275, 295),
        ("demand", 275, 425),
        ("arrivals", 425, 477),
    ]


def with_host(base=None, **host_us):
    """The costs by hand, or others, and what the host adds."""
    always = ("per_pass", "per_event", "per_arrival", "per_cpu_job")
    host = dict.fromkeys(always, 0.0) | host_us
    host = Host(**{name: Quantiles(us, us, us, 1) for name, us in host.items()})
    return LaneCosts(msgspec.structs.replace((base or costs_by_hand()).profile, host=host))


def test_the_host_has_to_notice_the_last_arrival():
    costs = with_host(per_arrival=7.0)
    run = single(Scripted(), [[0], [1]], costs=costs)
    # The first copy ends at 425, its expert at 477; of the second, there at 575, the host knows
    # at 582: one expert more, 634.
    assert times(run) == [GATE, 634, 644]
    # With four experts on the CPU until 275 + 20 + 1000 = 1295 nobody waits for that.
    run = single(Scripted(cpu=(1, 2, 3, 4)), [[0], [1], [2], [3], [4]], costs=costs)
    assert times(run) == [GATE, 1295, 1305]
    assert run.jobs("arrivals") == [("arrivals", 425, 484)]


def test_beside_copies_the_cpu_begins_later():
    costs = with_host(per_cpu_job_beside_copies=30.0)
    run = single(Scripted(cpu=(1, 2)), [[0], [1], [2]], costs=costs)
    # Two experts on the CPU: 275 + 20 + 30 + 500; the copy's expert was done at 477.
    assert times(run) == [GATE, 825, 835]
    run = single(Scripted(residents=((0, 0),), cpu=(1, 2)), [[0], [1], [2]], costs=costs)
    assert times(run) == [GATE, 795, 805]


def test_all_on_cpu():
    run = single(Scripted(cpu=(0, 1)), [[0], [1]])
    # Link 20 and two experts 500: 275 + 520 = 795.
    assert times(run) == [GATE, 795, 805]


def test_resident_on_cpu_is_a_hit():
    run = single(Scripted(residents=((0, 0),), cpu=(0,)), [[0]])
    assert times(run) == [GATE, 275 + 20 + 250, 555]
    assert (run.count("hits"), run.count("cpu_hits"), run.count("cpu_misses")) == ([1], [1], [0])


@pytest.mark.parametrize(
    ("shared_us", "calls", "end"),
    [
        # The GPU is free at 275 + 299 = 574; the second copy arrives at 275 + 300 = 575. So the
        # first expert is computed alone, 574..626, then the second, 626..678.
        (299, [(574, 626), (626, 678)], 678),
        # One microsecond later both have arrived: one call of two, 575..629.
        (300, [(575, 629)], 629),
    ],
)
def test_transfer_is_ready_when_it_has_arrived_and_not_before(shared_us, calls, end):
    run = single(Scripted(), [[0], [1]], costs=costs_by_hand(shared_expert_us=shared_us))
    assert [job[1:] for job in run.jobs("arrivals")] == calls
    assert times(run)[1] == end


def test_transfers_queue_in_the_order_of_the_event():
    run = single(Scripted(), [[3], [1], [2]])
    log = run.record.log
    assert log[log[:, 1] == 8][:, 3].tolist() == [3, 1, 2]  # 8: demand transfers
    assert [job[1:] for job in run.jobs("demand")] == [(275, 425), (425, 575), (575, 725)]
    # 725 + 52 for the last one.
    assert times(run)[1] == 777


class TestStaging:
    def test_one_slot_serialises_dropped_arrivals(self):
        run = single(Scripted(), [[0], [1]], cache=0, staging=1)
        # The first arrival holds the slot until computed: 425 + 52 = 477. Only then the second
        # copy starts: 477..627, computed 627..679.
        assert run.jobs("demand") == [("demand", 275, 425), ("demand", 477, 627)]
        assert times(run)[1] == 679

    def test_two_slots_do_not(self):
        run = single(Scripted(), [[0], [1]], cache=0, staging=2)
        assert run.jobs("demand") == [("demand", 275, 425), ("demand", 425, 575)]

    def test_kept_arrival_takes_a_free_slot_at_once(self):
        run = single(Scripted(), [[0], [1]], cache=2, staging=1)
        assert run.jobs("demand") == [("demand", 275, 425), ("demand", 425, 575)]

    def test_kept_arrival_waits_for_the_slot_of_a_resident_that_is_computed(self):
        # 0 is resident, activated and dropped (C = 1; 2 is used last and stays). Its kernel takes
        # 500 + 2: 275..777. 1 arrives at 425 and is dropped; it holds the only staging slot until
        # computed after kernel and shared expert: 777, 797..1299. Then 2 is copied: 1299..1449.
        costs = costs_by_hand(gpu_fixed_us=500)
        run = single(
            Scripted(residents=((0, 0),)), [[0], [1], [2]], cache=1, costs=costs, staging=1
        )
        assert run.jobs("demand") == [("demand", 275, 425), ("demand", 1299, 1449)]
        assert run.residents() == [2]
        # Had 1 been the one that stays, it had moved in when the kernel ended, and 2 had started.
        run = single(
            Scripted(residents=((0, 0),), last=(2,)), [[0], [1], [2]], 1, costs=costs, staging=1
        )
        assert run.jobs("demand") == [("demand", 275, 425), ("demand", 777, 927)]
        assert run.residents() == [1]

    def test_resident_that_is_not_activated_frees_its_slot_at_once(self):
        costs = costs_by_hand(gpu_fixed_us=500)
        run = single(Scripted(residents=((0, 5),)), [[1], [2]], cache=1, costs=costs, staging=1)
        # 5 leaves at the gate; 1 is dropped (2 stays), so it is computed first: 425..927.
        assert run.jobs("demand") == [("demand", 275, 425), ("demand", 927, 1077)]


def test_lanes_slow_each_other():
    # Factor 2 for every lane while another works. Gate at 275. Hit kernel (52) beside the copy
    # (150): both at half speed, the kernel ends after 104: 379. Shared expert (20) likewise: 419.
    # By then the copy has done 144 / 2 = 72 of 150; alone it needs 78 more: 497. Then 52: 549.
    run = single(Scripted(residents=((0, 0),)), [[0], [1]], costs=costs_by_hand(slowdown=2.0))
    assert run.jobs("hits", "shared", "demand", "arrivals") == [
        ("hits", 275, 379),
        ("demand", 275, 497),
        ("shared", 379, 419),
        ("arrivals", 497, 549),
    ]
    busy, critical = run.record.course.pass_times[0, 2:5], run.record.course.pass_times[0, 5:8]
    # GPU: 145 + 130 before the gate, 104 + 40 + 52 in the layer, 10 + 200 after it.
    assert busy.tolist() == [681, 222, 0]
    # The chain: copy 222, then its computation 52. GPU: 275 + 52 + 210.
    assert critical.tolist() == [537, 222, 0]


class TestPrefetch:
    """Layer 1's gate comes 130 after the merge of layer 0."""

    TRACE = request_by_hand(TWO, [[[[0]], [[5]]]])

    def test_in_time_is_a_hit(self):
        run = Run(Scripted(wanted={0: [(1, 5, 1.0)]}), TWO, self.TRACE, 2)
        # Demand of layer 0 first: 275..425, then the prefetch 425..575. Layer 0 ends at 477 + 10,
        # the next gate is at 617: the expert is resident. 617 + 52 + 20 = 689.
        assert run.jobs("demand", "prefetch") == [("demand", 275, 425), ("prefetch", 425, 575)]
        assert times(run, 1) == [617, 689, 699]
        assert (run.count("hits"), run.count("useful")) == ([0, 1], [0, 1])

    def test_in_flight_at_the_gate_is_late(self):
        costs = costs_by_hand(h2d_gb_s=20.97152)  # 300 a copy
        run = Run(Scripted(wanted={0: [(1, 5, 1.0)]}), TWO, self.TRACE, 2, costs=costs)
        # Demand 275..575, prefetch 575..875. Layer 0 ends at 575 + 52 + 10 = 637, gate at 767.
        # The copy is waited for, not sent again: 875 + 52 = 927.
        assert run.jobs("late") == [("late", 575, 875)]
        assert times(run, 1) == [767, 927, 937]
        assert (run.count("late"), run.count("demand")) == ([0, 1], [1, 0])
        assert run.record.course.pass_counts[0, 0] == 2 * 6 * 2**20  # bytes copied
        assert run.residents(1) == [5]

    def test_late_is_never_sent_to_the_cpu(self):
        costs = costs_by_hand(h2d_gb_s=20.97152)
        policy = Scripted(wanted={0: [(1, 5, 1.0)]}, cpu=(5,))
        run = Run(policy, TWO, self.TRACE, 2, costs=costs)
        assert (run.count("late"), run.count("cpu_misses")) == ([0, 1], [0, 0])

    def test_queued_one_becomes_a_demand_transfer(self):
        costs = costs_by_hand(h2d_gb_s=20.97152)
        policy = Scripted(wanted={0: [(1, 7, 2.0), (1, 5, 1.0), (1, 6, 0.5)]})
        run = Run(policy, TWO, self.TRACE, 2, costs=costs)
        # 7 has the higher priority: 575..875. 5 follows as demand, ahead of 6: 875..1175.
        assert run.jobs("demand", "prefetch")[:3] == [
            ("demand", 275, 575),
            ("prefetch", 575, 875),
            ("demand", 875, 1175),
        ]
        assert (run.count("promoted"), run.count("demand")) == ([0, 1], [1, 1])

    def test_unused_and_dropped_is_wasted(self):
        run = Run(Scripted(wanted={0: [(1, 7, 1.0)]}), TWO, self.TRACE, 1)
        # 7 arrives at 575 and fills the one slot of layer 1; 5 is used, and 7 dropped for it.
        assert run.record.course.pass_counts[0, 3:6].tolist() == [0, 0, 1]  # useful, late, wasted

    def test_one_staging_slot_stays_reserved_for_demand(self):
        run = Run(Scripted(wanted={0: [(1, 5, 1.0)]}), TWO, self.TRACE, 2, staging=1)
        assert run.jobs("prefetch") == []
        assert run.count("demand") == [1, 1]

    def test_resident_expert_is_not_copied_again(self):
        policy = Scripted(residents=((1, 5),), wanted={0: [(1, 5, 1.0)]})
        assert Run(policy, TWO, self.TRACE, 2).jobs("prefetch") == []

    def test_arrival_in_the_running_layer_waits_for_its_end(self):
        # C = 1. 3 of layer 0 is asked for at layer 0's own gate; it is copied after the demand
        # transfer of 0 (275..425) in 425..575, while 0 is computed until 425 + 502 = 927: its slot
        # must not be taken before. Then 0 is the more recently used, and 3 is wasted.
        costs = costs_by_hand(gpu_fixed_us=500)
        run = Run(Scripted(wanted={0: [(0, 3, 1.0)]}), TWO, self.TRACE, 1, costs=costs)
        assert run.jobs("prefetch") == [("prefetch", 425, 575)]
        assert run.residents(0) == [0]
        assert run.record.course.pass_counts[0, 5] == 1


class TestTheHostStartsPrefetches:
    """40 after a gate and 30 after the one before. Without misses layer 1's gate is at 487."""

    TRACE = request_by_hand(TWO, [[[[0]], [[5]]]])
    COSTS = with_host(first_prefetch=40.0, per_prefetch=30.0)
    WANTED: ClassVar = {0: [(1, 6, 2.0), (1, 7, 1.0)]}

    def test_not_before_what_was_decided_is_launched(self):
        policy = Scripted(residents=((0, 0), (1, 5)), wanted=self.WANTED)
        run = Run(policy, TWO, self.TRACE, 4, costs=self.COSTS)
        # 275 + 40, and 465 + 30 = 495; but at 487 comes the next gate, which has it wait for 527.
        assert run.jobs("prefetch") == [("prefetch", 315, 465), ("prefetch", 527, 677)]
        assert times(run, 1) == [487, 559, 569]

    def test_one_after_the_other(self):
        policy = Scripted(residents=((0, 0), (1, 5)), cpu=(0,), wanted=self.WANTED)
        run = Run(policy, TWO, self.TRACE, 4, costs=self.COSTS)
        # The CPU works until 275 + 20 + 250 = 545, the gate of layer 1 is at 685.
        assert run.jobs("prefetch") == [("prefetch", 315, 465), ("prefetch", 495, 645)]

    def test_demand_goes_before_what_the_host_has_not_started(self):
        policy = Scripted(residents=((0, 0),), wanted=self.WANTED)
        run = Run(policy, TWO, self.TRACE, 4, costs=self.COSTS)
        assert run.jobs("demand", "prefetch") == [
            ("prefetch", 315, 465),
            ("demand", 487, 637),
            ("prefetch", 637, 787),
        ]
        assert times(run, 1) == [487, 689, 699]

    def test_behind_a_demand_transfer_nothing_is_waited_for(self):
        run = Run(Scripted(wanted=self.WANTED), TWO, self.TRACE, 4, costs=self.COSTS)
        assert run.jobs("demand", "prefetch")[:2] == [("demand", 275, 425), ("prefetch", 425, 575)]

    def test_the_engine_is_busy_with_copies_alone(self):
        policy = Scripted(residents=((0, 0), (1, 5)), wanted=self.WANTED)
        run = Run(policy, TWO, self.TRACE, 4, costs=self.COSTS)
        assert run.record.course.pass_times[0, 3] == 300.0

    def test_an_older_profile_has_the_copy_engine_wait(self):
        policy = Scripted(residents=((0, 0),), wanted=self.WANTED)
        run = Run(policy, TWO, self.TRACE, 4, costs=with_host(per_prefetch=30.0))
        assert run.jobs("demand", "prefetch")[:3] == [
            ("prefetch", 275, 455),
            ("prefetch", 455, 635),
            ("demand", 635, 785),
        ]


class TestTheHostGoesOnToTheNextLayer:
    """Without misses layer 0 is computed from its gate at 275 to 347, and merged until 357; the
    routing of layer 1 is there at 487. The host starts prefetches 10 after a gate and 5 after the
    one before, the first from 285 to 435."""

    TRACE = request_by_hand(TWO, [[[[0]], [[5]]]])

    def run(self, experts=(6, 7), base=None, **host):
        wanted = {0: [(1, expert, -float(expert)) for expert in experts]}
        policy = Scripted(residents=((0, 0), (1, 5)), wanted=wanted)
        if "gate_after_prefetch" in host:
            host = {"prefetch_after_layer": 0.0} | host
        costs = with_host(base, **({"first_prefetch": 10.0, "per_prefetch": 5.0} | host))
        return Run(policy, TWO, self.TRACE, 4, costs=costs)

    def test_before_it_starts_another_prefetch(self):
        run = self.run(prefetch_after_layer=120.0, gate_after_prefetch=0.0)
        # 347 + 120, and not 435 + 5
        assert run.jobs("prefetch") == [("prefetch", 285, 435), ("prefetch", 467, 617)]
        assert times(run, 1) == [487, 559, 569]

    def test_and_sees_a_gate_once_a_prefetch_is_started(self):
        run = self.run(gate_after_prefetch=80.0)
        assert run.jobs("prefetch") == [("prefetch", 285, 435), ("prefetch", 440, 590)]
        assert times(run, 1) == [440 + 80, 520 + 72, 592 + 10]

    def test_a_prefetch_long_before_the_gate_delays_nothing(self):
        assert times(self.run(gate_after_prefetch=40.0), 1) == [487, 559, 569]

    def test_no_prefetch_is_started_once_the_routing_is_there(self):
        # 435 + 60 is after 487; the next gate has it wait until 497.
        run = self.run(per_prefetch=60.0, gate_after_prefetch=80.0)
        assert run.jobs("prefetch")[1] == ("prefetch", 497, 647)
        assert times(run, 1) == [487, 559, 569]

    def test_the_rule_holds_where_it_takes_no_time(self):
        # As it counts whether a profile has the time, not how long it is.
        run = self.run(per_prefetch=60.0, per_event=30.0, gate_after_prefetch=0.0)
        assert run.jobs("prefetch") == [("prefetch", 315, 465), ("prefetch", 557, 707)]
        run = self.run(per_prefetch=60.0, per_event=30.0)
        assert run.jobs("prefetch") == [("prefetch", 315, 465), ("prefetch", 525, 675)]

    def test_what_the_host_adds_to_an_event_comes_after_the_routing(self):
        # All gates are 30 later: 305 and 547, where the routing is there at 517. The first
        # prefetch runs from 315 to 465, the second would start at 465 + 60 = 525: after 547 + 10.
        run = self.run(per_prefetch=60.0, per_event=30.0, gate_after_prefetch=80.0)
        assert run.jobs("prefetch") == [("prefetch", 315, 465), ("prefetch", 557, 707)]

    def test_short_copies_cannot_put_a_gate_off_for_ever(self):
        # Copies take 15: they start at 375, 395, 415, 435, 455, 475; by 495 the routing is there.
        fast = costs_by_hand(h2d_gb_s=419.4304)
        experts = (0, 1, 2, 3, 4, 6, 7)
        run = self.run(experts, fast, first_prefetch=100.0, gate_after_prefetch=80.0)
        assert times(run, 1)[0] == 475 + 80
        assert [start for _, start, _ in run.jobs("prefetch")] == [
            375, 395, 415, 435, 455, 475, 555 + 100,
        ]  # fmt: skip


def test_a_new_list_replaces_the_queue_only_if_the_policy_says_so():
    @dataclass
    class Replacing(Scripted):
        replaces_queue = True

    # A copy takes 1500: 0 until 1775, then the prefetch of 6 until 3275, then 5, asked for at 1967,
    # when the list of layer 0 still holds 7. Layer 1 adds 3, or replaces 7 by 3; 3 goes first.
    trace = request_by_hand(TWO, [[[[0]], [[5]]]])
    wanted = {0: [(1, 6, 1.0), (1, 7, 0.5)], 1: [(0, 3, 1.0)]}
    costs = costs_by_hand(h2d_gb_s=4.194304)
    for policy, queued in ((Scripted(wanted=wanted), [(1, 7)]), (Replacing(wanted=wanted), [])):
        run = Run(policy, TWO, trace, 4, costs=costs)
        entry, size = run.simulation.state.queue.entry, run.simulation.work[QUEUED]
        assert [tuple(row[:2]) for row in entry[:size].tolist()] == queued


def test_batch_pays_for_its_tokens_and_the_union_of_experts():
    # Two requests of one token each: dense part of 2 tokens, two misses in one event.
    traces = [request_by_hand(ONE, [[[[e]]]], request=e) for e in (0, 1)]
    costs = costs_by_hand(dense_per_token_us=10.0)
    run = Run(Policy(), ONE, traces, 4, costs=costs, batch=2)
    # 5 + (100 + 2·10) + 40 = 165; gate at 165 + 120 + 30 = 315; copies until 615; 615 + 52.
    assert times(run) == [315, 667, 677]
    assert run.count("activated") == [2]
