"""The Perfetto trace of a run, read back with Perfetto's own protobuf classes."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from how_many import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackDescriptor, TrackEvent

from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.runner import Contender, simulate_all
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import EVENT_COUNTS, H2D, IDLE, KIND, PASS_COUNTS, QUEUED, USED
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Lane, Policy, Prefetch, param
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import Run, costs_by_hand, request_by_hand
from oled_sim.testing.traces import random_request
from oled_sim.timeline_export import TimelineFile
from oled_sim.timeline_export.drawing import Clock, changes

MIB = 2**20
GEOMETRY = RoutingGeometry((1, 2, 5), 16, 2)
EXPERT_BYTES = np.full(3, 6 * MIB)


class Slice(NamedTuple):
    begin: int
    end: int
    name: str
    category: str
    arguments: dict
    depth: int


@dataclass
class Timeline:
    """A trace as Perfetto's trace processor sees it, by (process, track)."""

    processes: list = field(default_factory=list)
    threads: dict = field(default_factory=dict)  # by process and rank
    numbers: dict = field(default_factory=dict)  # pids and tids
    slices: dict = field(default_factory=dict)
    counters: dict = field(default_factory=dict)


def read(path):
    """Decode a trace; every rule of the format that it may break is an assertion."""
    trace = Trace()
    trace.ParseFromString(path.read_bytes())
    strings = {"event_names": {}, "event_categories": {}, "debug_annotation_names": {}}
    found, names, open_slices, events = Timeline(), {}, {}, []
    for i, packet in enumerate(trace.packet):
        assert packet.trusted_packet_sequence_id == 1
        for kind, known in strings.items():
            for entry in getattr(packet.interned_data, kind):
                assert entry.iid not in known and entry.iid > 0
                known[entry.iid] = entry.name
        if packet.HasField("track_descriptor"):
            _add_track(found, names, packet.track_descriptor)
        else:
            assert packet.HasField("timestamp") and packet.timestamp >= 0
            events.append((packet.timestamp, i, packet.track_event))
    assert trace.packet[0].sequence_flags == 1  # incremental state starts here
    # The trace processor sorts by time; packets of one moment stay in the order of the file.
    for time, _, event in sorted(events, key=lambda e: e[:2]):
        track = names[event.track_uuid]
        stack = open_slices.setdefault(track, [])
        if event.type == TrackEvent.TYPE_SLICE_BEGIN:
            arguments = {
                strings["debug_annotation_names"][a.name_iid]: getattr(a, a.WhichOneof("value"))
                for a in event.debug_annotations
            }
            (category,) = event.category_iids
            labels = strings["event_names"][event.name_iid], strings["event_categories"][category]
            stack.append((time, *labels, arguments))
        elif event.type == TrackEvent.TYPE_SLICE_END:
            begin, name, category, arguments = stack.pop()
            found.slices.setdefault(track, []).append(
                Slice(begin, time, name, category, arguments, len(stack))
            )
        else:
            assert event.type == TrackEvent.TYPE_COUNTER
            found.counters.setdefault(track, []).append((time, event.counter_value))
    assert not any(open_slices.values())
    return found


def _add_track(found, names, descriptor):
    if descriptor.uuid == 0:
        assert descriptor.process_ordering == TrackDescriptor.PROCESS_ORDERING_EXPLICIT
        assert descriptor.thread_ordering == TrackDescriptor.THREAD_ORDERING_EXPLICIT
        return
    assert descriptor.uuid not in names
    process, thread = descriptor.process, descriptor.thread
    if descriptor.HasField("process"):
        assert process.pid not in found.numbers
        assert descriptor.sibling_order_rank == len(found.processes) + 1
        found.numbers[process.pid] = process.process_name
        found.processes.append(process.process_name)
        names[descriptor.uuid] = (process.process_name,)
    elif descriptor.HasField("thread"):
        # The trace processor takes a number that it has seen for the same thread or process.
        assert thread.tid not in found.numbers
        found.numbers[thread.tid] = thread.thread_name
        names[descriptor.uuid] = (found.numbers[thread.pid], thread.thread_name)
        rank = descriptor.sibling_order_rank
        found.threads.setdefault(found.numbers[thread.pid], {})[rank] = thread.thread_name
    else:
        names[descriptor.uuid] = (*names[descriptor.parent_uuid], descriptor.name)


def check_nesting(timeline):
    """No slice ends before it begins or crosses another one of its track."""
    for slices in timeline.slices.values():
        by_depth = {}
        for piece in slices:
            assert piece.end >= piece.begin
            by_depth.setdefault(piece.depth, []).append(piece)
        for level in by_depth.values():
            assert all(a.end <= b.begin for a, b in pairwise(level))
    for values in timeline.counters.values():
        assert all(a[0] <= b[0] and a != b for a, b in pairwise(values))


def write(path, record, *, layers, expert_bytes, name="by-hand", **options):
    with TimelineFile(path, layers, expert_bytes, **options) as file:
        file.add(Contender(name, Policy(), Budget(cache=4)), record)
    return read(path)


class Placing(Policy):
    """Expert 5 of the second layer is resident from the start."""

    def place(self, setting):
        mask = np.zeros((2, self.experts), bool)
        mask[1, 5] = True
        return mask


def test_two_events_by_hand(tmp_path):
    """Costs in µs: start 145, dense part with gate 130, copy 150, shared 20, n experts 50 + 2n,
    merge 10, LM head 200. Layer 1 misses 0 and 1; layer 4 hits 5.

    Layer 1: gate at 145 + 130 = 275. Copies 275..425 and 425..575; shared expert 275..295; the
    arrivals are computed one by one, 425..477 and 575..627; merge 627..637.
    Layer 4: gate at 637 + 130 = 767; hits 767..819, shared 819..839, merge 839..849.
    LM head 849..1049.
    """
    trace = request_by_hand(
        RoutingGeometry((1, 4), 8, 1), [[[[0], [1]], [[5], [5]]]], request=3, context=[7]
    )
    run = Run(Placing(), RoutingGeometry((1, 4), 8, 1), trace, 4)
    found = write(
        tmp_path / "t", run.record, layers=(1, 4), expert_bytes=np.full(2, 6 * MIB), name="lru"
    )
    assert found.processes == ["lru (cache 4)"]
    assert found.threads["lru (cache 4)"] == {
        1: "requests, passes, layers", 2: "GPU", 3: "H2D copy engine", 4: "CPU workers",
    }  # fmt: skip
    lanes = {name[-1]: slices for name, slices in found.slices.items()}
    assert [s[:5] for s in lanes["GPU"]] == [
        (0, 145_000, "embedding + dense layers", "start", {"pass": 0}),
        (145_000, 275_000, "attention + gate", "dense", {"pass": 0, "layer": 1, "tokens": 2}),
        (275_000, 295_000, "shared expert", "shared", {"pass": 0, "layer": 1, "tokens": 2}),
        (425_000, 477_000, "arrivals", "arrivals", {"pass": 0, "layer": 1, "experts": 1,
                                                    "tokens": 1}),
        (575_000, 627_000, "arrivals", "arrivals", {"pass": 0, "layer": 1, "experts": 1,
                                                    "tokens": 1}),
        (627_000, 637_000, "merge", "merge", {"pass": 0, "layer": 1, "tokens": 2}),
        (637_000, 767_000, "attention + gate", "dense", {"pass": 0, "layer": 4, "tokens": 2}),
        (767_000, 819_000, "hits", "hits", {"pass": 0, "layer": 4, "experts": 1, "tokens": 2}),
        (819_000, 839_000, "shared expert", "shared", {"pass": 0, "layer": 4, "tokens": 2}),
        (839_000, 849_000, "merge", "merge", {"pass": 0, "layer": 4, "tokens": 2}),
        (849_000, 1_049_000, "LM head + sampling", "head", {"pass": 0}),
    ]  # fmt: skip
    copied = {"pass": 0, "layer": 1, "tokens": 1, "bytes": 6 * MIB}
    assert [s[:5] for s in lanes["H2D copy engine"]] == [
        (275_000, 425_000, "E0 demand", "demand", copied | {"expert": 0}),
        (425_000, 575_000, "E1 demand", "demand", copied | {"expert": 1}),
    ]
    assert "CPU workers" not in lanes
    work = [(s.begin, s.end, s.name, s.depth) for s in lanes["requests, passes, layers"]]
    assert sorted(work) == [
        (0, 1_049_000, "prefill 0", 1),
        (0, 1_049_000, "request 3", 0),
        (145_000, 637_000, "layer 1", 2),
        (637_000, 849_000, "layer 4", 2),
    ]
    whole = next(s for s in lanes["requests, passes, layers"] if s.depth == 1).arguments
    expected = {"kind": "prefill", "requests": "3", "block": 0, "tokens": 2, "kept_tokens": 9}
    assert whole.items() >= expected.items()
    # GPU: 145 + 130 + 20 + 52 + 52 + 10, 130 + 52 + 20 + 10, 200; H2D: two copies.
    assert (whole["gpu_busy_us"], whole["h2d_busy_us"]) == (821.0, 300.0)
    layer = next(s for s in lanes["requests, passes, layers"] if s.name == "layer 1").arguments
    assert (layer["pass"], layer["layer"]) == (0, 1)
    assert (layer["activated"], layer["demand"], layer["hits"]) == (2, 2, 0)
    # From 145 on: copies 300, the last one computed 52, 130 before the gate, merge 10.
    critical = [layer[f"{lane}_critical_us"] for lane in ("gpu", "h2d", "cpu")]
    assert critical == [192.0, 300.0, 0.0]
    counters = {name[-1]: values for name, values in found.counters.items()}
    # A kept arrival leaves staging at once: free slots are there.
    assert counters["staging slots in use"] == [
        (0, 0), (275_000, 1), (575_000, 0), (1_049_000, 0),
    ]  # fmt: skip
    assert counters["demand transfers waiting"] == [
        (0, 0), (275_000, 1), (425_000, 0), (1_049_000, 0),
    ]  # fmt: skip
    assert counters["prefetches waiting"] == [(0, 0), (1_049_000, 0)]
    # Kept arrivals count from the gate on, where it is decided.
    assert counters["residents"] == [(0, 1), (275_000, 3), (1_049_000, 3)]
    assert counters["residents of layer 1"] == [(0, 0), (275_000, 2), (1_049_000, 2)]
    assert counters["residents of layer 4"] == [(0, 1), (1_049_000, 1)]


def test_prefetch_and_late_by_hand(tmp_path):
    """A copy takes 300. Layer 0 of 2 prefetches 5 and 6 of layer 1; 5 is in flight at its gate.

    Gate of layer 0 at 275: demand of 0 275..575, prefetch of 5 575..875, late: layer 0 ends at
    575 + 52 + 10 = 637, the next gate is at 767. 6 is copied 875..1175, across the end of the
    pass: 5 is computed 875..927, merge ..937, LM head ..1137.
    """

    class Asking(Policy):
        def prefetch(self, event):
            wanted = [Prefetch(1, 5, 2.0), Prefetch(1, 6, 1.0)]
            return wanted if event.pass_index == event.layer == 0 else []

    geometry = RoutingGeometry((1, 2), 8, 1)
    trace = request_by_hand(geometry, [[[[0]], [[5]]]] * 2)
    run = Run(Asking(), geometry, trace, 2, costs=costs_by_hand(h2d_gb_s=20.97152))
    found = write(tmp_path / "t", run.record, layers=(1, 2), expert_bytes=np.full(2, 6 * MIB))
    (copies,) = (s for name, s in found.slices.items() if name[-1] == "H2D copy engine")
    assert [s[:3] for s in copies] == [
        (275_000, 575_000, "E0 demand"),
        (575_000, 875_000, "E5 late prefetch"),
        (875_000, 1_175_000, "E6 prefetch for layer 2"),
    ]
    assert copies[2].arguments == {"pass": 1, "layer": 2, "expert": 6, "bytes": 6 * MIB}
    waiting = found.counters["by-hand (cache 4)", "prefetches waiting"]
    # Both from 275 on, then one after another.
    assert waiting[:4] == [(0, 0), (275_000, 2), (575_000, 1), (875_000, 0)]
    staging = found.counters["by-hand (cache 4)", "staging slots in use"]
    assert staging[:4] == [(0, 0), (275_000, 1), (1_175_000, 0), (staging[-1][0], 0)]


@dataclass
class Erratic(Policy):
    """Every lane an expert can take, scores with ties and −∞, prefetches, moving capacities."""

    seed: int = param(0, "seed")

    def place(self, setting):
        self._rng = np.random.default_rng(self.seed)

    @property
    def allocation_period(self):
        return 2

    def allocate(self, history):
        weight = self._rng.integers(1, 4, len(history.capacity)).astype(float)
        return history.budget * weight / weight.sum()

    def dispatch(self, event):
        to_cpu = self._rng.random(len(event.experts)) < 0.3
        return np.where(to_cpu, Lane.CPU, super().dispatch(event))

    def score(self, layer, event):
        return self._rng.choice([-np.inf, 0.0, 1.0, 2.0], self.experts)

    def prefetch(self, event):
        wanted = self._rng.integers(0, [3, self.experts], (3, 2))
        return [Prefetch(int(a), int(b), float(self._rng.integers(0, 3))) for a, b in wanted]


COSTS = {
    "plain": costs_by_hand(),
    "odd": costs_by_hand(slowdown=1.37, h2d_gb_s=9.713, gpu_per_token_us=0.7311, embedding_us=0.0),
    "free": costs_by_hand(merge_us=0.0, shared_expert_us=0.0, gate_us=0.0),
}


def requests(count, seed=0, passes=8):
    rng = np.random.default_rng(seed)
    return [random_request(rng, GEOMETRY, request=i, passes=passes) for i in range(count)]


def simulate(path, policy, costs, *, cache=4, drawn=1, traces=None, **rules):
    """Return (result, records of counted groups, timeline) of one run."""
    records: list[GroupRecord] = []
    contender = Contender("run", policy, Budget(cache=cache))
    given = traces or requests(4)
    numbers = [t.request for t in given]
    settings = Rules(**({"history": 0, "warmup": 1} | rules))
    wanted = numbers[settings.warmup :][:drawn]
    with TimelineFile(path, GEOMETRY.layers, EXPERT_BYTES, requests=wanted) as file:

        def observe(contender, record):
            file.add(contender, record)
            records.append(record)

        source = MemoryTrace(GEOMETRY, given)
        (result,) = simulate_all(
            source, [contender], costs, settings, observe=observe, keep_log=file.draws
        )
    return result, [r for r in records if r.group.split == "counted"], read(path)


def overlap_ns(slices, windows):
    """Time of slices inside of windows."""
    return sum(max(0, min(s.end, b) - max(s.begin, a)) for s in slices for a, b in windows)


anywhere = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@anywhere
@given(
    policy=st.one_of(
        st.sampled_from(["lru", "oled", "ideal", "lru:dispatch=load"]).map(parse_policy),
        st.builds(Erratic, seed=st.integers(0, 99)),
    ),
    costs=st.sampled_from(sorted(COSTS)),
    cache=st.integers(0, 16),
    rules=st.fixed_dictionaries(
        {
            "scope": st.sampled_from(["layer", "global"]),
            "batch": st.integers(1, 2),
            "staging": st.integers(1, 4),
            "cold": st.booleans(),
        }
    ),
    drawn=st.integers(1, 3),
)
def test_agrees_with_the_figures_of_the_run(tmp_path, policy, costs, cache, rules, drawn):
    result, records, found = simulate(
        tmp_path / "t", policy, COSTS[costs], cache=cache, drawn=drawn, **rules
    )
    check_nesting(found)
    groups = records[: -(-drawn // rules["batch"])]
    started = sum(r.course.pass_counts[:, PASS_COUNTS.index("prefetched")].sum() for r in groups)
    # A copy may be in flight when drawing starts and when it ends; a cold start loses it.
    check_counts(found, groups, started, lost=len(groups) if rules["cold"] else 1)
    if rules["batch"] == 1:
        whole = not started or (drawn > 1 and not rules["cold"])
        check_busy(found, result.requests[0], whole=whole)


@pytest.mark.parametrize("mode", ["barrier", "refill"])
def test_passes_of_a_batch_are_numbered_through(tmp_path, mode):
    rng = np.random.default_rng(8)
    traces = [random_request(rng, GEOMETRY, request=i, passes=4 + 5 * i % 13) for i in range(6)]
    result, records, found = simulate(
        tmp_path / "t", parse_policy("lru"), COSTS["odd"], drawn=9, traces=traces, batch=2,
        batch_mode=mode,
    )  # fmt: skip
    check_nesting(found)
    check_counts(found, records, 0, lost=0)
    work = next(s for name, s in found.slices.items() if name[-1] == "requests, passes, layers")
    numbers = [s.arguments["pass"] for s in work if s.depth == 1]
    assert numbers == [r.batch.start + p for r in records for p in range(r.batch.passes)]
    assert numbers.count(0) < len(records) or mode == "barrier"
    shown = {int(n) for s in work if s.depth == 1 for n in s.arguments["requests"].split(", ")}
    assert shown == {r.request for r in result.requests}


def check_counts(found, groups, started, *, lost):
    """There is a slice for every job, pass and event that the engine counted."""
    counts = np.concatenate([r.course.counts for r in groups])
    columns = dict(zip(EVENT_COUNTS, counts.T, strict=True))
    slices = [s for pieces in found.slices.values() for s in pieces]
    jobs = Counter(s.category for s in slices if s.depth == 0)
    passes = sum(len(r.course.pass_times) for r in groups)
    assert jobs["start"] == jobs["head"] == sum(s.depth == 1 for s in slices) == passes
    assert jobs["dense"] == jobs["shared"] == jobs["merge"] == len(counts)
    assert sum(s.depth == 2 for s in slices) == len(counts)
    assert jobs["demand"] == columns["demand"].sum()
    assert jobs["late"] == columns["late"].sum()
    assert abs(jobs["prefetch"] + jobs["late"] - started) <= lost
    assert jobs["hits"] == (columns["hits"] > columns["cpu_hits"]).sum()
    assert jobs["experts"] == (columns["cpu_misses"] + columns["cpu_hits"] > 0).sum()


def check_busy(found, figures, *, whole):
    """Slices cover the busy times of a request's decode passes, to 1 ns a slice.

    ``whole``: no prefetch that outlasts the drawing is left out.
    """
    tracks = {name[-1]: slices for name, slices in found.slices.items()}
    decode = [
        (s.begin, s.end)
        for s in tracks["requests, passes, layers"]
        if s.depth == 1
        and s.category != "prefill"
        and s.arguments["requests"] == str(figures.request)
    ]
    for lane, busy_us in (
        ("GPU", figures.gpu_busy_us),
        ("CPU workers", figures.cpu_busy_us),
        ("H2D copy engine", figures.h2d_busy_us),
    ):
        slices = tracks.get(lane, [])
        difference = overlap_ns(slices, decode) - busy_us * 1e3
        assert difference <= len(slices) + 1
        if whole or lane != "H2D copy engine":
            assert difference >= -len(slices) - 1


@pytest.fixture(params=["layer", "global"])
def ended(request, tmp_path):
    """A simulation that has run one request, its record and its timeline."""
    costs, rules = COSTS["odd"], Rules(scope=request.param, staging=3)
    simulation = Simulation(Erratic(seed=4), GEOMETRY, costs, Budget(cache=5), rules, keep_log=True)
    batch = make_batch(requests(1, passes=20), GEOMETRY, costs)
    record = simulation.run_group(Group("counted", (0,)), batch)
    options = {"layers": GEOMETRY.layers, "expert_bytes": EXPERT_BYTES, "name": "run"}
    return simulation, record, write(tmp_path / "t", record, **options)


def test_counters_end_where_the_engine_ends(ended):
    simulation, record, found = ended
    end = round(float(record.course.pass_times[-1, 1]) * 1e3)
    last = {name[-1]: values[-1] for name, values in found.counters.items()}
    occupied = simulation.state.pools.occupied
    assert last["residents"] == (end, occupied.sum())
    for layer, count in zip(GEOMETRY.layers, occupied, strict=True):
        assert last[f"residents of layer {layer}"] == (end, count)
    assert last["staging slots in use"] == (end, simulation.work[USED])
    assert last["prefetches waiting"] == (end, simulation.work[QUEUED])
    assert last["demand transfers waiting"] == (end, 0)
    # The run was cut off while a prefetch was copied: the case that matters.
    assert simulation.work[KIND + H2D] != IDLE and simulation.work[QUEUED] > 0


def test_counters_show_what_the_event_table_says(ended):
    _, record, found = ended
    course = record.course
    counts = dict(zip(EVENT_COUNTS, course.counts.T, strict=True))
    gates = [round(float(time) * 1e3) for time in course.times[:, 1]]
    total = found.counters["run (cache 4)", "residents"]
    for v, gate in enumerate(gates):
        name = f"residents of layer {GEOMETRY.layers[course.event_layer[v]]}"
        counter = found.counters["run (cache 4)", "residents by layer", name]
        assert value_at(counter, gate - 1) == counts["residents_before"][v]
        assert value_at(total, gate) * 6 * MIB == counts["pool_bytes"][v]
    staging = found.counters["run (cache 4)", "staging slots in use"]
    assert max(value for _, value in staging) == counts["staging_peak"].max() == 3


def value_at(counter, time):
    return [value for begin, value in counter if begin <= time][-1]


def test_times_among_the_arguments_are_as_exact_as_slices(tmp_path):
    _, _, found = simulate(tmp_path / "t", parse_policy("lru"), COSTS["odd"])
    times = [
        value
        for s in found.slices["run (cache 4)", "requests, passes, layers"]
        for key, value in s.arguments.items()
        if key.endswith("_us")
    ]
    assert times and all(type(t) is float and t == round(t, 3) for t in times)
    assert any(t != round(t, 2) for t in times)


def test_same_run_same_bytes(tmp_path):
    for name in ("a", "b"):
        simulate(tmp_path / name, Erratic(seed=1), COSTS["odd"])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize(("drawn", "shown"), [(1, [1]), (2, [1, 2]), (9, [1, 2, 3])])
def test_first_counted_requests_are_drawn_one_after_another(tmp_path, drawn, shown):
    _, records, found = simulate(tmp_path / "t", parse_policy("lru"), COSTS["odd"], drawn=drawn)
    work = found.slices["run (cache 4)", "requests, passes, layers"]
    whole = [s for s in work if s.depth == 0]
    assert [s.arguments for s in whole] == [{"request": r} for r in shown]
    assert whole[0].begin == 0  # the warm-up request left no gap
    # What is not drawn keeps no log, and runs as fast as ever.
    assert [r.group.requests[0] for r in records if r.log is not None] == shown
    length = records[len(shown) - 1].course.pass_times[-1, 1] - records[0].course.pass_times[0, 0]
    assert abs(whole[-1].end - length * 1e3) <= 1


def test_cold_start_sets_the_clock_of_the_run_back_but_not_the_timeline(tmp_path):
    _, records, found = simulate(tmp_path / "t", Erratic(seed=2), COSTS["odd"], drawn=3, cold=True)
    assert [r.course.pass_times[0, 0] for r in records] == [0.0] * 3
    check_nesting(found)
    whole = [s for s in found.slices["run (cache 4)", "requests, passes, layers"] if s.depth == 0]
    assert all(a.end == b.begin for a, b in pairwise(whole))


def test_batch_is_one_slice(tmp_path):
    _, _, found = simulate(tmp_path / "t", parse_policy("lru"), COSTS["plain"], batch=3)
    work = found.slices["run (cache 4)", "requests, passes, layers"]
    (whole,) = (s for s in work if s.depth == 0)
    assert (whole.name, whole.arguments) == ("requests 1–3", {"requests": "1, 2, 3"})


def test_every_policy_and_cache_is_a_process_in_the_order_given(tmp_path):
    contenders = [
        Contender(spec, parse_policy(spec), Budget(cache=c))
        for c in (2, 6)
        for spec in ("oled", "lru")
    ]
    with TimelineFile(tmp_path / "t", GEOMETRY.layers, EXPERT_BYTES) as file:
        source = MemoryTrace(GEOMETRY, requests(3))
        simulate_all(source, contenders, COSTS["plain"], observe=file.add, keep_log=True)
    found = read(tmp_path / "t")
    names = ["oled (cache 2)", "lru (cache 2)", "oled (cache 6)", "lru (cache 6)"]
    assert found.processes == names
    assert {name[0] for name in found.slices} == set(names)


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 1e9), min_size=1, max_size=50),
    st.floats(0, 1e9),
    st.integers(0, 2**60),
)
def test_rounding_never_turns_moments_around(times, begin_us, begin_ns):
    shown = Clock(begin_us, begin_ns).ns(np.array(sorted(times)))
    assert all(type(t) is int and t >= begin_ns for t in shown)
    assert shown == sorted(shown)


def test_a_counter_takes_the_last_value_of_a_moment():
    # 0: 2, then 1; 5: still 1; 7: 3, then 1 again; 9: 1, the end.
    time, values = [0, 0, 5, 7, 7, 9], np.array([2, 1, 1, 3, 1, 1])
    assert list(changes(time, values)) == [(0, 1), (9, 1)]
    assert list(changes([0, 2, 4], np.array([1, 2, 2]))) == [(0, 1), (2, 2), (4, 2)]


def test_size_of_a_large_timeline(tmp_path):
    """With counters and arguments a slice takes less than 100 bytes."""
    traces = [random_request(np.random.default_rng(0), GEOMETRY, passes=200, tokens=8)]
    _, _, found = simulate(
        tmp_path / "t", parse_policy("lru"), COSTS["odd"], traces=traces, warmup=0
    )
    slices = sum(map(len, found.slices.values()))
    assert slices > 5000
    assert (tmp_path / "t").stat().st_size < 100 * slices


def test_nothing_is_left_of_a_run_that_failed(tmp_path):
    record = Run(Policy(), GEOMETRY, requests(1), 4).record
    with (
        pytest.raises(ZeroDivisionError),
        TimelineFile(tmp_path / "t", GEOMETRY.layers, EXPERT_BYTES) as file,
    ):
        file.add(Contender("lru", Policy(), Budget(cache=4)), record)
        assert list(tmp_path.iterdir())
        _ = 1 / 0
    assert list(tmp_path.iterdir()) == []


def test_folder_that_vanishes_is_one_sentence(tmp_path):
    folder = tmp_path / "gone"
    record = Run(Policy(), GEOMETRY, requests(1), 4).record
    with (
        pytest.raises(UsageError, match=r"^cannot write .*gone/t: No such file or directory$"),
        TimelineFile(folder / "t", GEOMETRY.layers, EXPERT_BYTES) as file,
    ):
        file.add(Contender("lru", Policy(), Budget(cache=4)), record)


def test_without_perfetto_it_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(UsageError, match="a timeline needs the packages perfetto and protobuf"):
        TimelineFile(tmp_path / "t", GEOMETRY.layers, EXPERT_BYTES)
