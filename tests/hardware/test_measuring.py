"""Measuring: what is timed, how often, and how tables come of it."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="measuring runs real kernels, which need torch")

from oled_sim.costs.lanes import LaneCosts  # noqa: E402
from oled_sim.engine.batch import make_batch  # noqa: E402
from oled_sim.engine.budget import Budget  # noqa: E402
from oled_sim.engine.rules import Group, Rules  # noqa: E402
from oled_sim.engine.simulation import Simulation  # noqa: E402
from oled_sim.engine.state import EVENT_COUNTS, PASS_COUNTS  # noqa: E402
from oled_sim.geometry import GEOMETRIES, CostGeometry, RoutingGeometry  # noqa: E402
from oled_sim.hardware.measuring import trials  # noqa: E402
from oled_sim.hardware.measuring.axes import (  # noqa: E402
    ExpertAxes,
    cpu_axes,
    full_axes,
    quick_axes,
)
from oled_sim.hardware.measuring.batches import BLOCK, Attention  # noqa: E402
from oled_sim.hardware.measuring.events import Rotation, even_rows  # noqa: E402
from oled_sim.hardware.measuring.experts import LaneJob, grouped_call  # noqa: E402
from oled_sim.hardware.measuring.host import over_rounds  # noqa: E402
from oled_sim.hardware.measuring.layers import LayerTimes, _keep  # noqa: E402
from oled_sim.hardware.measuring.links import Ring  # noqa: E402
from oled_sim.hardware.measuring.loads import RepeatedLoad  # noqa: E402
from oled_sim.hardware.measuring.measure import Plan, measure  # noqa: E402
from oled_sim.hardware.measuring.rig import built  # noqa: E402
from oled_sim.hardware.measuring.sweep import Sweep  # noqa: E402
from oled_sim.hardware.measuring.timing import Clock, between_us, spread  # noqa: E402
from oled_sim.hardware.place import Place  # noqa: E402
from oled_sim.testing.by_hand import costs_by_hand  # noqa: E402

MINI = GEOMETRIES["llada2.0-mini"]
SMALL = CostGeometry("small", 64, 128, 32, 4, 1, 16, 4, 1, 4, 2, 16, 512, weight_bytes=4)
CPU = Place(torch.device("cpu"), torch.float32)


@given(st.integers(1, 60), st.integers(1, 40), st.integers(1, 10))
def test_even_rows_serve_different_tokens_and_no_row_twice(experts, per_expert, top_k):
    rows = even_rows(experts, per_expert, top_k)
    assert len(set(rows.row.tolist())) == experts * per_expert
    assert rows.row.max() < rows.tokens * top_k
    for i in range(experts):
        tokens = rows.row[rows.first[i] : rows.first[i + 1]] // top_k
        assert len(set(tokens.tolist())) == per_expert


def test_even_rows_by_hand():
    # Three experts of two tokens each, top-2: tokens 0 (experts 0, 1), 1 (2, 0), 2 (1, 2).
    assert even_rows(3, 2, 2).row.tolist() == [0, 3, 1, 4, 2, 5]
    assert even_rows(3, 2, 2).tokens == 3
    # Fewer experts than top-k: every token chooses both.
    assert even_rows(2, 2, 4).row.tolist() == [0, 4, 1, 5]
    assert even_rows(1, 1, 4, tokens=9).tokens == 9


def test_experts_rotate_through_all_layers():
    rotation = Rotation(layers=2, experts=5)
    taken = [rotation.take(2) for _ in range(5)]
    assert [layer for layer, _ in taken] == [0, 0, 1, 1, 0]
    assert [experts.tolist() for _, experts in taken] == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_buffers_rotate_piece_by_piece():
    ring = Ring(torch.arange(3 * 512, dtype=torch.uint8), torch.ones(600, dtype=torch.uint8))
    starts = [ring.take(500).data_ptr() - ring.buffers[0].data_ptr() for _ in range(3)]
    assert starts == [0, 512, 1024]
    assert bool((ring.take(500) == 1).all())  # the second buffer
    assert ring.take(500).data_ptr() == ring.buffers[0].data_ptr()


def test_cells_beyond_any_pass_in_range_are_left_out():
    axes = ExpertAxes([1, 4, 8, 192, 256], [1, 64, 128, 256, 512, 2048, 4096], tokens=4096)
    assert axes.reachable(256, 128, MINI)  # 4,096 tokens × 8 over 256 experts: 128 each
    assert axes.reachable(256, 256, MINI)  # the corner above it
    assert not axes.reachable(256, 512, MINI)
    assert axes.reachable(1, 4096, MINI)
    assert axes.reachable(8, 4096, MINI)


def test_long_jobs_are_not_measured_at_every_number_of_experts():
    axes = ExpertAxes([1, 4, 5, 8, 40, 48], [1, 1024, 4096], 4096, skipped=frozenset({5, 40}))
    assert axes.between(5, 1024, MINI)
    assert axes.between(5, 4096, MINI)  # 8 experts with so many can be reached
    assert not axes.between(5, 1, MINI)
    assert not axes.between(4, 1024, MINI)
    assert axes.between(40, 1024, MINI)
    assert not axes.between(40, 4096, MINI)  # nothing beyond it is measured


@pytest.mark.parametrize("cost", [MINI, SMALL])
def test_long_jobs_keep_the_step_where_the_workers_come_out_even(cost):
    axes = full_axes(cost, 32).on_cpu
    measured = [n for n in axes.experts if not axes.between(n, 1024, cost)]
    assert {1, 12, 13, 16, cost.experts} <= set(measured)
    assert len(measured) < len(axes.experts)


@pytest.mark.parametrize("make", [full_axes, cpu_axes, quick_axes])
def test_axes_step_from_a_block_to_longer_passes_and_end_at_all_experts(make):
    axes = make(SMALL, 24)
    assert {24, 25} <= set(axes.tokens) & set(axes.dense_tokens)
    assert axes.on_gpu.experts[-1] == axes.on_cpu.experts[-1] == SMALL.experts
    assert axes.usual_context in axes.context
    assert SMALL.expert_bytes in axes.copies
    for points in (
        axes.copies,
        axes.tokens,
        axes.on_cpu.experts,
        axes.dense_tokens,
        axes.head_tokens,
    ):
        assert points == sorted(set(points))


def test_spread_by_hand():
    # 11 samples 0..10: the 10th percentile is sample 1, the 90th sample 9.
    found = spread([float(v) for v in range(10, -1, -1)])
    assert (found.median, found.p10, found.p90, found.repeats) == (5.0, 1.0, 9.0, 11)
    assert spread([1.0, 1.0, 10.0]).expected == 4.0  # what many such runs add up to, each


def test_how_often_a_point_is_measured():
    def count(us, **settings):
        calls = []
        clock = Clock(CPU.device, **{"most": 5, "warm_up": 3, "budget_us": 100.0, **settings})
        found = clock.repeat(lambda: calls.append(us) or us)
        return len(calls), len(found)

    assert count(1.0) == (8, 5)  # three to warm up, at most five kept
    assert count(24.0) == (7, 4)  # as many as the budget holds
    assert count(60.0) == (2, 1)  # longer than a quarter of the budget: one to warm up
    assert count(150.0) == (1, 1)  # longer than the budget: its own warm-up


def test_long_points_are_visited_less_often():
    visits: dict[int, int] = {}

    def times(point):
        visits[point] = visits.get(point, 0) + 1
        return [float(point)]

    told = []
    sweep = Sweep(Clock(CPU.device, rounds=3, budget_us=10.0), lambda *at: told.append(at))
    sweep.curve("merge", [5, 40, 50], times)
    assert visits == {5: 3, 40: 2, 50: 1}
    assert sweep.tables["merge"].repeats == [3, 2, 1]
    assert told[-1] == ("merge", 9, 9)


def test_cells_between_rows_hold_what_a_lookup_would_find_without_the_row():
    sweep = Sweep(Clock(CPU.device))
    cells = {(1, 1): [2.0], (1, 2): [4.0], (2, 1): [9.0], (2, 2): [], (5, 1): [9.0], (5, 2): [12.0]}
    sweep.keep_grid("cpu_experts", [1, 2, 5], [1, 2], cells)
    sweep.fill_between_rows("cpu_experts", lambda row, column: (row, column) == (2, 2))
    table = sweep.tables["cpu_experts"]
    assert table.median_us == table.p10_us == table.p90_us == [[2.0, 4.0], [9.0, 6.0], [9.0, 12.0]]
    assert table.repeats == [[1, 1], [1, 0], [1, 1]]


def test_cells_without_samples_are_nan():
    sweep = Sweep(Clock(CPU.device))
    cells = {(1, 1): [3.0, 1.0, 2.0], (1, 2): [], (2, 1): [4.0], (2, 2): [5.0]}
    sweep.keep_grid("gpu_experts", [1, 2], [1, 2], cells)
    table = sweep.tables["gpu_experts"]
    assert table.median_us[0][0] == 2.0
    assert math.isnan(table.median_us[0][1])
    assert table.repeats == [[3, 0], [1, 1]]


def test_the_parts_of_a_layer_add_up_to_the_layer():
    axes = quick_axes(SMALL, 8)
    every = axes.tokens
    flat = {t: [10.0] for t in every}
    times = LayerTimes(
        shared=flat, merge=flat, embedding={t: [7.0] for t in every},
        begin={t: [1007.0] for t in every}, head={t: [90.0] for t in axes.head_tokens},
        gate_part={t: [60.0] for t in every},
        # Up to the gate 400 µs at the usual context; its routing is on the host 45 µs later.
        tail={t: [445.0] for t in every},
        to_gate={(t, c): [400.0 + c - axes.usual_context] for t in every for c in axes.context},
    )  # fmt: skip
    with built(SMALL, axes, CPU, 1, quick=True) as rig:
        sweep = Sweep(Clock(CPU.device))
        _keep(sweep, rig, times)
    tables = sweep.tables
    dense = tables["dense"].median_us[1][axes.context.index(axes.usual_context)]
    assert dense == 340.0  # 400 − 60 of the router
    assert tables["gate"].median_us[1] == 105.0  # 445 − 340
    # A pass starts with the embedding (7 µs) and one dense layer: attention 340, MLP the rest.
    assert tables["dense_layer"].median_us[1] == 660.0
    short = tables["dense"].median_us[1][axes.context.index(0)]
    assert short == 340.0 - axes.usual_context


@pytest.mark.parametrize(
    ("trial", "hits", "copies", "on_cpu"),
    [
        (trials.Trial(0, 0, 8), 14, 0, 0),
        (trials.Trial(0, 5, 8), 9, 5, 0),
        (trials.Trial(6, 0, 8), 8, 0, 6),
        (trials.Trial(6, 5, 8), 3, 5, 6),
    ],
)
def test_trials_do_in_every_event_what_they_are_for(trial, hits, copies, on_cpu):
    """14 of 64 experts are activated, in every layer and pass."""
    geometry, costs = RoutingGeometry((1, 2), 64, 4), costs_by_hand()
    simulation = Simulation(
        trials.policy_of(geometry, trial), geometry, costs,
        Budget(cache=trials.slots_of(64)), Rules(staging=trials.STAGING),
    )  # fmt: skip
    batch = make_batch([trials.request_of(geometry, trial)], geometry, costs)
    counts = simulation.run_group(Group("counted", (0,)), batch).course.counts[2:]  # after a pass
    found = {name: counts[:, EVENT_COUNTS.index(name)] for name in EVENT_COUNTS}
    assert len(counts) >= trial.events
    assert (found["hits"] == hits).all()
    assert (found["demand"] == copies).all()
    assert (found["cpu_misses"] == on_cpu).all()


def test_a_disturbed_round_of_trials_counts_as_one_of_many():
    quiet, disturbed = np.array([10.0, 14.0]), np.array([90.0, 110.0])
    found = over_rounds([quiet, disturbed, quiet + 2.0])
    assert found.mean == 14.0  # of 12, 100 and 14
    assert (found.median, found.repeats) == (15.0, 6)


def test_what_takes_less_than_its_parts_adds_nothing():
    found = over_rounds([np.array([-5.0, 3.0]), np.array([-3.0, 1.0])])
    assert (found.mean, found.p10, found.p90) == (0.0, 0.0, 3.0)


def test_a_load_goes_on_until_it_is_stopped_and_tells_what_went_wrong():
    turned = threading.Event()
    load = RepeatedLoad(turned.set)
    load.start(0.0)
    assert turned.wait(10)
    assert load.busy()
    load.stop()
    assert not load.busy()

    failed = threading.Event()

    def fail():
        failed.set()
        raise ValueError("broken")

    broken = RepeatedLoad(fail)
    broken.start(0.0)
    assert failed.wait(10)
    with pytest.raises(ValueError, match="broken"):
        broken.stop()


@pytest.fixture(scope="module")
def rig():
    with built(SMALL, quick_axes(SMALL, 8), CPU, 1, quick=True) as made, torch.inference_mode():
        yield made


def test_what_is_timed_computes_all_rows(rig):
    rig.out.zero_()
    grouped_call(rig, 3, 4)()
    rows = even_rows(3, 4, SMALL.top_k).row
    written = torch.nonzero(rig.out.abs().sum(1)).flatten().tolist()
    assert written == sorted(rows.tolist())
    LaneJob(rig, 3, 4)()
    assert bool((rig.lane.result().abs().sum(1) > 0).all())
    assert rig.lane.times.compute_us > 0


def test_slots_hold_experts_of_the_host(rig):
    assert torch.equal(rig.slab.weights, rig.experts.packed[0])


def test_attention_of_a_batch_reads_the_keys_it_is_asked_for():
    attention = Attention(CPU, SMALL, cache_elements=1 << 16, rotate_bytes=0)
    assert attention.projections(3)().shape == (3, SMALL.hidden_size)
    assert attention.block_attention(2, 7)().shape == (2, SMALL.heads, BLOCK, SMALL.head_dim)
    # Keys and values of 2 requests with 7 keys each, in slices rounded up to 128 elements.
    attention.offset = 0
    attention.block_attention(2, 7)()
    assert attention.offset == 2 * -(-2 * SMALL.kv_heads * 7 * SMALL.head_dim // 128) * 128


def test_marks_on_a_cpu_device_are_times():
    clock = replace(Clock(CPU.device), most=1)
    first = clock.mark()
    last = clock.mark()
    assert between_us(first, last) >= 0.0
    assert np.isfinite(clock.device_times(lambda: None)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_everything_is_measured_on_a_gpu():
    plan = Plan(replace(SMALL, weight_bytes=2), Place(torch.device("cuda"), torch.bfloat16), 1,
        block=8, quick=True)  # fmt: skip
    found = measure(plan)
    costs = LaneCosts(found.profile)
    assert found.profile.hardware.gpu == torch.cuda.get_device_name()
    assert costs.dense_us(8, 16) > 0
    assert costs.gate_us(8) > 0


class ThroughHooks(Simulation):
    """A simulation that takes no offer."""

    def _compiled(self):
        return None


@pytest.mark.parametrize(
    ("trial", "prefetched"),
    [
        (trials.Trial(6, 5, 8), 0),
        (trials.Trial(0, 0, 8, prefetches=True), 5),
        (trials.Trial(6, 5, 8, prefetches=True), 5),
    ],
)
def test_policies_of_trials_decide_in_kernels_as_in_hooks(trial, prefetched):
    geometry, costs = RoutingGeometry((1, 2), 64, 4), costs_by_hand(h2d_gb_s=80.0)
    found = []
    for kind in (ThroughHooks, Simulation):
        simulation = kind(
            trials.policy_of(geometry, trial), geometry, costs,
            Budget(cache=trials.slots_of(64)), Rules(staging=trials.STAGING),
        )  # fmt: skip
        batch = make_batch([trials.request_of(geometry, trial)], geometry, costs)
        course = simulation.run_group(Group("counted", (0,)), batch).course
        assert (course.pass_counts[:, PASS_COUNTS.index("prefetched")] >= prefetched).all()
        arrays = (*course, *simulation.state.pools, *simulation.state.queue)
        found.append([np.ascontiguousarray(a).tobytes() for a in arrays])
    assert found[0] == found[1]


@pytest.mark.parametrize("prefetches", [False, True])
def test_trials_ask_no_hook_at_a_gate(prefetches, monkeypatch):
    def refuse(*_):
        raise AssertionError("a hook was called")

    geometry, costs = RoutingGeometry((1, 2), 64, 4), costs_by_hand()
    trial = trials.Trial(0, 0, 8, prefetches=prefetches)
    policy = trials.policy_of(geometry, trial)
    for hook in ("dispatch", "score", "prefetch") if prefetches else ("dispatch",):
        monkeypatch.setattr(type(policy), hook, refuse)
    simulation = Simulation(policy, geometry, costs, Budget(cache=trials.slots_of(64)))
    batch = make_batch([trials.request_of(geometry, trial)], geometry, costs)
    simulation.run_group(Group("counted", (0,)), batch)
