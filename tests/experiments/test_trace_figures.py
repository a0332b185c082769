"""Figures 4, 7 and 10: tidy tables agree with `analyze`, per request and for whole traces."""

from __future__ import annotations

import pandas as pd
import pytest

from oled_sim.analysis.report import analyze_trace
from oled_sim.analysis.tally import pooled
from oled_sim.experiment import Experiment, Inputs, SyntheticTrace, run_experiments
from oled_sim.experiments._analysis import AnalysisPoint
from oled_sim.experiments.fig04_footprint import EXPERIMENT as FIG04
from oled_sim.experiments.fig07_locality import EXPERIMENT as FIG07
from oled_sim.experiments.fig10_signals import EXPERIMENT as FIG10
from oled_sim.trace import open_trace

TRACE = "nano-gsm8k"
FIGURES = [FIG04, FIG07, FIG10]


def on(trace: object, experiment: Experiment) -> AnalysisPoint:
    """The experiment's point on another trace."""
    (first, *_) = experiment.grid("quick")
    assert isinstance(first, AnalysisPoint)
    return AnalysisPoint(trace, tables=first.tables, quantities=first.quantities)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    inputs = Inputs(tmp_path_factory.mktemp("traces"))
    return {e.name: pd.DataFrame(on(TRACE, e).measure(inputs)) for e in FIGURES}


def test_whole_traces_are_what_analyze_finds(rows: dict[str, pd.DataFrame]):
    tables = analyze_trace(open_trace(TRACE))
    for experiment in FIGURES:
        table = rows[experiment.name]
        for name in on(TRACE, experiment).tables:
            mine = table[table["table"] == name][list(tables[name].columns)]
            pd.testing.assert_frame_equal(
                mine.reset_index(drop=True), tables[name], check_dtype=False
            )


def test_a_row_per_request_is_what_analyze_finds_of_it_alone(rows: dict[str, pd.DataFrame]):
    table = rows["fig07"]
    found = table[table["table"] == "requests"].set_index("request")
    assert list(found.index) == list(open_trace(TRACE).requests)
    third = open_trace(TRACE).requests[2]
    alone = analyze_trace(open_trace(TRACE), requests=[third])["paper"].set_index("key")["value"]
    for key in on(TRACE, FIG07).quantities:
        assert found.loc[third, key] == pytest.approx(alone[key], nan_ok=True)


def test_flops_grow_with_tokens_and_footprint_less(rows: dict[str, pd.DataFrame]):
    table = rows["fig04"]
    found = table[table["table"] == "requests"]
    assert (found["flops_ratio"] == 16).all()  # nano decodes blocks of 16
    assert (found["footprint_ratio"] < 16).all()
    blocks = pooled(table[table["table"] == "block_footprint"], ["block_length"],
                    "footprint_ratio", "events").set_index("block_length")  # fmt: skip
    assert blocks.loc[1, "footprint_ratio"] == 1


@pytest.mark.parametrize(
    "experiment",
    [FIG04, *(pytest.param(e, marks=pytest.mark.slow) for e in (FIG07, FIG10))],
    ids=lambda e: e.name,
)
def test_real_and_synthetic_traces_are_drawn_apart(experiment: Experiment, tmp_path):
    small = SyntheticTrace("llada2.0-mini", "gsm8k", requests=2, output_tokens=32)
    points = [on(trace, experiment) for trace in (TRACE, "nano-humaneval", small)]
    small_one = Experiment(experiment.name, "", "", lambda size: points, experiment.plot)
    (found,) = run_experiments([small_one], "quick", tmp_path)
    table = pd.read_parquet(found.table)
    assert list(table["group"].unique()) == ["nano", "llada2.0-mini"]
    figure = experiment.plot(table)
    said = " ".join(_texts(figure))
    assert "nano (real)" in said  # both data sets as one
    assert "llada2.0-mini (synthetic)" in said
    assert "2 real and 1 synthetic traces" in said


def _texts(figure) -> list[str]:
    from matplotlib.text import Text

    return [t.get_text() for t in figure.findobj(Text)]


def test_full_size_has_both_models_and_every_data_set():
    for experiment in FIGURES:
        traces = {p.trace for p in experiment.grid("full") if isinstance(p.trace, SyntheticTrace)}
        assert {(t.model, t.data_set) for t in traces} >= {
            (m, d)
            for m in ("llada2.0-mini", "llada2.0-flash")
            for d in ("gsm8k", "humaneval", "science")
        }
