"""Popularity skew and entropies."""

import math

import numpy as np
import pytest
from analysis_traces import GEOMETRY, one, worked_request
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.analysis import popularity
from oled_sim.testing.traces import geometries, requests
from oled_sim.trace import Kind


@pytest.fixture(scope="module")
def tables():
    return popularity([worked_request()], GEOMETRY)


def entropy(*chances):
    return -sum(p * math.log2(p) for p in chances if p)


def test_shares_by_hand(tables):
    # Layer 1, passes 1 to 5: experts 0, 1, 2 are routed to 5 times each, 3 three times, 4 and 5
    # once: 20 in all. Of 6 experts, 10 % is one, 20 % two, 50 % three.
    def share(percent, weight="tokens", layer=1):
        row = one(tables["popularity"], layer=layer, weight=weight, top_percent=percent)
        return row["experts"], row["share"]

    assert share(10) == (1, 0.25)
    assert share(20) == (2, 0.5)
    assert share(50) == (3, 0.75)
    # They activate experts 0 to 5 in 4, 4, 3, 3, 1, 1 events: 16 in all.
    assert share(50, "events") == (3, pytest.approx(11 / 16))
    assert share(20, layer=4) == (2, 1)  # {4, 5} always
    assert set(tables["popularity"]["weight"]) == {"events", "tokens"}  # there are no gates


def test_entropies_by_hand(tables):
    row = one(tables["entropy"], layer=1)
    bits = entropy(0.25, 0.25, 0.25, 0.15, 0.05, 0.05)
    assert row["used_experts"] == 6
    assert row["entropy_bits"] == pytest.approx(bits)
    assert row["effective_experts"] == pytest.approx(2**bits)
    # Of 5 events, 0 and 1 are in 4, 2 and 3 in 3, 4 and 5 in 1.
    expected = 2 * entropy(0.8, 0.2) + 2 * entropy(0.6, 0.4) + 2 * entropy(0.2, 0.8)
    assert row["set_entropy_bits"] == pytest.approx(expected)
    row = one(tables["entropy"], layer=4)
    assert (row["used_experts"], row["entropy_bits"], row["effective_experts"]) == (2, 1, 2)
    assert row["set_entropy_bits"] == 0  # the set never changes


def test_gate_mass_by_hand():
    gates = [[[[0.75, 0.25], [0.5, 0.5]]] * 2] * 6
    table = popularity([worked_request(gates=gates)], GEOMETRY)["popularity"]
    # Layer 4: the first token gives expert 4 .75, the second .5; of 2 a pass, 1.25 on expert 4.
    assert one(table, layer=4, weight="gates", top_percent=10)["share"] == 0.625


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_shares_agree_with_plain_counting(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    tables = popularity(traces, geometry)
    for index, layer in enumerate(geometry.layers):
        tokens, gates = np.zeros(geometry.experts), np.zeros(geometry.experts)
        for trace in traces:
            for v in np.flatnonzero(trace.event_layer == index):
                if trace.kind[trace.event_pass[v]] == Kind.PREFILL:
                    continue
                for row in range(trace.event_offset[v], trace.event_offset[v + 1]):
                    for slot, expert in enumerate(trace.experts[row]):
                        tokens[expert] += 1
                        gates[expert] += trace.gates[row, slot]
        rows = tables["popularity"]
        rows = rows[rows["layer"] == layer]
        if not tokens.any():
            assert rows.empty
            continue
        for weight, mass in (("tokens", tokens), ("gates", gates)):
            for row in rows[rows["weight"] == weight].to_dict("records"):
                number = math.ceil(row["top_percent"] * geometry.experts / 100)
                top = np.sort(mass)[::-1][:number].sum()
                assert (row["experts"], row["share"]) == (
                    number,
                    pytest.approx(top / mass.sum(), abs=1e-9),
                )
        bits = one(tables["entropy"], layer=layer)["entropy_bits"]
        assert bits == pytest.approx(entropy(*(tokens / tokens.sum())), abs=1e-9)
