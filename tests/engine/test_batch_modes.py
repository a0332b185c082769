"""Batches in lock step, with a barrier after every block, and refilled (spec §4)."""

from dataclasses import dataclass, field
from heapq import heapreplace

import numpy as np
import pytest
from how_many import examples
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_laws import COSTS, Erratic

from oled_sim.engine import laws
from oled_sim.engine.batch import batch_of, make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.feeding import feed
from oled_sim.engine.members import Member, barrier, lockstep, stretch
from oled_sim.engine.rules import Group, Rules, split_requests
from oled_sim.engine.runner import Contender, simulate, simulate_all
from oled_sim.engine.simulation import Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Policy
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.trace.schema import Kind

ONE = RoutingGeometry((1,), 8, 1)
P, D, C = Kind.PREFILL, Kind.DENOISE, Kind.COMMIT
ALONE, BOTH = 687, 837
"""µs of a pass without a cache in which one expert is activated, and two: 145 + 130 to the gate,
copies of 150, 52 to compute the last, then 10 + 200."""


def made(request, kinds, blocks=None):
    """A request of one token per pass that always uses the expert of its number."""
    passes = [[[[request]]]] * len(kinds)
    return request_by_hand(ONE, passes, request=request, kinds=kinds, blocks=blocks)


@dataclass
class Diary(Policy):
    """Notes who starts, passes and ends when."""

    seen: list = field(default_factory=list)

    def __deepcopy__(self, memo):
        return self

    def begin_request(self, info):
        self.seen.append(f"+{info.request}")
        return ()

    def dispatch(self, event):
        owners = ",".join(map(str, event.owner))
        self.seen.append(f"{owners}@{event.pass_index}")
        return super().dispatch(event)

    def end_iteration(self, end):
        self.seen.append(f"{end.request}:{end.pass_index}")

    def end_request(self, summary):
        self.seen.append(f"-{summary.request} {tuple(summary)[1:]}")


def run(traces, outputs, **rules):
    policy, source = Diary(), MemoryTrace(ONE, traces, outputs=outputs)
    settings = Rules(history=0, warmup=0, **rules)
    return simulate(source, policy, costs_by_hand(), 0, settings), policy.seen


class TestBarrier:
    """Request 0: blocks of 3 and 1 passes; request 1: blocks of 2 and 2 passes."""

    TRACES = (made(0, [P, D, D, D], [0, 0, 0, 1]), made(1, [P, D, D, C], [4, 4, 5, 5]))

    def test_in_lock_step_nobody_waits(self):
        result, _ = run(self.TRACES, {0: 3, 1: 2}, batch=2)
        assert [r.decode_us for r in result.requests] == [3 * BOTH] * 2
        assert [r.waited_us for r in result.requests] == [0, 0]

    def test_blocks_start_together(self):
        result, notes = run(self.TRACES, {0: 3, 1: 2}, batch=2, batch_mode="barrier")
        # Pass 2 is request 0 alone, which ends its block; pass 4 is request 1 alone.
        assert [n for n in notes if "@" in n] == ["0,1@0", "0,1@1", "0@2", "0,1@3", "1@3"]
        assert [n for n in notes if ":" in n][4:] == ["0:2", "0:3", "1:2", "1:3"]
        first, second = result.requests
        assert (first.decode_us, first.waited_us) == (BOTH + ALONE + BOTH, 0)
        assert (second.decode_us, second.waited_us) == (BOTH + ALONE + BOTH + ALONE, ALONE)
        # The wait is time, not work: passes 1, 2, 3 and 1, 3, 4.
        assert (first.passes, second.passes) == (3, 3)
        assert (first.activations, second.activations) == (2 + 1 + 2, 2 + 2 + 1)
        assert second.tpot_us == (2 * BOTH + 2 * ALONE) / 2
        assert second.commit_tpot_us == ALONE / 2
        assert second.gpu_critical_us + second.h2d_critical_us == second.decode_us
        assert result.summary.batch_tpot_us == (2 * BOTH + 2 * ALONE) / 5

    def test_who_waits_keeps_its_keys(self):
        traces = [
            request_by_hand(ONE, [[[[0]]]] * 3, context=[0, 7, 8]),
            request_by_hand(ONE, [[[[0]]]] * 3, request=1, context=[0, 20, 30], blocks=[0, 1, 1]),
        ]
        batch = make_batch(traces, ONE, costs_by_hand(), mode="barrier")
        # One token a pass. Request 1 sits out passes 1 and 2 with the key of its first pass.
        assert batch.context_tokens.tolist() == [1 + 1, 8 + 1, 9 + 1, 21, 31]


class TestRefill:
    """Two places for requests of 2, 4, 3 and 2 passes."""

    TRACES = (made(0, [P, D]), made(1, [P, D, D, D]), made(2, [P, D, D]), made(3, [P, D]))
    OUTPUTS = {0: 1, 1: 3, 2: 2, 3: 1}  # noqa: RUF012

    def test_next_request_takes_the_place_of_one_that_ended(self):
        result, notes = run(self.TRACES, self.OUTPUTS, batch=2, batch_mode="refill")
        assert [n for n in notes if ":" not in n] == [
            "+0", "+1", "0,1@0", "0,1@1", "-0 (2, 0, 2)",
            "+2", "1,2@2", "1,2@3", "-1 (4, 0, 6)",
            "+3", "2,3@2", "3@1", "-2 (3, 0, 4)", "-3 (2, 0, 1)",
        ]  # fmt: skip
        assert [n for n in notes if ":" in n] == [
            "0:0", "1:0", "0:1", "1:1", "1:2", "2:0", "1:3", "2:1", "2:2", "3:0", "3:1",
        ]  # fmt: skip
        assert [r.request for r in result.requests] == [0, 1, 2, 3]
        assert [r.prefill_us for r in result.requests] == [BOTH] * 4
        assert [r.decode_us for r in result.requests] == [BOTH, 3 * BOTH, 2 * BOTH, ALONE]
        # From its own start to the end of the first denoise pass.
        assert [r.ttft_us for r in result.requests] == [2 * BOTH] * 3 + [BOTH + ALONE]
        # Only the first pass is prefill for all who are there.
        assert result.summary.batch_tpot_us == (4 * BOTH + ALONE) / 7
        assert (result.summary.passes, result.summary.output_tokens) == (5, 7)

    def test_stretches(self):
        rules = Rules(history=0, warmup=0, batch=2, batch_mode="refill")
        source = MemoryTrace(ONE, self.TRACES)
        splits = split_requests(source.requests, rules)
        fed = list(feed(source, splits, rules, costs_by_hand(), learns=False))
        assert [group for group, _ in fed] == [
            Group("counted", (0, 1), (), (1,)),
            Group("counted", (1, 2), (1,), (2,)),
            Group("counted", (2, 3), (2,), ()),
        ]
        assert [(batch.start, batch.passes) for _, batch in fed] == [(0, 2), (2, 2), (4, 2)]
        assert [group.begins for group, _ in fed] == [(0, 1), (2,), (3,)]
        assert [group.ends for group, _ in fed] == [(0,), (1,), (2, 3)]

    def test_holds_no_more_requests_than_places(self):
        reads = []

        class Counting(MemoryTrace):
            def read(self, request):
                reads.append(request)
                return super().read(request)

        rules = Rules(history=0, warmup=0, batch=2, batch_mode="refill")
        source = Counting(ONE, self.TRACES)
        splits = split_requests(source.requests, rules)
        for group, _ in feed(source, splits, rules, costs_by_hand(), learns=False):
            assert reads == list(range(group.requests[-1] + 1))

    def test_splits_do_not_mix(self):
        rules = Rules(history=1, warmup=1, batch=2, batch_mode="refill")
        source = MemoryTrace(ONE, self.TRACES)
        fed = feed(
            source, split_requests(source.requests, rules), rules, costs_by_hand(), learns=True
        )
        found = [(group.split, group.requests) for group, _ in fed]
        assert found == [("history", (0,)), ("warmup", (1,)), ("counted", (2, 3))]

    def test_cold_starts_are_refused(self):
        with pytest.raises(UsageError, match="impossible while others run"):
            Rules(cold=True, batch_mode="refill")


@st.composite
def requests(draw):
    """A geometry and requests of different lengths."""
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 8))
    geometry = RoutingGeometry(tuple(range(1, layers + 1)), experts, min(2, experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return geometry, [
        random_request(rng, geometry, request=i, passes=passes, tokens=draw(st.integers(1, 3)))
        for i, passes in enumerate(draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    ]  # fmt: skip


def refilled_at_once(traces, places):
    """All requests as members of batches: each takes the place that is free first.

    Where all places become free at once nothing goes on, and another batch begins.
    """
    batches, free = [], [0] * places
    for trace in traces:
        if not batches or min(free) == max(free):
            batches.append([])
            free = [0] * places
        start = free[0]
        batches[-1].append(Member(trace, 0, trace.passes, start + np.arange(trace.passes)))
        heapreplace(free, start + trace.passes)
    return batches


def course_of(records):
    """Join the measurements of several records."""
    names = ("counts", "times", "pass_counts", "pass_times")
    return [np.concatenate([getattr(r.course, n) for r in records]) for n in names]


quick = settings(max_examples=examples(60), deadline=None, derandomize=True)
policies = st.one_of(
    st.sampled_from(["lru", "lfu", "oled", "ideal", "belady"]).map(parse_policy),
    st.builds(Erratic, seed=st.integers(0, 99)),
)


@quick
@given(
    requests(), policies, st.integers(1, 4), st.integers(0, 8), st.sampled_from(sorted(COSTS)),
    st.sampled_from(["layer", "global"]), st.sampled_from(["previous", "end", "current"]),
)  # fmt: skip
def test_refilling_as_needed_is_the_same_as_all_requests_at_once(
    given, policy, places, cache, costs, scope, confidence
):
    geometry, traces = given
    rules = Rules(
        history=0, warmup=0, batch=places, batch_mode="refill", scope=scope, staging=2,
        confidence=confidence,
    )  # fmt: skip
    batches = refilled_at_once(traces, places)
    if "future" in policy.needs:  # a batch by itself knows nothing of the next
        assume(len(batches) == 1)
    records = []
    simulate_all(
        MemoryTrace(geometry, traces), [Contender("p", policy, Budget(cache=cache))], COSTS[costs],
        rules, observe=lambda _, record: records.append(record),
    )  # fmt: skip
    simulation = Simulation(policy, geometry, COSTS[costs], Budget(cache=cache), rules)
    at_once = []
    for members in batches:
        group = Group("counted", tuple(m.whole.request for m in members))
        whole = batch_of(members, geometry, COSTS[costs], confidence)
        at_once.append(simulation.run_group(group, whole))
        laws.check_cheap(at_once[-1], simulation.state, rules)
    for a, b in zip(course_of(records), course_of(at_once), strict=True):
        assert a.tobytes() == b.tobytes()
    passes = [r.batch.start + r.course.event_pass for r in records]
    wanted = [r.course.event_pass for r in at_once]
    assert np.concatenate(passes).tolist() == np.concatenate(wanted).tolist()


@quick
@given(requests(), st.integers(1, 4))
def test_one_place_needs_no_mode(given, cache):
    geometry, traces = given
    results = [
        simulate(
            MemoryTrace(geometry, traces), parse_policy("lru"), COSTS["plain"], cache,
            Rules(history=0, warmup=0, batch_mode=mode),
        )
        for mode in ("lockstep", "barrier", "refill")
    ]  # fmt: skip
    first, *others = ((r.requests, r.summary) for r in results)
    assert all(repr(other) == repr(first) for other in others)


@quick
@given(requests())
def test_a_barrier_lines_up_blocks_and_loses_no_pass(given):
    _, traces = given
    members = barrier(traces)
    starts = []
    for member in members:
        block = member.whole.block
        new = np.flatnonzero(np.diff(block, prepend=block[0] - 1))
        starts.append(member.at[new].tolist())
        assert (np.diff(member.at) >= 1).all() and len(member.at) == member.whole.passes
        within = np.diff(member.at) == 1
        assert within[np.diff(block) == 0].all()  # nobody waits inside a block
    longest = max(starts, key=len)
    assert all(s == longest[: len(s)] for s in starts)
    # No pass is empty, and none starts later than it must.
    assert {int(p) for m in members for p in m.at} == set(range(1 + max(m.at[-1] for m in members)))
    for k, start in enumerate(longest[1:]):
        ends = [m.at[m.at < start].max() for m in members if len(starts[members.index(m)]) > k]
        assert max(ends) + 1 == start


@quick
@given(requests(), st.data())
def test_stretches_of_a_request_make_up_the_request(given, data):
    _, (trace, *_) = given
    cut = data.draw(st.integers(0, trace.passes))
    parts = [stretch(trace, a, b) for a, b in ((0, cut), (cut, trace.passes)) if a < b]
    for name in ("kind", "context", "position", "confidence", "experts", "gates", "event_layer"):
        joined = np.concatenate([getattr(p, name) for p in parts])
        assert joined.tobytes() == getattr(trace, name).tobytes()
    for name in ("row_token", "event_pass"):
        assert getattr(parts[-1], name).min() == 0
    assert sum(p.events for p in parts) == trace.events
    assert [p.token_offset[0] for p in parts] == [0] * len(parts)


def test_lock_step_is_every_pass():
    (member,) = lockstep([made(0, [P, D, D])])
    assert member.at.tolist() == [0, 1, 2] and member.trace is member.whole
