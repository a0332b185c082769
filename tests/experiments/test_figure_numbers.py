"""What figures draw, from tables written by hand."""

import pandas as pd
import pytest

from oled_sim.plotting.ablation import draw_ablation
from oled_sim.plotting.bars import spread
from oled_sim.plotting.capacities import draw_gap
from oled_sim.plotting.captions import provenance
from oled_sim.plotting.failures import draw_failures, failure_table, with_exposed
from oled_sim.plotting.notebook import shown
from oled_sim.plotting.overall import draw_against, draw_overall

POLICIES = ("lru", "oled:priority", "oled:priority+adapt", "oled", "lfu", "oled:dispatch=load",
            "oled:allocate=uniform", "ideal", "full")  # fmt: skip


def row(policy, **values):
    return {
        "profile": "h200-llada2.0-mini", "profile_status": "measured", "origin": "real",
        "model": "llada2.0-mini", "trace": "t", "data_set": "d", "request": 0, "policy": policy,
        "cache": 40, "tpot_us": 1000.0, "utilization": 0.5, "decode_us": 100.0,
        "gpu_critical_us": 100.0, "h2d_critical_us": 0.0, "cpu_critical_us": 0.0,
        "evicted_reused": 0, "next_misses": 0, "cpu_reused": 0, "cpu_followed": 0, "reused": 1,
        "followed": 2,
    } | values  # fmt: skip


def test_exposed_transfers_are_what_gpu_and_copies_add_to_full_residency():
    table = pd.DataFrame(
        [
            row("full", decode_us=60.0, gpu_critical_us=60.0),
            row("lru", decode_us=100.0, gpu_critical_us=70.0, h2d_critical_us=30.0),
            row("cpu", decode_us=100.0, gpu_critical_us=20.0, cpu_critical_us=80.0),
            row("full", request=1, decode_us=10.0),
            row("lru", request=1, decode_us=10.0, gpu_critical_us=10.0),
        ]
    )
    found = with_exposed(table)
    assert found["policy"].tolist() == ["lru", "cpu", "lru"]
    assert found["exposed_transfer_us"].tolist() == [40.0, 0.0, 0.0]


def test_shares_pool_requests_and_are_unknown_of_nothing():
    table = pd.DataFrame(
        [
            row("full", decode_us=50.0),
            row("lru", evicted_reused=1, next_misses=2),
            row("full", request=1, decode_us=50.0),
            row("lru", request=1, evicted_reused=4, next_misses=8, gpu_critical_us=50.0),
        ]
    )
    (found,) = failure_table(table).to_dict("records")
    transfers, cpu, evicted, placed = list(found.values())[-4:]
    assert transfers == pytest.approx(50 / 200)
    assert cpu == 0.0
    assert evicted == pytest.approx(5 / 10)
    assert pd.isna(placed)


def test_bars_are_means_and_whiskers_the_range():
    table = pd.DataFrame([row("lru", tpot_us=t, request=i) for i, t in enumerate((1.0, 2.0, 6.0))])
    mean, low, high = spread(table, "tpot_us", ("cache",), lambda c: f"C = {c}")
    assert mean.loc["C = 40", "lru"] == 3.0
    assert (low.loc["C = 40", "lru"], high.loc["C = 40", "lru"]) == (1.0, 6.0)


def test_captions_tell_real_from_synthetic_and_measured_from_estimated():
    table = pd.DataFrame(
        [
            row("lru"),
            row("lru", trace="s", origin="synthetic", profile="x-mini", profile_status="estimated"),
        ]
    )
    said = " ".join(provenance(table).split())
    assert "1 real and 1 synthetic traces" in said
    assert "h200-llada2.0-mini (measured)" in said
    assert "x-mini (estimated)" in said


@pytest.mark.parametrize(
    "draw",
    [
        draw_overall,
        draw_failures,
        *(pytest.param(d, marks=pytest.mark.slow) for d in (draw_against, draw_gap, draw_ablation)),
    ],
)
def test_every_setting_gets_its_panels(draw):
    rows = [
        row(policy, model=model, cache=cache, request=request, trace=model)
        for model in ("llada2.0-mini", "llada2.0-flash")
        for cache in (40, 100)
        for policy in POLICIES
        for request in (0, 1)
        if policy != "full" or cache == 40
    ]
    small = pd.DataFrame([r for r in rows if r["model"] == "llada2.0-mini"])
    large = pd.DataFrame(rows)
    assert len(draw(large).axes) == 2 * len(draw(small).axes) > 0
    first, second = (shown(draw(small))._repr_png_() for _ in range(2))
    assert first == second
