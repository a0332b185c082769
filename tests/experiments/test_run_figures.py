"""Figures 14, 16, 17 and 18: what their rows hold, and what is drawn of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from oled_sim.experiment import Experiment, Inputs, Point, RunPoint, SyntheticTrace, run_experiments
from oled_sim.experiments import fig18_versions_and_overhead as fig18
from oled_sim.experiments._parts import PartPoint
from oled_sim.experiments.fig14_prefill import EXPERIMENT as FIG14
from oled_sim.experiments.fig14_prefill import PrefillPoint
from oled_sim.experiments.fig16_batch_and_block import EXPERIMENT as FIG16
from oled_sim.experiments.fig17_cache_and_link import EXPERIMENT as FIG17
from oled_sim.plotting.lines import means_by
from oled_sim.plotting.prefill import PARTS
from oled_sim.plotting.sensitivity import draw_fig16, draw_fig17

PROFILE = "h200-llada2.0-mini"
TRACE = "nano-gsm8k"


def table_of(experiment: Experiment, points: Sequence[Point], folder: Path) -> pd.DataFrame:
    """Measure some points as the experiment would."""
    one = Experiment(experiment.name, "", "", lambda size: points, experiment.plot)
    (found,) = run_experiments([one], "quick", folder)
    return pd.read_parquet(found.table)


def test_parts_of_the_time_to_first_token_add_up_to_it(tmp_path):
    points = [
        PrefillPoint(TRACE, policy=policy, cache=40, profile=PROFILE, requests=5)
        for policy in ("oled", "finemoe", "lru", "full")
    ]
    table = table_of(FIG14, points, tmp_path)
    assert len(table) == 4 * 3  # five requests: one for history, one for warm-up
    total = table[list(PARTS)].sum(axis=1)
    assert total.to_numpy() == pytest.approx(table["ttft_us"].to_numpy(), rel=1e-9)
    resident = table[table["policy"] == "full"]
    assert (resident[["ttft_h2d_us", "ttft_cpu_us"]] == 0).all(axis=None)
    assert (resident["ttft_hit_rate"] == 1).all()
    hits = table["prefill_hits"] / table["prefill_activations"]
    assert table["ttft_hit_rate"].to_numpy() == pytest.approx(hits.to_numpy())  # one pass each
    assert FIG14.plot(table) is not None


def test_prompts_are_as_long_as_asked_for(tmp_path):
    trace = SyntheticTrace("llada2.0-mini", "gsm8k", 3, output_tokens=16, prompt_tokens=100)
    point = PrefillPoint(trace, policy="oled", cache=100, profile=PROFILE)
    table = table_of(FIG14, [point], tmp_path)
    assert table["prompt_tokens"].tolist() == [100]
    assert table["trace"].tolist() == ["synthetic-llada2.0-mini-gsm8k-p100"]


def test_synthetic_blocks_are_as_long_as_asked_for(tmp_path):
    inputs = Inputs(tmp_path)
    trace = SyntheticTrace("llada2.0-mini", "gsm8k", 1, output_tokens=32, block_length=4)
    inputs.make(trace)
    found = inputs.open(trace)
    assert found.manifest.decode is not None
    assert found.manifest.decode.block_length == 4
    request = found.read(0)
    assert set((request.token_offset[2:] - request.token_offset[1:-1]).tolist()) == {4}


def test_a_batch_runs_the_same_requests_as_one_at_a_time(tmp_path):
    points = [
        PartPoint(TRACE, cache=40, profile=PROFILE, batch=batch, requests=4, history=0, warmup=0,
                  part="batch")
        for batch in (1, 2, 4)
    ]  # fmt: skip
    blocks = [
        PartPoint(TRACE, cache=cache, profile=PROFILE, requests=3, part="block")
        for cache in (16, 40)
    ]
    table = table_of(FIG16, points + blocks, tmp_path)
    batches = table[table["part"] == "batch"]
    assert batches.groupby("batch")["request"].apply(list).tolist() == [[0, 1, 2, 3]] * 3
    of_batch = batches.groupby("batch")["batch_tpot_us"].first()
    assert of_batch.is_monotonic_decreasing  # together is faster than one after the other
    figure = draw_fig16(table)
    titles = [axes.get_title(loc="left") for axes in figure.findobj(_is_axes)]
    assert "(a) llada2.0-mini, real routing, h200" in titles
    assert "(b) llada2.0-mini, real routing, h200" in titles


def _is_axes(artist: object) -> bool:
    from matplotlib.axes import Axes

    return isinstance(artist, Axes)


def test_the_least_tpot_of_each_cache_is_circled():
    rows = pd.DataFrame(
        [
            {
                "part": "block", "profile": "p", "origin": "synthetic", "model": "m",
                "profile_status": "measured", "trace": f"t-b{b}", "cache": cache,
                "block_length": b, "tpot_us": tpot * 1000,
            }
            for cache, tpots in {20: (9, 5, 7), 60: (8, 6, 4)}.items()
            for b, tpot in zip((1, 4, 16), tpots, strict=True)
        ]
    )  # fmt: skip
    batch = rows.assign(
        part="batch", batch=rows["block_length"], batch_tpot_us=1.0, passes=1, layers=1,
        activations=1, experts=2, utilization=0.5, trace="t",
    )  # fmt: skip
    figure = draw_fig16(pd.concat([rows, batch], ignore_index=True))
    circles = [
        (line.get_xdata()[0], line.get_ydata()[0])
        for axes in figure.findobj(_is_axes)
        for line in axes.lines
        if line.get_fillstyle() == "none"
    ]
    assert circles == [(4, 5), (16, 4)]


def test_means_count_every_data_set_alike():
    rows = pd.DataFrame(
        {"x": [1, 1, 1, 2], "trace": ["a", "a", "b", "a"], "v": [1.0, 3.0, 8.0, 5.0]}
    )
    assert means_by(rows, "x", "v").to_dict("index") == {
        1: {"mean": 5.0, "low": 2.0, "high": 8.0},
        2: {"mean": 5.0, "low": 5.0, "high": 5.0},
    }


def test_a_faster_link_and_a_larger_cache_take_less_time(tmp_path):
    points = [
        *(PartPoint(TRACE, cache=c, profile=PROFILE, requests=4, part="capacity")
          for c in (16, 100, 128)),
        *(PartPoint(TRACE, cache=40, profile=PROFILE, requests=4, part="link", link_gb_s=gb)
          for gb in (16.0, 64.0, 128.0)),
    ]  # fmt: skip
    table = table_of(FIG17, points, tmp_path)
    for part, column in (("capacity", "cache"), ("link", "link_gb_s")):
        means = means_by(table[table["part"] == part], column, "tpot_us")["mean"]
        assert len(means) == 3
        assert means.is_monotonic_decreasing
    figure = draw_fig17(table)
    assert [a.get_ylabel() for a in figure.axes] == ["TPOT (ms)"] * 2


def test_grids_cover_the_ranges_of_the_paper():
    sixteen = [p for p in FIG16.grid("full") if isinstance(p, PartPoint)]
    assert {p.batch for p in sixteen} == {1, 2, 4, 8, 16, 32}
    blocks = {p.trace.block_length for p in sixteen if isinstance(p.trace, SyntheticTrace)}
    assert blocks == {None, 1, 2, 4, 8, 16, 32, 64}
    seventeen = [p for p in FIG17.grid("full") if isinstance(p, PartPoint)]
    links = {p.link_gb_s for p in seventeen if p.link_gb_s is not None}
    assert (min(links), max(links)) == (16, 128)
    assert {40, 100, 256} <= {p.cache for p in seventeen}
    prompts = {p.trace.prompt_tokens for p in FIG14.grid("full") if _synthetic(p)}
    assert prompts == {64, 128, 256, 512, 1024, 2048}
    for experiment in (FIG14, FIG16, FIG17):
        machines = {p.profile for p in experiment.grid("full") if isinstance(p, RunPoint)}
        assert len(machines) == 4  # measured and estimated, both models


def _synthetic(point: Point) -> bool:
    return isinstance(point.trace, SyntheticTrace)


def write_replay(root: Path, decide_us: float) -> None:
    folder = root / "validation-here"
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(
        {
            "policy": ["oled"], "cache": [40], "trace": [TRACE], "requests": ["6-7"],
            "decode_passes": [10], "output_tokens": [20], "repetitions": [3],
            "events": [(10 + 2) * 3 * 8],
            "measured_tpot_us": [5000.0], "decide_mean_us": [decide_us],
        }
    ).to_parquet(folder / "points.parquet")  # fmt: skip
    geometry = {"layers": 20, "dense_layers": 1}
    (folder / "summary.json").write_text(json.dumps({"geometry": geometry}))


def test_overhead_is_the_share_of_a_pass(tmp_path, monkeypatch):
    write_replay(tmp_path, 250.0)
    monkeypatch.setattr(fig18, "MEASURED", tmp_path)
    (point,) = fig18._overheads()
    (row,) = point.measure(Inputs(tmp_path / "traces"))
    # 20 tokens at 5 ms each over 10 passes: 10 ms a pass.
    assert (row["decide_us"], row["pass_us"], row["share"]) == (250.0, 10_000.0, 0.025)
    assert (row["request"], row["replayed"], row["layers"]) == (6, "6-7", 8)
    assert row["replays"] == "part"  # 8 of 19 MoE layers
    assert row["trace"] == TRACE
    write_replay(tmp_path, 500.0)
    (other,) = fig18._overheads()
    assert other.to_dict() != point.to_dict()  # and is measured anew


def test_versions_are_drawn_without_a_replay_too(tmp_path, monkeypatch):
    monkeypatch.setattr(fig18, "MEASURED", tmp_path / "nothing")
    points = [
        fig18.VersionPoint(
            SyntheticTrace(f"{version}-mini", "gsm8k", 2, output_tokens=32), cache=40,
            profile=PROFILE, part="version", version=version, history=0,
        )
        for version in ("llada2.0", "llada2.1")
    ]  # fmt: skip
    table = table_of(fig18.EXPERIMENT, points, tmp_path / "out")
    assert list(table["version"].unique()) == ["llada2.0", "llada2.1"]
    assert table["model"].unique().tolist() == ["llada2.0-mini"]
    assert fig18.EXPERIMENT.plot(table) is not None
    assert not [p for p in fig18.points("quick") if isinstance(p, fig18.OverheadPoint)]
