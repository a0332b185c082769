"""Activated experts and FLOPs by tokens, and by length of the block's beginning."""

import math

import numpy as np
import pytest
from analysis_traces import GEOMETRY, event_sets, one, union, worked_request
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.analysis import activation_ratio, block_footprint, footprint
from oled_sim.geometry import GEOMETRIES, RoutingGeometry
from oled_sim.testing.traces import geometries, requests
from oled_sim.trace import Kind, LayerRoutes, RequestBuilder, TokenState


def test_footprint_by_hand():
    table = footprint([worked_request()], GEOMETRY, cost=GEOMETRIES["llada2.0-mini"])
    # Denoise passes 1, 3, 4 at layer 1 activate 3 experts each: 3 / 2 = 1.5 times one token's.
    row = one(table, kind="denoise", layer=1)
    assert (row["tokens"], row["events"], row["activated"]) == (2, 3, 3)
    assert (row["footprint_ratio"], row["flops_ratio"]) == (1.5, 2)
    # 2 tokens × top-2 × 3 projections × 2 × 2048 × 512 = 25,165,824 FLOPs.
    assert row["expert_flops"] == 25_165_824
    # Commit passes 2 and 5 activate 4 and 3.
    row = one(table, kind="commit", layer=1)
    assert (row["activated"], row["activated_low"], row["activated_high"]) == (3.5, 3, 4)
    assert one(table, kind="prefill", layer=4)["activated"] == 2


def test_flops_are_unknown_without_sizes():
    assert footprint([worked_request()], GEOMETRY)["expert_flops"].isna().all()


def test_footprint_tells_passes_of_different_length_apart():
    builder = RequestBuilder(RoutingGeometry((0,), 4, 1), 0)
    for tokens in (1, 3, 3):
        zeros = np.zeros(tokens, int)
        builder.add_pass(
            Kind.DENOISE, 0, 0, zeros, range(tokens), zeros, zeros, zeros, zeros,
            [[[i] for i in range(tokens)]],
        )  # fmt: skip
    table = footprint([builder.build()], builder.geometry)
    assert table["tokens"].tolist() == [1, 3]
    assert table["events"].tolist() == [1, 2]
    assert table["footprint_ratio"].tolist() == [1, 3]


def test_block_footprint_by_hand():
    table = block_footprint([worked_request()], GEOMETRY)
    # Layer 1, denoise passes: the first token alone has 2 experts, both together 3.
    assert one(table, layer=1, block_length=1)["activated"] == 2
    row = one(table, layer=1, block_length=2)
    assert (row["events"], row["activated"], row["footprint_ratio"]) == (3, 3, 1.5)
    assert row["flops_ratio"] == 2
    assert set(table["block_length"]) == {1, 2}  # no pass holds 4 tokens


def test_a_pass_that_lacks_one_of_the_first_tokens_does_not_count():
    builder = RequestBuilder(RoutingGeometry((0,), 6, 1), 0)
    columns = ([0] * 4, range(4), [TokenState.MASKED] * 4, [0.5] * 4, [0] * 4, [0] * 4)
    builder.add_pass(Kind.DENOISE, 0, 0, *columns, [LayerRoutes(0, [0, 1, 3], [[0], [0], [5]])])
    builder.add_pass(
        Kind.DENOISE, 0, 0, *columns, [LayerRoutes(0, [0, 1, 2, 3], [[0], [1], [2], [3]])]
    )
    table = block_footprint([builder.build()], builder.geometry, block_lengths=(1, 2, 3))
    # b = 2: {0} and {0, 1}. b = 3: the first pass has no third token.
    assert table["events"].tolist() == [2, 2, 1]
    assert table["activated"].tolist() == [1, 1.5, 3]


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_block_footprint_agrees_with_plain_sets(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    table = block_footprint(traces, geometry, block_lengths=(1, 2, 3, 4, 5))
    expected = {}
    for trace in traces:
        for event, (i, layer, rows) in enumerate(event_sets(trace)):
            if trace.kind[i] != Kind.DENOISE:
                continue
            first = trace.event_offset[event]
            tokens = trace.row_token[first : first + len(rows)] - trace.token_offset[i]
            routes = dict(zip(tokens.tolist(), rows, strict=True))
            for b in range(1, 6):
                if all(t in routes for t in range(b)):
                    size = len(union(routes[t] for t in range(b)))
                    expected.setdefault((geometry.layers[layer], b), []).append(size)
    found = {
        (row["layer"], row["block_length"]): (row["events"], row["activated"])
        for row in table.to_dict("records")
    }
    assert found.keys() == expected.keys()
    for key, sizes in expected.items():
        assert found[key] == (len(sizes), pytest.approx(np.mean(sizes)))


def test_activation_ratio_by_hand():
    table = activation_ratio([worked_request()], GEOMETRY)
    row = one(table, kind="denoise", layer=1)
    assert (row["events"], row["activated"], row["activation_ratio"]) == (3, 3, 0.5)
    assert one(table, kind="denoise", layer=4)["activation_ratio"] == pytest.approx(1 / 3)
    assert one(table, kind="commit", layer=1)["activated"] == 3.5


def test_quantiles_are_values_that_occur():
    geometry = RoutingGeometry((0,), 20, 1)
    builder = RequestBuilder(geometry, 0)
    for tokens in range(1, 21):  # |A| = 1, 2, ... 20
        zeros = np.zeros(tokens, int)
        builder.add_pass(
            Kind.DENOISE, 0, 0, zeros, range(tokens), zeros, zeros, zeros, zeros,
            [[[i] for i in range(tokens)]],
        )  # fmt: skip
    row = activation_ratio([builder.build()], geometry).iloc[0]
    # 5 % of 20 events is the smallest one, 95 % are 19 of them.
    assert (row["activated_p05"], row["activated_p50"], row["activated_p95"]) == (1, 10, 19)
    assert row["activated"] == 10.5


@settings(max_examples=examples(40), deadline=None)
@given(st.data())
def test_activation_and_footprint_agree_with_plain_sets(data):
    geometry = data.draw(geometries())
    traces = [data.draw(requests(geometry, ragged=data.draw(st.booleans()))) for _ in range(2)]
    sizes = {}
    for trace in traces:
        for i, layer, rows in event_sets(trace):
            key = Kind(trace.kind[i]).name.lower(), geometry.layers[layer]
            sizes.setdefault(key, []).append(len(union(rows)))
    table = activation_ratio(traces, geometry)
    assert {(r["kind"], r["layer"]) for r in table.to_dict("records")} == sizes.keys()
    for row in table.to_dict("records"):
        values = sizes[row["kind"], row["layer"]]
        assert row["events"] == len(values)
        assert row["activated"] == pytest.approx(np.mean(values))
        assert row["activated_p50"] == sorted(values)[math.ceil(0.5 * len(values)) - 1]
    whole = footprint(traces, geometry)
    for (kind, layer), rows in whole.groupby(["kind", "layer"]):
        assert rows["events"].sum() == len(sizes[kind, layer])
        total = (rows["activated"] * rows["events"]).sum()
        assert total == pytest.approx(sum(sizes[kind, layer]))
        assert rows["activated_low"].min() == min(sizes[kind, layer])
        assert rows["activated_high"].max() == max(sizes[kind, layer])
