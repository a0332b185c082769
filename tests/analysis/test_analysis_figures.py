"""Figures: the same bytes each time, axes with units, nothing left behind in matplotlib."""

import io

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pandas as pd
import pytest
from PIL import Image

from oled_sim.analysis import analyze_traces
from oled_sim.analysis.output import FIGURES
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.plotting import STYLE, image_bytes, save, styled
from oled_sim.plotting.locality import draw_all
from oled_sim.plotting.miss_curves import draw_miss_curves
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace.schema import SIGNALS

PNG = b"\x89PNG\r\n\x1a\n"
OKABE_ITO = {"000000", "E69F00", "56B4E9", "009E73", "F0E442", "0072B2", "D55E00", "CC79A7"}


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("figures"), np.random.default_rng(3)
    geometry = RoutingGeometry((1, 2, 5), 12, 3)
    traces = {
        name: write_trace(
            folder / name,
            [random_request(rng, geometry, passes=30, signals=signals)],
            geometry,
            signals=signals,
        )
        for name, signals in (("whole", SIGNALS), ("bare", ("ids", "gates")))
    }
    return analyze_traces(traces)


def test_every_figure_is_drawn_with_the_bytes_it_had_before(tables):
    first, second = draw_all(tables), draw_all(tables)
    assert set(first) == set(FIGURES)
    for name, figure in first.items():
        data = image_bytes(figure, "png")
        assert data.startswith(PNG)
        assert len(data) > 5000
        assert data == image_bytes(second[name], "png"), name


def test_vector_figures_carry_no_date_and_are_the_same_each_time(tables):
    first, second = (draw_all(tables)["locality"] for _ in range(2))
    data = image_bytes(first, "svg")
    assert b"<svg" in data
    assert b"date" not in data
    assert data == image_bytes(second, "svg")


def test_every_axis_is_labelled_and_every_trace_is_marked(tables):
    for name, figure in draw_all(tables).items():
        figure.canvas.draw()
        texts = [text for axes in figure.axes for text in axes.get_legend_handles_labels()[1]]
        titles = [axes.get_title(loc="left") for axes in figure.axes]
        assert "whole (synthetic)" in texts + titles, name
        for axes in figure.axes:
            assert axes.get_ylabel() or axes.get_xlabel(), name


def test_values_drawn_are_those_of_the_table(tables):
    figure = draw_all(tables)["activation"]
    rows = tables["activation_ratio"]
    for trace, line in zip(("whole", "bare"), figure.axes[0].lines, strict=False):
        mine = rows[(rows["trace"] == trace) & (rows["kind"] == "denoise")]
        assert line.get_xdata().tolist() == [1, 2, 5]
        assert line.get_ydata().tolist() == mine["activation_ratio"].tolist()


def test_a_trace_without_cosines_says_so(tables):
    bare = {name: t[t["trace"] == "bare"] for name, t in tables.items() if len(t)}
    figures = draw_all(bare)
    assert "confidence" not in figures
    assert "not recorded" in [text.get_text() for text in figures["locality"].axes[0].texts]
    assert "not recorded" not in [text.get_text() for text in figures["locality"].axes[1].texts]


def test_colours_are_those_that_colour_blind_readers_can_tell_apart():
    with styled():
        cycle = mpl.rcParams["axes.prop_cycle"].by_key()
    assert {colour.lstrip("#") for colour in cycle["color"]} <= OKABE_ITO
    # In grey, too: no two entries share line style and marker.
    pairs = list(zip(cycle["linestyle"], cycle["marker"], strict=True))
    assert len(set(pairs)) == len(pairs)


def test_the_style_has_the_name_that_matplotlib_takes():
    with mpl.rc_context():
        mpl.style.use(STYLE)
        assert mpl.rcParams["svg.hashsalt"] == "oled-sim"


def test_the_readers_own_settings_are_left_alone(tables):
    before = dict(mpl.rcParams)
    with mpl.rc_context({"font.size": 33, "lines.linewidth": 9}):
        ours = image_bytes(draw_all(tables)["reuse"], "png")
        assert mpl.rcParams["font.size"] == 33
    assert dict(mpl.rcParams) == before
    assert ours == image_bytes(draw_all(tables)["reuse"], "png")


def test_another_format_is_refused(tables, tmp_path):
    figure = draw_all(tables)["reuse"]
    with pytest.raises(UsageError, match="png or svg, not as jpeg"):
        save(figure, tmp_path / "reuse.jpeg")
    assert not list(tmp_path.iterdir())


def test_a_png_of_few_colours_is_small_and_the_same_each_time(tables):
    figure = draw_all(tables)["reuse"]
    whole, small = image_bytes(figure, "png"), image_bytes(figure, "png", colours=16)
    assert len(small) < len(whole) / 2
    assert small == image_bytes(figure, "png", colours=16)
    palette, original = (Image.open(io.BytesIO(png)) for png in (small, whole))
    assert palette.size == original.size
    assert len(palette.convert("RGB").getcolors()) <= 16


def test_a_heat_map_keeps_its_colours(tables):
    figure = draw_all(tables)["confidence"]
    whole, small = (image_bytes(figure, "png", colours=n) for n in (None, 256))
    original, found = (
        np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int) for png in (whole, small)
    )
    assert len(small) < len(whole) / 2
    assert np.abs(found - original).max() <= 16  # of 255, at edges of letters


def test_styled_is_what_the_style_file_says():
    with styled():
        assert mpl.rcParams["svg.hashsalt"] == "oled-sim"
        assert mpl.rcParams["image.cmap"] == "cividis"


def test_miss_curves_say_what_is_real_and_how_far_the_others_are_off():
    rows = [
        ("gsm8k", policy, trace, origin, cache, misses, 100)
        for policy, worse in (("lru", 0), ("oled", 10))
        for trace, origin, off in (("mini", "real", 0), ("none", "synthetic", -5))
        for cache, misses in ((10, 80 + worse + off), (40, 50 + worse + 2 * off))
    ]
    names = ["data_set", "policy", "trace", "origin", "cache", "misses", "activations"]
    figure = draw_miss_curves(pd.DataFrame(rows, columns=names))
    rates, apart = figure.axes
    assert [list(line.get_ydata()) for line in rates.lines] == [
        [0.8, 0.5], [0.75, 0.4], [0.9, 0.6], [0.85, 0.5],
    ]  # fmt: skip
    _, lru, oled = apart.lines  # after the line at zero
    for line in (lru, oled):
        assert line.get_ydata() == pytest.approx([-0.05, -0.1])
    labels = [text.get_text() for text in rates.get_legend().get_texts()]
    assert labels == ["lru, real", "lru, synthetic", "oled, real", "oled, synthetic"]
    assert apart.get_xlabel() == "cache (experts per layer)"
    assert "%" in rates.get_ylabel() and "percentage points" in apart.get_ylabel()
