"""Confidence against route stability, by token state."""

import math

import numpy as np
import pytest
from analysis_traces import GEOMETRY, one, worked_request
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.analysis import confidence_stability
from oled_sim.testing.traces import geometries, random_request, requests
from oled_sim.trace.stats import token_transitions, trace_statistics

# Transitions of the worked request; kept shares are means over layer 1 and layer 4 (which keeps
# everything):
#   still masked   position 1, 0->1: confidence .5,  {0,2}:{0,3} 1/2 -> .75
#                  position 3, 3->4: confidence .25, {1,2}:{1,2} 1   -> 1
#   just accepted  position 1, 1->2: confidence .75, {0,3}:{4,5} 0   -> .5
#                  position 2, 3->4: confidence .5,  {0,1}:{2,3} 0   -> .5
#                  position 3, 4->5: confidence .75, {1,2}:{0,2} 1/2 -> .75
#   decoded        position 2, 4->5: confidence 1,   {2,3}:{2,3} 1   -> 1


@pytest.fixture(scope="module")
def tables():
    return confidence_stability([worked_request()], GEOMETRY)


def test_binned_means(tables):
    bins = tables["confidence_bins"]
    row = one(bins, state="accepted", confidence_low=0.75)
    assert (row["confidence_high"], row["transitions"], row["kept"]) == (0.8, 2, 0.625)
    assert one(bins, state="masked", confidence_low=0.25)["kept"] == 1
    assert one(bins, state="decoded", confidence_low=0.95)["transitions"] == 1  # 1 is in the last
    row = one(bins, state="all", confidence_low=0.5)
    assert (row["transitions"], row["kept"]) == (2, 0.625)  # .75 masked and .5 accepted
    assert set(bins["state"]) == {"masked", "accepted", "decoded", "all"}  # nothing was edited


def test_joint_histogram(tables):
    joint = tables["confidence_joint"]
    assert one(joint, state="accepted", confidence_low=0.75, kept_low=0.5)["transitions"] == 1
    assert one(joint, state="accepted", confidence_low=0.75, kept_low=0.75)["transitions"] == 1
    assert one(joint, state="all", confidence_low=0.95, kept_low=0.95)["transitions"] == 1
    assert joint.groupby("state")["transitions"].sum().to_dict() == {
        "masked": 2, "accepted": 3, "decoded": 1, "all": 6,
    }  # fmt: skip


def test_correlation(tables):
    table = tables["confidence_correlation"]
    row = one(table, state="accepted")
    # x - mean: 1/12, -1/6, 1/12; y - mean: -1/12, -1/12, 1/6. Sxy = 1/48, Sxx = Syy = 1/24.
    assert (row["transitions"], row["correlation"]) == (3, pytest.approx(0.5))
    assert row["kept"] == pytest.approx(1.75 / 3)
    assert one(table, state="masked")["correlation"] == pytest.approx(-1)
    assert math.isnan(one(table, state="decoded")["correlation"])
    assert one(table, state="edited")["transitions"] == 0


def test_kept_shares_on_an_edge_are_not_lost_to_rounding():
    # k = 10 on one layer: shares are tenths, each the lower edge of a bin of a twentieth.
    from oled_sim.analysis.stability import _bins

    shares = np.arange(11) / 10
    assert _bins(shares).tolist() == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 19]


def test_unknown_confidence_counts_for_the_mean_only():
    rng = np.random.default_rng(1)
    request = random_request(rng, GEOMETRY, passes=20, signals=("ids", "token_state"))
    tables = confidence_stability([request], GEOMETRY)
    assert tables["confidence_bins"].empty
    assert tables["confidence_joint"].empty
    row = one(tables["confidence_correlation"], state="all")
    assert row["transitions"] > 0
    assert 0 <= row["kept"] <= 1
    assert math.isnan(row["correlation"])


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_tables_agree_with_each_other_and_with_the_transitions(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    tables = confidence_stability(traces, geometry)
    bins, joint = tables["confidence_bins"], tables["confidence_joint"]
    found = [token_transitions(trace, len(geometry.layers)) for trace in traces]
    for state in ("masked", "accepted", "decoded", "edited", "all"):
        confidence, kept = (
            np.concatenate([getattr(f, name)[f.members.get(state, slice(None))] for f in found])
            for name in ("confidence", "kept")
        )
        mine = bins[bins["state"] == state]
        assert mine["transitions"].sum() == len(kept)
        assert (mine["transitions"] * mine["kept"]).sum() == pytest.approx(kept.sum())
        for row in mine.to_dict("records"):
            low, high = row["confidence_low"], row["confidence_high"]
            here = (confidence >= low - 1e-6) & ((confidence < high + 1e-6) | (high == 1))
            assert here.sum() >= row["transitions"]
        cells = joint[joint["state"] == state]
        sums = cells.groupby("confidence_low")["transitions"].sum()
        assert sums.to_dict() == dict(zip(mine["confidence_low"], mine["transitions"], strict=True))


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_correlations_are_those_of_trace_info(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry)) for _ in range(2)]
    table = confidence_stability(traces, geometry)["confidence_correlation"].set_index("state")
    for state, stability in trace_statistics(traces, geometry).stability.items():
        assert table.loc[state, "transitions"] == stability.transitions
        expected = [stability.kept, stability.correlation]
        assert table.loc[state, ["kept", "correlation"]].tolist() == pytest.approx(
            expected, nan_ok=True
        )
