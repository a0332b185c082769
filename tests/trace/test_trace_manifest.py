"""The manifest: sealed, versioned, strict."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_manifest
from oled_sim.trace import Model, open_trace
from oled_sim.trace.files import sha256_hex
from oled_sim.trace.manifest import Manifest, decode_manifest, encode_manifest, load_manifest

GEOMETRY = RoutingGeometry((1, 2), 8, 2)
TEXT = encode_manifest(random_manifest(GEOMETRY, notes='a "checksum": "x" in prose'))


def reseal(fields):
    """Seal a manifest as another writer would, from the recipe in docs/trace-format.md."""
    text = json.dumps(fields | {"checksum": "0" * 64}).encode()
    return text.replace(b'"checksum": "' + b"0" * 64, b'"checksum": "' + sha256_hex(text).encode())


def test_a_manifest_survives_the_disk():
    manifest = decode_manifest(TEXT)
    assert manifest.geometry == GEOMETRY
    assert encode_manifest(manifest) == TEXT


@given(st.integers(0, len(TEXT) * 8 - 1))
def test_every_flipped_bit_is_noticed(bit):
    damaged = bytearray(TEXT)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(TraceError):
        decode_manifest(bytes(damaged))


@given(st.integers(0, len(TEXT) - 2))
def test_every_truncation_is_noticed(length):
    with pytest.raises(TraceError):
        decode_manifest(TEXT[:length])


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"not json", b"\xff\xfe\x00", b'{"a": 1}'])
def test_what_is_no_manifest_is_refused_in_one_sentence(text):
    with pytest.raises(TraceError) as error:
        decode_manifest(text, "x/manifest.json")
    assert str(error.value).startswith("x/manifest.json")
    assert "\n" not in str(error.value)


def test_another_schema_version_is_refused_before_anything_else():
    fields = {"format": "oled-sim-trace", "schema_version": 2, "everything": "else differs"}
    with pytest.raises(TraceError, match=r"schema version 2, this oled-sim reads version 1"):
        decode_manifest(json.dumps(fields).encode())


def test_a_newer_minor_version_may_bring_fields_along():
    fields = json.loads(TEXT) | {"schema_minor": 7, "colour": "blue"}
    fields["model"]["attention"] = "grouped"
    assert decode_manifest(reseal(fields)).schema_minor == 7


@pytest.mark.parametrize("where", ["top", "model"])
def test_an_unknown_field_of_this_version_is_refused(where):
    fields = json.loads(TEXT)
    (fields if where == "top" else fields["model"])["topk"] = 4
    with pytest.raises(TraceError, match=r"unknown field '(model.)?topk'"):
        decode_manifest(reseal(fields))


def test_a_field_of_the_wrong_type_is_named():
    fields = json.loads(TEXT)
    fields["model"]["experts"] = "many"
    with pytest.raises(TraceError, match=r"Expected `int`, got `str` - at `\$.model.experts`"):
        decode_manifest(reseal(fields))


def test_a_missing_field_is_named():
    fields = json.loads(TEXT)
    del fields["signals"]
    with pytest.raises(TraceError, match="missing required field `signals`"):
        decode_manifest(reseal(fields))


def model(**changes):
    return Model(**({"name": "m", "layers": (1, 2), "experts": 8, "top_k": 2} | changes))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": model(layers=())}, "layers"),
        ({"model": model(layers=(2, 1))}, "ascending"),
        ({"model": model(layers=(1, 1))}, "distinct"),
        ({"model": model(layers=(-1, 1))}, "layers"),
        ({"model": model(top_k=9)}, "top_k 9 of 8 experts"),
        ({"model": model(top_k=0)}, "top_k 0"),
        ({"model": model(experts=65537)}, "65537"),
        ({"signals": ("ids", "smell")}, "unknown signal 'smell': known are ids, gates"),
        ({"signals": ("gates",)}, "'ids' is missing"),
        ({"expert_bytes": (1,)}, "1 expert_bytes for 2 layers"),
        ({"expert_bytes": (1, 0)}, "not positive"),
    ],
)
def test_contradictions_are_refused(changes, problem):
    manifest = msgspec.structs.replace(random_manifest(GEOMETRY), **changes)
    with pytest.raises(TraceError, match=problem):
        manifest.check()


def test_unequal_expert_sizes_survive(tmp_path):
    manifest = random_manifest(GEOMETRY, expert_bytes=(3059712, 2654208))
    assert decode_manifest(encode_manifest(manifest)).expert_bytes == (3059712, 2654208)


def test_a_request_lists_its_files_and_no_others(small_trace):
    fields = json.loads((small_trace.path / "manifest.json").read_text())
    del fields["requests"][1]["files"]["tokens/00001.parquet"]
    with pytest.raises(TraceError, match="request 1 does not list exactly the files of its tables"):
        decode_manifest(reseal(fields))


def test_paths_that_hold_no_trace(tmp_path):
    with pytest.raises(UsageError, match="there is no such directory"):
        open_trace(tmp_path / "nowhere")
    with pytest.raises(UsageError, match=r"is not a trace: it holds no manifest.json"):
        open_trace(tmp_path)
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(UsageError, match="is a file: a trace is a directory"):
        open_trace(file)


def test_runtime_describes_this_process():
    from oled_sim.trace import Runtime

    here = Runtime.here("native", device="cuda", batch_size=4)
    assert {"python", "numpy", "pyarrow"} <= here.packages.keys()
    assert here.hardware
    assert (here.device, here.batch_size) == ("cuda", 4)


def test_load_manifest_returns_the_typed_manifest(small_trace):
    assert isinstance(load_manifest(small_trace.path), Manifest)
