"""Reuse distances, and the LRU hit curve against a simulation that knows nothing of stacks."""

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
from analysis_traces import GEOMETRY, event_sets, one, union, worked_request
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.analysis import reuse
from oled_sim.engine.rules import Rules
from oled_sim.engine.runner import simulate
from oled_sim.engine.source import MemoryTrace
from oled_sim.geometry import RoutingGeometry
from oled_sim.policies.lru import LRU
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import geometries, random_request, requests
from oled_sim.trace import Kind, RequestBuilder


@pytest.fixture(scope="module")
def tables():
    return reuse([worked_request()], GEOMETRY)


def counts(table, **where):
    for column, value in where.items():
        table = table[table[column] == value]
    first = int(table.loc[table["distance"].isna(), "activations"].sum())
    known = table[table["distance"].notna()]
    return first, dict(zip(known["distance"].astype(int), known["activations"], strict=True))


def test_distances_by_hand(tables):
    # Layer 1, most recent first, an expert counting at its last slot:
    # pass 0 routes 0 1 0 2: stack 2 0 1, three first touches (in the prefill).
    # pass 1 routes 0 1 0 3: 0 at 1, 1 at 2, 3 new; stack 3 0 1 2.
    # pass 2 routes 0 1 4 5: 0 at 1, 1 at 2, 4 and 5 new; stack 5 4 1 0 3 2.
    # pass 3 routes 0 1 1 2: 0 at 3, 1 at 2, 2 at 5; stack 2 1 0 5 4 3.
    # pass 4 routes 2 3 1 2: 1 at 1, 2 at 0, 3 at 5; stack 2 1 3 0 5 4.
    # pass 5 routes 2 3 0 2: 0 at 3, 2 at 0, 3 at 2.
    distances = tables["reuse_distance"]
    assert counts(distances, phase="prefill", layer=1, measure="experts") == (3, {})
    assert counts(distances, phase="decode", layer=1, measure="experts") == (
        3,
        {0: 2, 1: 3, 2: 4, 3: 2, 5: 2},
    )
    # Events: two of each pass return from the pass before; 0 skips pass 4 (distance 2); 2 was
    # last used in pass 0 and returns in 3, 3 was last used in pass 1 and returns in 4 (3 each).
    assert counts(distances, phase="decode", layer=1, measure="events") == (3, {1: 10, 2: 1, 3: 2})


def test_hit_curve_by_hand(tables):
    rows = tables["lru_hits"]
    rows = rows[(rows["phase"] == "decode") & (rows["layer"] == 1)]
    assert rows["capacity"].tolist() == list(range(7))
    assert rows["hits"].tolist() == [0, 2, 5, 9, 11, 11, 13]
    assert (rows["activations"] == 16).all()
    assert (rows["first_touches"] == 3).all()
    assert rows["hit_rate"].iloc[-1] == 13 / 16


def test_recency_lasts_over_requests_unless_cold():
    twice = [worked_request(), worked_request()]
    warm = one(reuse(twice, GEOMETRY)["lru_hits"], phase="decode", layer=4, capacity=2)
    assert (warm["first_touches"], warm["hits"]) == (0, 20)  # 2 × 5 decode passes × {4, 5}
    first = counts(reuse(twice, GEOMETRY)["reuse_distance"], layer=1, measure="experts")[0]
    assert first == 6  # each expert once
    cold = reuse(twice, GEOMETRY, cold=True)["lru_hits"]
    once = reuse(twice[:1], GEOMETRY)["lru_hits"]
    assert (cold["hits"] == 2 * once["hits"]).all()
    assert (cold["first_touches"] == 2 * once["first_touches"]).all()


def test_all_of_an_event_is_looked_up_before_any_of_it_moves():
    geometry = RoutingGeometry((0,), 3, 1)
    builder = RequestBuilder(geometry, 0)
    zeros = [0, 0, 0]
    for _ in range(2):
        builder.add_pass(
            Kind.DENOISE, 0, 0, zeros, range(3), zeros, zeros, zeros, zeros, [[[0], [1], [2]]]
        )
    hits = reuse([builder.build()], geometry)["lru_hits"]["hits"].tolist()
    # A sequence 0 1 2 0 1 2 would hit nothing below three slots; of the set, C are resident.
    assert hits == [0, 1, 2, 3]


def naive_lru(traces, layer, capacity, cold):
    """Simulate one layer: stamps of the residents, evicting the oldest after each event."""
    resident, clock, hits = {}, 0, {"prefill": 0, "decode": 0}
    for trace in traces:
        if cold:
            resident = {}
        for i, where, rows in event_sets(trace):
            if where != layer:
                continue
            phase = "prefill" if trace.kind[i] == Kind.PREFILL else "decode"
            hits[phase] += len(union(rows) & resident.keys())
            for row in rows:
                for expert in row:
                    clock += 1
                    resident[expert] = clock
            while len(resident) > capacity:
                del resident[min(resident, key=resident.get)]
    return hits


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_hit_curve_is_that_of_a_simulated_lru_at_every_capacity(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    cold = data.draw(st.booleans())
    table = reuse(traces, geometry, cold=cold)["lru_hits"]
    for index, layer in enumerate(geometry.layers):
        for capacity in range(geometry.experts + 1):
            expected = naive_lru(traces, index, capacity, cold)
            rows = table[(table["layer"] == layer) & (table["capacity"] == capacity)]
            found = dict(zip(rows["phase"], rows["hits"], strict=True))
            assert {phase: found.get(phase, 0) for phase in expected} == expected


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_event_distances_agree_with_looking_back(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    history = {}
    expected = []
    for trace in traces:
        for i, layer, rows in event_sets(trace):
            phase = "prefill" if trace.kind[i] == Kind.PREFILL else "decode"
            past = history.setdefault(layer, [])
            for expert in union(rows):
                ago = [n for n, used in enumerate(reversed(past), 1) if expert in used]
                distance = ago[0] if ago else pd.NA
                expected.append((phase, geometry.layers[layer], distance))
            past.append(union(rows))
    table = reuse(traces, geometry)["reuse_distance"]
    table = table[table["measure"] == "events"]
    columns = ["phase", "layer", "distance"]
    expected = pd.DataFrame(expected, columns=columns).astype({"distance": "Int64"})
    expected = expected.groupby(columns, dropna=False).size()
    found = table.set_index(columns)["activations"]
    assert found.sort_index().to_dict() == expected.sort_index().to_dict()


@settings(max_examples=examples(30), deadline=None)
@given(st.data())
def test_both_measures_count_every_activation_once(data):
    geometry = data.draw(geometries())
    trace = data.draw(requests(geometry))
    table = reuse([trace], geometry)["reuse_distance"]
    total = sum(len(union(rows)) for _, _, rows in event_sets(trace))
    assert table.groupby("measure")["activations"].sum().tolist() == [total, total]
    firsts = table[table["distance"].isna()].groupby("measure")["activations"].sum()
    assert firsts.nunique() == 1


def test_compiled_and_interpreted_agree():
    """The same source without numba (NUMBA_DISABLE_JIT=1) gives the same numbers."""
    from oled_sim.analysis.reuse_kernel import Recency, walk

    trace = worked_request()
    slot_offset = trace.event_offset * 2
    activations = 19 + 12  # of layers 1 and 4
    results = []
    for run in (walk, getattr(walk, "py_func", walk)):
        outputs = [np.full(activations, -9, np.int64) for _ in range(3)]
        recency = Recency.empty(2, 6)
        run(recency, trace.event_layer, slot_offset, trace.experts.ravel(), *outputs)
        results.append([*outputs, *recency])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_hit_curve_is_what_the_engine_counts():
    """`oled-sim run --policy lru` without warm-up has the same hits.

    Below E slots: with room for all, a run starts with everything resident.
    """
    rng, geometry = np.random.default_rng(11), RoutingGeometry((1, 2, 5), 16, 3)
    traces = [random_request(rng, geometry, request=i, passes=20) for i in range(3)]
    source, costs = MemoryTrace(geometry, traces), costs_by_hand()
    table = reuse(traces, geometry)["lru_hits"]
    for capacity in (1, 3, 7, 11, 15):
        result = simulate(source, LRU(), costs, capacity, Rules(warmup=0, history=0))
        rows = table[table["capacity"] == capacity]
        totals = rows.groupby("phase")[["hits", "activations"]].sum()
        engine = pd.DataFrame([asdict(figures) for figures in result.requests]).sum()
        assert totals.loc["decode"].tolist() == [engine["hits"], engine["activations"]]
        prefill = [engine["prefill_hits"], engine["prefill_activations"]]
        assert totals.loc["prefill"].tolist() == prefill
