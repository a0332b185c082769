"""Overlap and cosine by iteration gap."""

import math

import numpy as np
import pytest
from analysis_traces import GEOMETRY, NAN, event_sets, one, union, worked_request
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.analysis import locality, pooled
from oled_sim.testing.traces import geometries, requests
from oled_sim.trace import Kind
from oled_sim.trace.stats import trace_statistics


@pytest.fixture(scope="module")
def table():
    return locality([worked_request()], GEOMETRY)


def test_within_blocks(table):
    # Passes 1->2, 3->4, 4->5 at layer 1 keep two of three experts each.
    row = one(table, span="within", gap=1, layer=1)
    assert (row["pairs"], row["overlap"]) == (3, pytest.approx(2 / 3))
    # {0,1,3}:{0,1,4,5} 2/5, {0,1,2}:{1,2,3} 2/4, {1,2,3}:{0,2,3} 2/4.
    assert row["jaccard"] == pytest.approx(1.4 / 3)
    # Gap 2: only 3->5, {0,1,2} and {0,2,3}.
    row = one(table, span="within", gap=2, layer=1)
    assert (row["pairs"], row["overlap"]) == (1, pytest.approx(2 / 3))
    assert one(table, span="within", gap=1, layer=4)["overlap"] == 1
    within = table[table["span"] == "within"]
    assert within["gap"].max() == 2


def test_across_block_boundaries(table):
    # 2->3: {0,1,4,5} keeps {0,1}.
    assert one(table, span="across", gap=1, layer=1)["overlap"] == 0.5
    # 1->3: {0,1,3} keeps {0,1}; 2->4: {0,1,4,5} keeps {1}. (2/3 + 1/4) / 2 = 11/24.
    row = one(table, span="across", gap=2, layer=1)
    assert (row["pairs"], row["overlap"]) == (2, pytest.approx(11 / 24))
    # 1->5 is the longest: nothing reaches back to the prefill.
    assert table["gap"].max() == 4


def test_without_cosines_there_are_none(table):
    assert table["cosine"].isna().all()
    assert (table["cosine_pairs"] == 0).all()


def test_cosines_by_hand():
    # Pass i at layer 1 has the cosine i/8 to the pass before it and 1/16 to all others.
    cosines = np.full((6, 2, 8), 0.0625)
    for i in range(6):
        cosines[i, :, 0] = i / 8
        cosines[i, :, i:] = NAN
    table = locality([worked_request(cosines=cosines)], GEOMETRY)
    # Within: passes 2, 4, 5 look one pass back: (2 + 4 + 5) / 8 / 3. Across: pass 3.
    row = one(table, span="within", gap=1, layer=1)
    assert (row["cosine_pairs"], row["cosine"]) == (3, pytest.approx(11 / 24))
    assert one(table, span="across", gap=1, layer=4)["cosine"] == 0.375
    assert one(table, span="across", gap=2, layer=1)["cosine"] == 0.0625


def test_cosines_that_are_unknown_do_not_count():
    cosines = np.full((6, 2, 8), NAN)
    cosines[4, 0, 0] = 0.5
    table = locality([worked_request(cosines=cosines)], GEOMETRY)
    row = one(table, span="within", gap=1, layer=1)
    assert (row["pairs"], row["cosine_pairs"], row["cosine"]) == (3, 1, 0.5)
    assert math.isnan(one(table, span="across", gap=1, layer=1)["cosine"])


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_overlap_agrees_with_plain_sets(data):
    geometry = data.draw(geometries(max_experts=80))
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    expected = {}
    for trace in traces:
        sets = {(i, layer): union(rows) for i, layer, rows in event_sets(trace)}
        for (i, layer), now in sets.items():
            for gap in range(1, 9):
                then = sets.get((i + gap, layer))
                if then is None or Kind.PREFILL in (trace.kind[i], trace.kind[i + gap]):
                    continue
                span = "within" if trace.block[i] == trace.block[i + gap] else "across"
                share = len(now & then) / len(now), len(now & then) / len(now | then)
                expected.setdefault((span, gap, geometry.layers[layer]), []).append(share)
    table = locality(traces, geometry)
    found = {(r["span"], r["gap"], r["layer"]): r for r in table.to_dict("records")}
    assert found.keys() == expected.keys()
    for key, shares in expected.items():
        overlap, jaccard = np.mean(shares, axis=0)
        assert found[key]["pairs"] == len(shares)
        assert found[key]["overlap"] == pytest.approx(overlap)
        assert found[key]["jaccard"] == pytest.approx(jaccard)


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_neighbours_are_those_of_trace_info(data):
    """`oled-sim trace info` and this analysis print the same overlap of adjacent passes."""
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry)) for _ in range(2)]
    means = pooled(locality(traces, geometry), ["span", "gap"], "overlap", "pairs")
    statistics = trace_statistics(traces, geometry)
    for span, value in (
        ("within", statistics.adjacent_overlap),
        ("across", statistics.boundary_overlap),
    ):
        rows = means[(means["span"] == span) & (means["gap"] == 1)]["overlap"].tolist()
        assert rows == ([] if math.isnan(value) else [pytest.approx(value)])
