"""Exports: what comes back is what went out, and accesses are those of a plain recount."""

import gzip
import json
import lzma
from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.cli.main import cli
from oled_sim.collectors.export_csv import export_csv
from oled_sim.collectors.export_npz import export_npz
from oled_sim.collectors.export_oracle_general import RECORD, accesses, export_oracle_general
from oled_sim.collectors.route_table import import_table
from oled_sim.collectors.routed_experts import import_routed_experts
from oled_sim.errors import TraceError, UsageError
from oled_sim.exporting import export_trace
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.policies.lru import LRU
from oled_sim.testing.by_hand import Run, request_by_hand
from oled_sim.testing.traces import geometries, random_request, write_trace
from oled_sim.trace import open_trace

GEOMETRY = RoutingGeometry((1, 2, 5), 10, 3)
BACK = {"csv": (export_csv, import_table), "npz": (export_npz, import_routed_experts)}


def trace_of(path, seed=0, requests=3, geometry=GEOMETRY, **settings):
    rng = np.random.default_rng(seed)
    signals = settings.get("signals", ("ids", "gates", "confidence", "token_state"))
    made = [
        random_request(
            rng, geometry, request=4 * n + 2, passes=int(rng.integers(1, 9)), signals=signals,
            ragged=settings.get("ragged", False),
        )
        for n in range(requests)
    ]  # fmt: skip
    return write_trace(path, made, geometry, **settings)


def same(one, other):
    """Whether two requests hold the same, down to dtypes."""
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, field.name
            assert np.array_equal(a, b, equal_nan=a.dtype.kind == "f"), field.name
        else:
            assert a == b, field.name
    return True


# --- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", BACK)
@settings(max_examples=8)
@given(
    geometries().filter(lambda g: g.top_k > 1 or g.experts > 1),
    st.integers(0, 2**32),
    st.sampled_from([("ids",), ("ids", "gates"), ("ids", "gates", "confidence", "token_state")]),
)
def test_round_trip(tmp_path_factory, form, geometry, seed, signals):
    """Requests and manifest come back as they were; the origin is `imported`."""
    folder = tmp_path_factory.mktemp("back")
    exporter, importer = BACK[form]
    try:
        trace = trace_of(folder / "a", seed, geometry=geometry, signals=signals)
    except TraceError as error:  # all ids 0, by chance: no trace may hold it
        assert "all 0" in str(error)
        return
    out = folder / f"out.{form}"
    export_trace(exporter, trace, out)
    again = importer(out, folder / "b")
    for one, other in zip(trace, open_trace(folder / "b"), strict=True):
        assert same(one, other)
    for field in set(again.__struct_fields__) - {"origin", "notes", "requests", "checksum"}:
        assert getattr(again, field) == getattr(trace.manifest, field), field
    assert again.origin == "imported"
    kept = [(r.request, r.prompt_tokens, r.output_tokens, r.files) for r in again.requests]
    assert kept == [
        (r.request, r.prompt_tokens, r.output_tokens, r.files) for r in trace.manifest.requests
    ]


@pytest.mark.parametrize("form", BACK)
def test_round_trip_of_a_ragged_trace(tmp_path, form):
    """All routes come back; a token without any in its pass cannot, and that is said."""
    exporter, importer = BACK[form]
    trace = trace_of(tmp_path / "a", 5, ragged=True)
    export_trace(exporter, trace, tmp_path / f"out.{form}")
    importer(tmp_path / f"out.{form}", tmp_path / "b")
    for one, other in zip(trace, open_trace(tmp_path / "b"), strict=True):
        assert np.array_equal(one.experts, other.experts)
        assert np.array_equal(one.gates, other.gates)
        assert np.array_equal(one.position[one.row_token], other.position[other.row_token])
        assert np.array_equal(one.kind[one.event_pass], other.kind[other.event_pass])


def test_round_trip_of_a_bundled_trace(tmp_path):
    """Signals that are means over a pass are left out, and said to be."""
    notes = []
    trace = open_trace("nano-humaneval")
    trace = type(trace)(
        trace.path, msgspec.structs.replace(trace.manifest, requests=trace.manifest.requests[:1])
    )
    export_trace(export_npz, trace, tmp_path / "x.npz", on_note=notes.append)
    import_routed_experts(tmp_path / "x.npz", tmp_path / "back")
    (one,), (other,) = trace, open_trace(tmp_path / "back")
    assert same(replace(one, full_gate=None, embedding=None, cosines=None), other)
    assert notes == [
        "the signals full_gate, embedding, cosines are left out: the format holds tokens and routes"
    ]


def test_arrays_are_those_that_engines_return(tmp_path):
    trace = trace_of(tmp_path / "a")
    export_trace(export_npz, trace, tmp_path / "x.npz")
    with np.load(tmp_path / "x.npz") as found:
        first, request = found["00002/routed_experts"], trace.read(2)
        assert first.dtype == np.int16
        assert first.shape == (len(request.position), 3, 3)
        assert np.array_equal(first[0, 1], request.experts[request.event_offset[1]])


def test_an_edited_manifest_is_refused(tmp_path):
    export_trace(export_csv, trace_of(tmp_path / "a"), tmp_path / "x.csv")
    text = (tmp_path / "x.csv").read_text().replace('"experts": 10', '"experts": 12')
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(TraceError, match="line 1 does not match its own checksum"):
        import_table(tmp_path / "x.csv", tmp_path / "b")


# --- oracleGeneral ------------------------------------------------------------------------------


def records_of(trace, path, **options):
    export_trace(export_oracle_general, trace, path, **options)
    return np.fromfile(path, RECORD)


def test_accesses_by_hand(tmp_path):
    """Experts of an event by their last rows; objects are layer times E plus expert."""
    passes = [
        [[[1, 2], [3, 1]], [[4, 5], [5, 4]]],  # layer 1: 2, 3, 1; layer 2: 5, 4
        [[[2, 1]], [[6, 4]]],
    ]
    geometry = RoutingGeometry((1, 2), 8, 2)
    trace = write_trace(
        tmp_path / "a", [request_by_hand(geometry, passes)], geometry,
        row_order="source", signals=("ids", "gates"),
    )  # fmt: skip
    found = records_of(trace, tmp_path / "x.bin")
    assert found["object"].tolist() == [10, 11, 9, 21, 20, 10, 9, 22, 20]
    assert found["time"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert found["size"].tolist() == [1] * 9
    assert found["next"].tolist() == [5, -1, 6, -1, 8, -1, -1, -1, -1]
    assert RECORD.itemsize == 24


@settings(max_examples=8)
@given(st.integers(0, 2**32), st.booleans())
def test_next_accesses_are_those_of_a_recount(tmp_path_factory, seed, ragged):
    """Across requests too, which are exported one by one."""
    folder = tmp_path_factory.mktemp("next")
    trace = trace_of(folder / "a", seed, ragged=ragged)
    found = records_of(trace, folder / "x.bin")
    later, wanted = {}, []
    for i in range(len(found) - 1, -1, -1):
        wanted.append(later.get(found["object"][i], -1))
        later[found["object"][i]] = i
    assert found["next"].tolist() == wanted[::-1]
    assert (np.diff(found["time"].astype(np.int64)) >= 0).all()
    start = 0
    for request in trace:
        event, expert = accesses(request)
        layers = np.asarray(trace.geometry.layers)[request.event_layer[event]]
        stop = start + len(event)
        assert found["object"][start:stop].tolist() == (layers * 10 + expert).tolist()
        for v in range(request.events):
            rows = request.experts[request.event_offset[v] : request.event_offset[v + 1]]
            assert sorted(expert[event == v]) == np.unique(rows).tolist()
        start = stop
    assert start == len(found)


def test_sizes_are_bytes_if_asked(tmp_path):
    trace = trace_of(tmp_path / "a")
    found = records_of(trace, tmp_path / "x.bin", sizes="bytes")
    assert set(found["size"].tolist()) == {find_geometry("llada2.0-mini").expert_bytes}
    manifest = msgspec.structs.replace(trace.manifest, expert_bytes=(100, 200, 300))
    own = type(trace)(trace.path, manifest)
    found = records_of(own, tmp_path / "y.bin", sizes="bytes")
    layer = found["object"] // 10
    assert {(int(a), int(b)) for a, b in zip(layer, found["size"], strict=True)} == {
        (1, 100), (2, 200), (5, 300),
    }  # fmt: skip
    huge = msgspec.structs.replace(trace.manifest, expert_bytes=(1 << 32,) * 3)
    with pytest.raises(UsageError, match="sizes below 4 GiB"):
        records_of(type(trace)(trace.path, huge), tmp_path / "z.bin", sizes="bytes")


def test_bytes_of_a_trace_that_stands_for_nothing_are_asked_for(tmp_path):
    trace = trace_of(tmp_path / "a", stands_for=None)
    with pytest.raises(UsageError, match=r"name one with --geometry, such as llada2\.0-mini"):
        records_of(trace, tmp_path / "x.bin", sizes="bytes")
    assert not (tmp_path / "x.bin").exists()
    found = records_of(trace, tmp_path / "x.bin", sizes="bytes", geometry="llada2.0-flash")
    assert set(found["size"].tolist()) == {find_geometry("llada2.0-flash").expert_bytes}
    with pytest.raises(UsageError, match="but sizes are 1: leave it out"):
        records_of(trace, tmp_path / "y.bin", geometry="llada2.0-flash")
    manifest = msgspec.structs.replace(trace.manifest, expert_bytes=(100, 200, 300))
    with pytest.raises(UsageError, match="which the trace tells itself: leave it out"):
        records_of(
            type(trace)(trace.path, manifest), tmp_path / "y.bin", sizes="bytes",
            geometry="llada2.0-flash",
        )  # fmt: skip


@pytest.mark.parametrize("slots", [3, 7, 12, 20])
@pytest.mark.parametrize("suffix", ["bin", "zst"])
def test_libcachesim_counts_the_engines_hits(tmp_path, slots, suffix):
    """Events of one expert are single accesses: LRU over one pool is the same in both."""
    lcs = pytest.importorskip("libcachesim", exc_type=ImportError)
    rng = np.random.default_rng(slots)
    geometry = RoutingGeometry((0, 3), 12, 1)
    routes = rng.zipf(1.4, (300, 2)) % 12
    request = request_by_hand(geometry, [[[[int(a)]], [[int(b)]]] for a, b in routes])
    trace = write_trace(
        tmp_path / "a", [request], geometry, row_order="source", signals=("ids", "gates")
    )
    out = tmp_path / f"x.oracleGeneral.{suffix}"
    export_trace(export_oracle_general, trace, out)
    reader = lcs.TraceReader(str(out), lcs.TraceType.ORACLE_GENERAL_TRACE)
    cache = lcs.LRU(cache_size=slots, hashpower=10)
    theirs = sum(int(cache.get(access)) for access in reader)
    run = Run(LRU(), geometry, request, slots / 2, scope="global")
    assert theirs == sum(run.count("hits"))
    assert 0 < theirs < 600


# --- files and the command line -----------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["gz", "xz"])
def test_names_say_how_a_file_is_packed(tmp_path, suffix):
    trace = trace_of(tmp_path / "a")
    written = export_trace(export_csv, trace, tmp_path / "x.csv")
    export_trace(export_csv, trace, tmp_path / f"x.csv.{suffix}")
    data = (tmp_path / f"x.csv.{suffix}").read_bytes()
    plain = {"gz": gzip, "xz": lzma}[suffix].decompress(data)
    assert plain == (tmp_path / "x.csv").read_bytes()
    assert written["bytes"] == len(plain)
    assert written["rows"] == sum(len(r.experts) for r in trace)
    export_trace(export_csv, trace, tmp_path / f"y.csv.{suffix}")
    assert (tmp_path / f"y.csv.{suffix}").read_bytes() == data


def test_the_same_trace_gives_the_same_arrays_file(tmp_path):
    trace = trace_of(tmp_path / "a")
    for name in ("x", "y"):
        export_trace(export_npz, trace, tmp_path / f"{name}.npz")
    assert (tmp_path / "x.npz").read_bytes() == (tmp_path / "y.npz").read_bytes()


def test_a_failed_export_leaves_nothing(tmp_path):
    trace = trace_of(tmp_path / "a")
    (tmp_path / "a" / "routing" / "00006.parquet").write_bytes(b"damaged")
    for name in ("x.csv", "x.csv.gz", "x.npz"):
        with pytest.raises(TraceError, match="00006"):
            export_trace(export_npz if "npz" in name else export_csv, trace, tmp_path / name)
    assert [f.name for f in tmp_path.iterdir()] == ["a"]


def oled_sim(*arguments):
    return CliRunner().invoke(cli, list(map(str, arguments)))


def test_command(tmp_path):
    trace = trace_of(tmp_path / "a")
    out = tmp_path / "x.bin"
    call = ["export", "oracle-general", tmp_path / "a", "--out", out]
    result = oled_sim(*call, "--requests", 2)
    assert result.output.startswith("exported 2 requests, ")
    count = sum(len(accesses(trace.read(r))[0]) for r in trace.requests[:2])
    assert out.stat().st_size == 24 * count
    refusal = oled_sim(*call).exception
    assert isinstance(refusal, UsageError)
    assert "--overwrite to overwrite it" in str(refusal)
    found = json.loads(oled_sim(*call, "--overwrite", "--json").output)
    assert (found["requests"], found["bytes"]) == (3, 24 * found["accesses"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["oracle-genral", "a", "--out", "x"], "unknown exporter 'oracle-genral': did you mean"),
        (["csv", "a", "--out", "x", "--sizes", "one"], "the format csv takes no --sizes: it takes"),
        (["oracle-general", "a", "--out", "x", "--sizes", "kb"], "--sizes is 'kb': give one or by"),
        (["csv", "a", "--out", "x", "--requests", "9"], "--requests is 9, a holds 3"),
        (["csv", "a", "--out", "no/x"], "no is no folder"),
        (["csv", "b", "--out", "x"], "no trace 'b'"),
    ],
)
def test_command_refuses_in_one_sentence(tmp_path, monkeypatch, arguments, message):
    from oled_sim.cli.main import main

    trace_of(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    said = []
    monkeypatch.setattr("click.echo", lambda text, **_: said.append(str(text)))
    with pytest.raises(SystemExit) as stop:
        main(["export", *arguments])
    assert stop.value.code == 2
    assert len(said) == 1
    assert message in said[0]
    assert [f.name for f in tmp_path.iterdir()] == ["a"]
