"""What is written is what is read, bit for bit, up to the stored precision."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.errors import TraceError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import (
    BASE_SIGNALS,
    geometries,
    random_manifest,
    random_request,
    requests,
    write_trace,
)
from oled_sim.trace import TraceWriter, open_trace
from oled_sim.trace.schema import SIGNALS

OPTIONAL = ("gates", "full_gate", "embedding", "cosines")


def assert_same(read, written):
    for field in dataclasses.fields(written):
        a, b = getattr(read, field.name), getattr(written, field.name)
        if field.name in ("confidence", "cosines") and b is not None:
            b = b.astype(np.float16).astype(np.float32)  # the stored precision
        np.testing.assert_array_equal(a, b, err_msg=field.name)
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), field.name


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_any_request_survives_the_disk(data):
    geometry = data.draw(geometries())
    ragged = data.draw(st.booleans())
    signals = {"ids", "confidence", "token_state"} | data.draw(st.sets(st.sampled_from(OPTIONAL)))
    written = data.draw(requests(geometry, ragged=ragged, signals=signals, request=3))
    with tempfile.TemporaryDirectory() as folder:
        trace = write_trace(Path(folder) / "t", [written], geometry, ragged=ragged, signals=signals)
        assert_same(trace.read(3), written)


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_ids_take_the_smallest_dtype(tmp_path, experts, dtype):
    geometry = RoutingGeometry((1, 2), experts, 8)
    written = random_request(np.random.default_rng(0), geometry, passes=4)
    read = write_trace(tmp_path / "t", [written], geometry).read(0)
    assert read.experts.dtype == dtype
    assert_same(read, written)


def test_requests_are_listed_ascending_whatever_order_they_finish_in(tmp_path, geometry):
    rng = np.random.default_rng(1)
    written = {i: random_request(rng, geometry, request=i, passes=5) for i in (4, 0, 2)}
    trace = write_trace(tmp_path / "t", written.values(), geometry)
    assert trace.requests == (0, 2, 4)
    for read, number in zip(trace, trace.requests, strict=True):
        assert_same(read, written[number])


def test_only_the_wanted_signals_are_decoded(small_trace):
    read = small_trace.read(0, signals=("gates", "future"))
    assert read.gates is not None
    assert read.full_gate is read.embedding is read.cosines is None
    np.testing.assert_array_equal(read.experts, small_trace.read(0).experts)


def test_tables_open_in_any_parquet_reader(small_trace):
    routing = pq.read_table(small_trace.path / "routing")
    assert routing.num_rows == sum(small_trace.read(i).events for i in small_trace.requests)
    assert set(routing["request"].to_pylist()) == {0, 1}
    assert set(routing["layer"].to_pylist()) == {1, 2, 5}  # the model's own indices
    trace = small_trace.read(0)
    first = pq.read_table(small_trace.path / "routing/00000.parquet")["experts"][0].as_py()
    assert first == trace.experts[: trace.tokens(0)].ravel().tolist()


def test_the_same_requests_give_the_same_bytes(tmp_path, geometry):
    def write(folder):
        rng = np.random.default_rng(5)
        written = [random_request(rng, geometry, request=i, signals=SIGNALS) for i in range(2)]
        return write_trace(tmp_path / folder, written, geometry, signals=SIGNALS).path

    a, b = write("a"), write("b")
    names = sorted(p.relative_to(a) for p in a.rglob("*") if p.is_file())
    assert len(names) == 7
    assert all((a / n).read_bytes() == (b / n).read_bytes() for n in names)


def test_source_order_is_kept_when_the_manifest_says_so(tmp_path, geometry):
    rng = np.random.default_rng(2)
    base = random_request(rng, geometry, passes=3, signals=BASE_SIGNALS)
    reversed_slots = dataclasses.replace(
        base, experts=base.experts[:, ::-1].copy(), gates=base.gates[:, ::-1].copy()
    )
    manifest = random_manifest(geometry, row_order="source")
    trace = write_trace(tmp_path / "t", [reversed_slots], geometry, manifest=manifest)
    assert_same(trace.read(0), reversed_slots)


def test_ties_between_gate_scores_go_to_the_lower_id(tmp_path, geometry):
    writer = TraceWriter(tmp_path / "t", random_manifest(geometry))
    builder = writer.begin(0)
    # Slots of the first token out of score order, with a tie between 9 and 7.
    experts = np.array([[[9, 4, 7], [1, 2, 3]]] * 3)
    gates = np.array([[[0.25, 0.5, 0.25], [0.5, 0.3, 0.2]]] * 3)
    builder.add_pass(1, 0, 0, [10, 11], [0, 1], [0, 0], [0.5, 0.25], [1, 0], [0, 0], experts, gates)
    builder.finish(output_tokens=1, prompt_tokens=0)
    read = open_trace(tmp_path / "t").read(0)
    assert read.experts[:2].tolist() == [[4, 7, 9], [1, 2, 3]]
    assert read.gates[0].tolist() == [0.5, 0.25, 0.25]


def test_several_requests_may_be_open_at_once(tmp_path, geometry):
    rng = np.random.default_rng(3)
    writer = TraceWriter(tmp_path / "t", random_manifest(geometry))
    builders = [writer.begin(i, prompt_row=10 + i, prompt_sha256="ab" * 32) for i in range(3)]
    gates = np.full((3, 2, 3), 1 / 3)
    routes = {}
    for _ in range(2):
        for builder in builders:
            routes[builder.request] = np.argsort(rng.random((3, 2, 12)))[..., :3]
            builder.add_pass(
                1, 0, 0, [0, 0], [0, 1], [0, 0], [0.5, 0.5], [0, 0], [0, 0],
                routes[builder.request], gates,
            )  # fmt: skip
    for builder in reversed(builders):
        builder.finish(output_tokens=1, prompt_tokens=4, finish_reason="eos")
    trace = open_trace(tmp_path / "t")
    for i in range(3):
        last = trace.read(i).experts[-6:].reshape(3, 2, 3)
        np.testing.assert_array_equal(np.sort(routes[i]), np.sort(last))
    entry = trace.manifest.entry(2)
    assert (entry.prompt_row, entry.finish_reason, entry.passes, entry.events) == (12, "eos", 2, 6)


def test_a_missing_signal_is_refused_with_the_way_to_record_it(tmp_path, geometry):
    written = random_request(np.random.default_rng(0), geometry, passes=3)
    trace = write_trace(tmp_path / "t", [written], geometry)
    trace.require({"ids", "gates", "future"}, "policy 'lru'")
    with pytest.raises(TraceError, match=r"policy 'x' needs .*'full_gate'.*collect --full-gate"):
        trace.require({"gates", "full_gate"}, "policy 'x'")


def test_an_unknown_request_is_named(small_trace):
    with pytest.raises(TraceError, match="no request 9: it holds 2, numbered 0 to 1"):
        small_trace.read(9)
