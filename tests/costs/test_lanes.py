"""What things cost: exact at the points, linear between them, an error outside."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from cost_tables import grid
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.costs import tables as compiled
from oled_sim.costs.lanes import LaneCosts, load_costs
from oled_sim.costs.profile import AXES, Beside, Curve, Interference, Profile, Quantiles
from oled_sim.costs.store import bundled_profile_for, bundled_profiles, load_profile
from oled_sim.costs.synthetic import Affine, affine_profile
from oled_sim.errors import ProfileError, UsageError
from oled_sim.geometry import GEOMETRIES

NAN = math.nan
EXPERTS = ("experts", "tokens_per_expert")
MINI = GEOMETRIES["llada2.0-mini"]


def with_tables(profile: Profile, **tables: object) -> Profile:
    return msgspec.structs.replace(profile, **tables)


@pytest.fixture
def costs(affine: Profile) -> LaneCosts:
    """gpu_experts is no plane: 10 20 / 14 40 at 2, 4 experts × 1, 3 tokens each."""
    table = grid(EXPERTS, [2, 4], [1, 3], [[10.0, 20.0], [14.0, 40.0]])
    return LaneCosts(with_tables(affine, gpu_experts=table))


@pytest.mark.parametrize(
    ("experts", "tokens", "expected"),
    [(2, 2, 10.0), (2, 6, 20.0), (4, 4, 14.0), (4, 12, 40.0)],
)
def test_grid_points_are_exact(costs, experts, tokens, expected):
    assert costs.gpu_experts_us(experts, tokens) == expected


def test_bilinear_by_hand(costs):
    # 3 experts, 6 tokens: 2 tokens each, halfway on both axes.
    # 2 experts: (10 + 20) / 2 = 15; 4 experts: (14 + 40) / 2 = 27; halfway: 21.
    assert costs.gpu_experts_us(3, 6) == 21.0
    # 2 experts, 3 tokens: 1.5 each, a quarter of the way from 10 to 20.
    assert costs.gpu_experts_us(2, 3) == 12.5


def test_nothing_costs_nothing(costs):
    assert costs.gpu_experts_us(0, 0) == 0.0
    assert costs.cpu_experts_us(0, 0) == 0.0
    assert costs.h2d_us(0) == 0.0
    assert costs.dense_us(0, 100) == 0.0
    assert costs.merge_us(0) == 0.0


def test_affine_costs_are_reproduced_between_points(affine):
    costs = LaneCosts(affine)
    # 8 + 6 MiB / 50 GB/s = 8 + 6291456 · 1e-3 / 50 = 133.82912 µs
    assert costs.h2d_us(6 << 20) == pytest.approx(133.82912, rel=1e-12)
    # 90 + 2 · 10 + 0.25 · 37 = 119.25
    assert costs.gpu_experts_us(10, 37) == pytest.approx(119.25, rel=1e-12)
    # 100 + 0.5 · 16 + 0.0625 · 200 = 120.5
    assert costs.dense_us(16, 200) == pytest.approx(120.5, rel=1e-12)


def test_a_batch_pays_projections_once_and_attention_per_request(affine):
    costs = LaneCosts(affine)
    # 64 tokens of 4 requests with context 200: projections 100 + 0.5 · 64 = 132,
    # attention over 200 + 16 keys each: 3 · 4 + 0.03125 · 4 · 216 = 39.
    assert costs.dense_batch_us(64, 4, 200) == pytest.approx(171.0, rel=1e-12)
    assert costs.dense_batch_us(16, 1, 200) == costs.dense_us(16, 200)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda c: c.gpu_experts_us(5, 10), ["gpu_experts", "2 to 4 experts", "not 5"]),
        (lambda c: c.gpu_experts_us(2, 10), ["1 to 3 tokens_per_expert", "not 5"]),
        (lambda c: c.dense_us(5000, 1), ["dense", "1 to 4096 tokens", "not 5000"]),
        (lambda c: c.dense_us(1, 1e6), ["0 to 32768 context", "not 1e+06"]),
        (lambda c: c.h2d_us(1 << 40), ["h2d", "bytes"]),
    ],
)
def test_outside_the_range_is_one_sentence(costs, call, words):
    with pytest.raises(ProfileError) as error:
        call(costs)
    for word in [*words, "--extrapolate"]:
        assert word in str(error.value)


def test_extrapolation_continues_the_last_cell(affine):
    table = grid(EXPERTS, [1, 2, 4], [1, 2], [[5.0, 5.0], [6.0, 6.0], [10.0, 10.0]])
    costs = LaneCosts(with_tables(affine, gpu_experts=table), extrapolate=True)
    # From 2 to 4 experts: 2 µs per expert; 4 more experts cost 8 µs more.
    assert costs.gpu_experts_us(8, 8) == 18.0
    # Below the first point the first cell's line goes on, but never below nothing.
    low = LaneCosts(
        with_tables(affine, gpu_experts=grid(EXPERTS, [4, 8], [1, 2], [[2.0, 2.0], [8.0, 8.0]])),
        extrapolate=True,
    )
    assert low.gpu_experts_us(3, 3) == 0.5
    assert low.gpu_experts_us(1, 1) == 0.0


def test_an_unmeasured_cell_is_refused_but_its_measured_edge_is_not(affine):
    table = grid(EXPERTS, [1, 2], [1, 2, 4], [[1.0, 2.0, 4.0], [2.0, 4.0, NAN]])
    profile = with_tables(affine, gpu_experts=table)
    costs = LaneCosts(profile)
    assert costs.gpu_experts_us(1, 4) == 4.0
    assert costs.gpu_experts_us(2, 4) == 4.0
    assert costs.gpu_experts_us(1, 3) == 3.0
    with pytest.raises(ProfileError, match=r"not measured at 2 experts × 3 tokens_per_expert"):
        costs.gpu_experts_us(2, 6)
    # Extrapolated along the row: 2 µs per token, 4 + 2 · 2 = 8 at 4 tokens each.
    assert LaneCosts(profile, extrapolate=True).gpu_experts_us(2, 8) == 8.0


def test_kernels_get_nan_where_methods_raise(costs):
    assert math.isnan(compiled.gpu_experts_us(costs.tables, 5.0, 10.0))
    assert compiled.gpu_experts_us(costs.tables, 3.0, 6.0) == 21.0


def rising_grid(draw: st.DrawFn) -> tuple[list[int], list[int], np.ndarray]:
    """A random table that rises along both axes."""
    axis = st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True).map(sorted)
    rows, columns = draw(axis), draw(axis)
    steps = draw(
        st.lists(
            st.floats(0, 1000, allow_subnormal=False),
            min_size=len(rows) * len(columns),
            max_size=len(rows) * len(columns),
        )
    )
    times = np.reshape(steps, (len(rows), len(columns))).cumsum(0).cumsum(1)
    return rows, columns, times


RISING = st.composite(rising_grid)()


@settings(deadline=None)  # the first call compiles
@given(RISING, st.data())
def test_between_rising_points_costs_rise_and_stay_within_the_cell(table, data):
    rows, columns, times = table
    profile = affine_profile(MINI)
    costs = LaneCosts(
        with_tables(profile, gpu_experts=grid(EXPERTS, rows, columns, times.tolist()))
    )
    x = data.draw(st.integers(rows[0], rows[-1]))
    y, further = sorted(data.draw(st.floats(columns[0], columns[-1])) for _ in range(2))
    here, there = (compiled.lookup(costs.tables, compiled.GPU_EXPERTS, x, v) for v in (y, further))
    slack = 1e-9 * times.max()
    assert times.min() - slack <= here <= there + slack <= times.max() + 2 * slack


@settings(deadline=None)  # the first call compiles
@given(RISING)
def test_every_grid_point_is_returned_exactly(table):
    rows, columns, times = table
    profile = affine_profile(MINI)
    costs = LaneCosts(
        with_tables(profile, gpu_experts=grid(EXPERTS, rows, columns, times.tolist()))
    )
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            found = compiled.lookup(costs.tables, compiled.GPU_EXPERTS, float(row), float(column))
            assert found == times[i, j]


@settings(deadline=None)  # the first call compiles
@given(st.floats(1, 500), st.integers(1, 1 << 29))
def test_bandwidth_scales_the_proportional_part_alone(gb_s, size):
    costs = LaneCosts(affine_profile(MINI, Affine(h2d_fixed_us=8.0, h2d_gb_s=50.0)))
    other = costs.with_bandwidth(gb_s)
    assert other.h2d_us(size) == pytest.approx(8.0 + 1e-3 * size / gb_s, rel=1e-9, abs=1e-6)
    assert other.link_bandwidth_gb_s == gb_s
    assert other.cpu_experts_us(3, 9) == costs.cpu_experts_us(3, 9)


def test_bandwidth_keeps_overhead_and_moves_both_directions(affine, mini):
    costs = LaneCosts(affine)  # 8 µs + bytes at 50 GB/s, link 20 µs at any size
    slow = costs.with_bandwidth(25.0)
    assert costs.link_bandwidth_gb_s == pytest.approx(50.0)
    assert slow.h2d_us(6 << 20) == pytest.approx(8 + 6291456e-3 / 25)
    assert slow.d2h_us(6 << 20) == slow.h2d_us(6 << 20)
    # 4,096 tokens of 2,048 bf16 values, both ways, at 25 instead of 50 GB/s:
    # 2 · 16 MiB · (1/25 − 1/50) ns = 671.08864 µs more.
    assert slow.cpu_link_us(4096) == pytest.approx(20 + 671.08864)


@pytest.mark.parametrize("gb_s", [0, -1, math.inf, math.nan])
def test_impossible_bandwidth_is_refused(affine, gb_s):
    with pytest.raises(UsageError, match="positive"):
        LaneCosts(affine).with_bandwidth(gb_s)


def test_slowdown_by_set_of_busy_lanes(affine):
    def q(value: float) -> Quantiles:
        return Quantiles(median=value, p10=value, p90=value, repeats=1)

    interference = Interference(
        gpu=Beside(h2d=q(1.1), cpu=q(1.2), both=q(1.3)),
        h2d=Beside(gpu=q(1.4), cpu=q(1.5), both=q(1.6)),
        cpu=Beside(gpu=q(1.7), h2d=q(1.8), both=q(1.9)),
    )
    costs = LaneCosts(with_tables(affine, interference=interference))
    gpu, h2d, cpu = compiled.BUSY_GPU, compiled.BUSY_H2D, compiled.BUSY_CPU
    # A lane is not slowed by itself: its own bit changes nothing.
    by_busy = {0: 1.0, gpu: 1.0, h2d: 1.1, cpu: 1.2, h2d | cpu: 1.3, gpu | h2d: 1.1}
    assert {busy: costs.slowdown(0, busy) for busy in by_busy} == by_busy
    assert costs.slowdown(1, gpu | cpu) == 1.6
    assert costs.slowdown(2, gpu | h2d | cpu) == 1.9


def test_compiled_and_interpreted_agree_to_the_bit():
    script = (
        "import numpy as np\n"
        "from oled_sim.costs.lanes import load_costs\n"
        "from oled_sim.costs import tables as t\n"
        "from oled_sim.geometry import GEOMETRIES\n"
        "c = load_costs(GEOMETRIES['llada2.0-mini'], extrapolate=True).tables\n"
        "rng = np.random.default_rng(7)\n"
        "for n, m, s in rng.uniform(0, 300, (200, 3)):\n"
        "    n = np.floor(n)\n"
        "    for v in (t.gpu_experts_us(c, n, n * m), t.cpu_experts_us(c, n, n * m),\n"
        "              t.h2d_us(c, s * 1e5), t.dense_us(c, m, s * 50),\n"
        "              t.dense_batch_us(c, m, n, s),\n"
        "              t.gate_us(c, m), t.slowdown(c, int(n) % 3, int(m) % 8)):\n"
        "        print(float(v).hex())\n"
    )
    compiled_out, interpreted_out = (
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "NUMBA_DISABLE_JIT": flag},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for flag in ("0", "1")
    )
    assert len(compiled_out.splitlines()) == 1400
    assert compiled_out == interpreted_out


def test_wrong_geometry_is_refused_by_name(affine, tmp_path):
    with pytest.raises(ProfileError, match=r"made for 'llada2.0-mini'.*not for 'llada2.0-flash'"):
        affine.require_geometry(GEOMETRIES["llada2.0-flash"])
    same_name = msgspec.structs.replace(affine.geometry, heads=8)
    with pytest.raises(ProfileError, match="heads 8"):
        with_tables(affine, geometry=same_name).require_geometry(MINI)


@pytest.mark.parametrize("name", bundled_profiles())
def test_bundled_profiles_cover_what_a_pass_may_ask(name):
    profile = load_profile(name)
    assert profile.name == name
    cost = profile.cost_geometry
    costs = load_costs(cost, name)
    assert costs.h2d_us(cost.expert_bytes) > 0
    for tokens in (1, 16, 32, 300, 4096):
        rows = tokens * cost.top_k
        for experts in (1, 2, 7, 60, 100, 256):
            if experts <= rows <= experts * tokens:
                assert costs.gpu_experts_us(experts, rows) > 0
                assert costs.cpu_experts_us(experts, rows) > 0
        for name in set(AXES) - {"h2d", "h2d_pageable", "d2h"}:
            if isinstance(getattr(profile, name), Curve):
                assert (
                    compiled.lookup(costs.tables, compiled.TABLE_NAMES.index(name), tokens, 0) > 0
                )
        assert costs.dense_us(tokens, 0) > 0
        for requests in (1, 8, 32, 128):
            if requests <= tokens:
                assert costs.dense_batch_us(tokens, requests, 1024) > 0


def test_each_geometry_has_its_bundled_profile_or_a_sentence(mini):
    assert bundled_profile_for(mini) == "h200-llada2.0-mini"
    other = msgspec.structs.replace(affine_profile(mini).geometry, name="none-such")
    with pytest.raises(UsageError, match="no bundled profile is measured"):
        bundled_profile_for(with_tables(affine_profile(mini), geometry=other).cost_geometry)
