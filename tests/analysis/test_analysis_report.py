"""All tables of a trace together, and several traces side by side."""

import numpy as np
import pandas as pd
import pytest
from analysis_traces import GEOMETRY, one, worked_request

from oled_sim.analysis import analyze, analyze_traces, pooled, side_by_side
from oled_sim.analysis.output import TABLES, encode_json, parquet_bytes
from oled_sim.analysis.text import notes, print_analysis, style_value
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import BASE_SIGNALS, random_manifest, random_request, write_trace
from oled_sim.trace import Decode, Kind, RequestBuilder
from oled_sim.trace.schema import SIGNALS


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A trace with every signal, and one of another shape with ids alone."""
    folder, rng = tmp_path_factory.mktemp("two"), np.random.default_rng(5)
    whole, bare = RoutingGeometry((1, 2, 5), 12, 3), RoutingGeometry((0, 1), 7, 2)
    first = [random_request(rng, whole, request=i, passes=25, signals=SIGNALS) for i in range(3)]
    second = [random_request(rng, bare, passes=9, tokens=6, signals=("ids",))]
    manifest = random_manifest(bare, signals=("ids",), stands_for=None)
    return {
        "whole": write_trace(folder / "whole", first, whole, signals=SIGNALS),
        "bare": write_trace(folder / "bare", second, bare, manifest=manifest),
    }


def test_beside_the_paper_by_hand():
    paper = analyze([worked_request()], GEOMETRY, signals=BASE_SIGNALS)["paper"]
    value = paper.set_index("key")["value"]
    # Means over the 3 denoise events of layer 1 (|A| = 3) and layer 4 (|A| = 2).
    assert value["activated"] == 2.5
    assert value["footprint_ratio"] == 1.25
    assert value["flops_ratio"] == 2
    assert value["activation_ratio"] == pytest.approx(2.5 / 6)
    # Within: 2/3 three times and 1 three times. Across: 1/2 and 1.
    assert value["overlap_within"] == pytest.approx(5 / 6)
    assert value["overlap_across"] == 0.75
    assert np.isnan(value["cosine"])
    assert value["correlation_accepted"] == pytest.approx(0.5)
    # Layer 4 activates 2 of 6, layer 1 three; no block has five passes.
    assert value["activation_least"] == pytest.approx(2 / 6)
    assert value["activation_most"] == pytest.approx(3 / 6)
    assert np.isnan(value["overlap_within_4"])
    # Of confidence 1 there is one token, which keeps {2, 3}; of 0.25 one, which keeps {1, 2}.
    assert value["kept_sure"] == 1
    assert value["kept_unsure"] == 1


def test_tables_that_need_confidence_are_left_out_without_it():
    tables = analyze([worked_request()], GEOMETRY, signals=("ids",))
    assert not [name for name in tables if name.startswith("confidence")]
    assert tables["paper"].set_index("key")["value"].filter(like="correlation").isna().all()


def test_traces_stand_side_by_side(two):
    tables = analyze_traces(two)
    assert tuple(tables) == TABLES
    for table in tables.values():
        assert table.columns[:2].tolist() == ["trace", "origin"]
        assert set(table["origin"]) <= {"synthetic"}
    traces = tables["traces"].set_index("trace")
    assert traces["passes"].to_dict() == {"whole": 75, "bare": 9}
    assert set(tables["confidence_bins"]["trace"]) == {"whole"}
    assert tables["lru_hits"].groupby("trace")["capacity"].max().to_dict() == {
        "whole": 12, "bare": 7,
    }  # fmt: skip
    # Each part is what the trace gives alone.
    alone = analyze_traces({"bare": two["bare"]})
    for name, table in alone.items():
        both = tables[name]
        mine = both[both["trace"] == "bare"].reset_index(drop=True)
        pd.testing.assert_frame_equal(mine, table, check_dtype=False)


def test_only_some_requests(two):
    counted = []
    tables = analyze_traces(two, requests=2, on_request=lambda: counted.append(1))
    traces = tables["traces"].set_index("trace")
    assert traces["requests"].to_dict() == {"whole": 2, "bare": 1}
    assert len(counted) == 3
    events = tables["activation_ratio"].groupby("trace")["events"].sum()
    assert events["whole"] == 2 * 25 * 3


def test_the_length_of_the_block_is_among_the_block_lengths(tmp_path):
    geometry = RoutingGeometry((1,), 12, 3)
    request = random_request(np.random.default_rng(0), geometry, tokens=6)
    decode = Decode(rule="2.0", block_length=6)
    manifest = random_manifest(geometry)
    manifest = type(manifest)(
        **{f: getattr(manifest, f) for f in manifest.__struct_fields__} | {"decode": decode}
    )
    trace = write_trace(tmp_path / "t", [request], geometry, manifest=manifest)
    blocks = analyze_traces({"t": trace})["block_footprint"]
    assert blocks["block_length"].tolist() == [1, 2, 4, 6]


def test_nothing_to_analyze_is_said():
    with pytest.raises(UsageError, match="no trace"):
        side_by_side({})


def test_a_request_of_one_prefill_has_empty_tables_not_errors(tmp_path):
    geometry = RoutingGeometry((1,), 12, 3)
    request = random_request(np.random.default_rng(0), geometry, passes=1)
    trace = write_trace(tmp_path / "t", [request], geometry)
    tables = analyze_traces({"t": trace})
    assert tables["locality"].empty
    assert tables["popularity"].empty
    assert tables["entropy"].empty
    assert set(tables["footprint"]["kind"]) == {"prefill"}
    assert tables["paper"]["value"].isna().all()
    print_analysis(tables)
    assert encode_json(tables)


def test_same_tables_same_bytes(two):
    first, second = analyze_traces(two), analyze_traces(two)
    assert encode_json(first) == encode_json(second)
    for name in first:
        assert parquet_bytes(first[name]) == parquet_bytes(second[name])


def test_notes_say_what_is_missing_and_how_to_record_it(two):
    found = list(notes(analyze_traces(two)["traces"]))
    assert found == [
        "bare has no hidden-state cosines: it holds no cosines"
        " (record it with `oled-sim collect --cosines`).",
        "bare has no popularity by gate mass: it holds no gates.",
        "bare has no confidence against route stability:"
        " it holds no confidence and no token_state.",
    ]


def test_pooling_weighs_rows_and_ignores_unknown_values():
    table = pd.DataFrame(
        {"gap": [1, 1, 1, 2], "value": [0.5, 1.0, np.nan, np.nan], "pairs": [3, 1, 9, 2]}
    )
    result = pooled(table, ["gap"], "value", "pairs")
    assert result.to_dict("records") == [{"gap": 1, "value": 0.625, "pairs": 4}]


@pytest.mark.parametrize(
    ("value", "style", "text"),
    [
        (7.96, "times", "8.0×"),
        (0.8766, "percent", "87.7 %"),
        (61.04, "count", "61.0"),
        (-0.621, "number", "-0.62"),
        (-0.001, "number", "0.00"),
        (float("nan"), "percent", "-"),
        (float("nan"), "times", "-"),
    ],
)
def test_values_are_written_as_the_paper_would(value, style, text):
    assert style_value(value, style) == text


def test_memory_does_not_grow_with_the_number_of_requests():
    """Tallies keep sums: twice the requests, the same tables, no larger."""
    rng, geometry = np.random.default_rng(2), RoutingGeometry((1,), 12, 3)
    request = random_request(rng, geometry, passes=30, prompt=3)
    once = analyze([request] * 2, geometry, signals=BASE_SIGNALS)
    often = analyze([request] * 9, geometry, signals=BASE_SIGNALS)
    for name, table in often.items():
        assert len(table) == len(once[name]), name
    assert (
        one(often["activation_ratio"], kind="denoise")["events"]
        == 4.5 * one(once["activation_ratio"], kind="denoise")["events"]
    )


def test_requests_are_read_one_at_a_time():
    """The next request is asked for only once the one before was counted."""
    builder = RequestBuilder(GEOMETRY, 0)
    builder.add_pass(Kind.DENOISE, 0, 0, [1], [0], [0], [0.5], [0], [0], [[[0, 1]], [[0, 1]]])
    alive = []

    def stream():
        for _ in range(3):
            alive.append("read")
            yield builder.build()
            alive.append("counted")

    analyze(stream(), GEOMETRY, signals=BASE_SIGNALS)
    assert alive == ["read", "counted"] * 3
