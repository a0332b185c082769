"""Estimated profiles: the roofline moves, the rest stays, and nobody takes them for measured."""

from __future__ import annotations

import datetime
import functools
import math

import msgspec
import pytest
from cost_tables import grid
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.costs.estimate import Machine, Rates, estimate
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.profile import AXES, Curve, Origin, Profile
from oled_sim.costs.store import bundled_profile_for, bundled_profiles, load_profile
from oled_sim.costs.work import WORK, Work
from oled_sim.errors import UsageError
from oled_sim.geometry import GEOMETRIES, CostGeometry

MINI, FLASH = GEOMETRIES["llada2.0-mini"], GEOMETRIES["llada2.0-flash"]
EXPERTS = ("experts", "tokens_per_expert")
SOURCE = Rates(gpu_memory_gb_s=4000, gpu_tflops=1000, cpu_memory_gb_s=300, link_gb_s=60)


@pytest.fixture
def measured(affine: Profile) -> Profile:
    """A formula that claims to have been measured, for estimates to start from."""
    return msgspec.structs.replace(affine, status="measured")


def carried(
    measured: Profile,
    geometry: CostGeometry = MINI,
    rates: Rates = SOURCE,
    workers: int | None = None,
) -> Profile:
    machine = Machine(
        msgspec.structs.replace(
            measured.hardware, gpu="other", workers=workers or measured.hardware.workers
        ),
        measured.software,
        rates,
    )
    origin = Origin(date=datetime.date(2026, 1, 1), script="here", revision="0", note="made up")
    return estimate(measured, SOURCE, machine, geometry, origin, "estimate")


def test_the_same_machine_and_geometry_give_the_same_times(measured: Profile):
    # The measured h200 profile, not the formula.
    real = load_profile("h200-llada2.0-mini")
    same = carried(real)
    for name in AXES:
        before, after = getattr(real, name).median_us, getattr(same, name).median_us
        assert _flat(after) == pytest.approx(_flat(before), abs=1e-3, nan_ok=True), name
    assert (same.status, same.origin.note) == ("estimated", "made up")


def _flat(times: list) -> list[float]:
    return [t for row in times for t in row] if isinstance(times[0], list) else times


def test_half_the_memory_bandwidth_adds_the_time_of_the_bytes_once_more(measured: Profile):
    slow = carried(measured, rates=Rates(2000, 1000, 300, 60))
    # 64 experts of 6 MiB and 2 tokens each; 50 + 2 · 64 µs by the formula.
    moved = 64 * MINI.expert_bytes + 128 * 2 * 2048 * 2
    at_full, at_half = moved / 4000e3, moved / 2000e3
    point = msgspec.structs.replace(
        measured, gpu_experts=grid(EXPERTS, [64, 65], [2, 3], [[178.0] * 2] * 2)
    )
    assert at_full < 178
    found = LaneCosts(carried(point, rates=Rates(2000, 1000, 300, 60))).gpu_experts_us(64, 128)
    assert found == pytest.approx(178 - at_full + at_half, abs=2e-3)
    assert slow.gpu_experts.repeats == [[1, 1], [1, 1]]


def test_one_kernel_is_as_far_from_its_roofline_with_other_sizes(measured: Profile):
    point = msgspec.structs.replace(
        measured,
        gpu_experts=grid(EXPERTS, [32, 64], [2, 3], [[60.0, 70.0], [200.0, 230.0]]),
        merge=msgspec.structs.replace(
            measured.merge, median_us=[50.0] * 2, p10_us=[50.0] * 2, p90_us=[50.0] * 2
        ),
    )
    wide = carried(point, FLASH)
    before, after = (WORK["gpu_experts"](g, 64, 2).size_bytes / 4000e3 for g in (MINI, FLASH))
    assert wide.gpu_experts.median_us[1][0] == pytest.approx(60 + 140 * after / before, abs=2e-3)
    # 60 µs is the table's least, no work in it that could grow; but the bytes take longer now.
    floor = WORK["gpu_experts"](FLASH, 32, 2).size_bytes / 4000e3
    assert wide.gpu_experts.median_us[0][0] == pytest.approx(floor, abs=2e-3)
    # Merging is mostly launches: the bytes alone grow.
    added = (WORK["merge"](FLASH, 1, 0).size_bytes - WORK["merge"](MINI, 1, 0).size_bytes) / 4000e3
    assert wide.merge.median_us[0] == pytest.approx(50 + added, abs=2e-3)


def test_operations_decide_where_there_are_many(measured: Profile):
    tokens = 4096.0
    work = WORK["gpu_experts"](MINI, 1, tokens)
    assert work.flops == tokens * 6 * 2048 * 512
    assert SOURCE.gpu_us(work) == pytest.approx(work.flops / 1000e6)
    assert SOURCE.gpu_us(Work(4_000_000, 1)) == pytest.approx(1.0)


def test_more_workers_take_the_time_of_fewer_experts(measured: Profile):
    times = [[100.0, 100.0], [180.0, 200.0], [340.0, 400.0]]
    point = msgspec.structs.replace(measured, cpu_experts=grid(EXPERTS, [1, 2, 4], [1, 2], times))
    twice = carried(point, workers=2 * measured.hardware.workers).cpu_experts.median_us
    # 4 experts on twice as many workers are like 2; 1 like a half, which takes as long as one.
    assert [row[0] for row in twice] == [100.0, 100.0, 180.0]
    half = carried(point, workers=measured.hardware.workers // 2).cpu_experts.median_us
    assert [row[0] for row in half] == [180.0, 340.0, 660.0]  # the last slope goes on


def test_wider_experts_are_as_much_work_as_several(measured: Profile):
    times = [[100.0] * 2, [180.0] * 2, [340.0] * 2]
    point = msgspec.structs.replace(measured, cpu_experts=grid(EXPERTS, [1, 2, 4], [1, 2], times))
    wide = carried(point, FLASH).cpu_experts.median_us
    assert FLASH.expert_bytes == 4 * MINI.expert_bytes
    assert [row[0] for row in wide] == [340.0, 660.0, 1300.0]


def test_the_processors_memory_is_a_limit(measured: Profile):
    slow = carried(measured, rates=Rates(4000, 1000, 1, 60)).cpu_experts
    assert slow.median_us[0][0] == pytest.approx(MINI.expert_bytes / 1e3, abs=1e-3)


def test_copies_follow_the_link_and_their_fixed_part_stays(measured: Profile):
    point = msgspec.structs.replace(
        measured, h2d=msgspec.structs.replace(measured.h2d, median_us=[10.0, 30_000.0],
        p10_us=[10.0, 30_000.0], p90_us=[10.0, 30_000.0]),
    )  # fmt: skip
    size = measured.h2d.points[1]
    found = carried(point, rates=Rates(4000, 1000, 300, 30)).h2d.median_us
    assert found[1] == pytest.approx(30_000 + size / 60e3, rel=1e-6)


def test_a_cell_that_was_not_measured_is_not_estimated(measured: Profile):
    holes = grid(EXPERTS, [1, 2], [1, 2], [[1.0, 2.0], [3.0, math.nan]])
    point = msgspec.structs.replace(measured, gpu_experts=holes, cpu_experts=holes)
    for table in (carried(point).gpu_experts, carried(point).cpu_experts):
        assert math.isnan(table.median_us[1][1])
        assert table.repeats == [[1, 1], [1, 0]]


@functools.cache
def real_profile() -> Profile:
    return load_profile("h200-llada2.0-mini")


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_a_slower_machine_is_never_faster(memory: float, compute: float):
    real = real_profile()
    fast = Rates(4800, 989, 300, 63)
    slow = Rates(4800 / (1 + memory), 989 / (1 + compute), 300, 63)
    machine = Machine(real.hardware, real.software, slow)
    origin = Origin(date=datetime.date(2026, 1, 1), script="here", revision="0")
    found = estimate(real, fast, machine, MINI, origin, "slow")
    for name in set(AXES) - {"h2d", "h2d_pageable", "d2h", "cpu_link"}:
        for before, after in zip(
            _flat(getattr(real, name).median_us), _flat(getattr(found, name).median_us), strict=True
        ):
            assert math.isnan(before) or after >= before - 1e-3, name


def test_an_estimate_of_an_estimate_is_refused(measured: Profile):
    with pytest.raises(UsageError, match="starts from measurements"):
        carried(carried(measured))


def test_bundled_estimates_say_so_and_are_never_chosen_for_one():
    estimates = [n for n in bundled_profiles() if n.startswith("paper-testbed-")]
    assert estimates == ["paper-testbed-llada2.0-flash", "paper-testbed-llada2.0-mini"]
    for name in estimates:
        profile = load_profile(name)
        assert profile.status == "estimated"
        assert "nothing here was measured" in profile.origin.note
        assert profile.cost_geometry == GEOMETRIES[profile.geometry.name]
        assert all(set(_flat(getattr(profile, table).repeats)) <= {0, 1} for table in AXES)
    assert load_profile(bundled_profile_for(MINI)).status == "measured"


def test_curves_keep_their_points(measured: Profile):
    found = carried(measured, FLASH)
    for name in AXES:
        before, after = getattr(measured, name), getattr(found, name)
        assert isinstance(before, Curve) == isinstance(after, Curve)
        assert getattr(before, "points", None) == getattr(after, "points", None)
