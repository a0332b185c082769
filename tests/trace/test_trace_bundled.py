"""Traces that ship with the package: found by name, whole, and without prompt text."""

import hashlib

import numpy as np
import pytest

from oled_sim.cli.options import DEFAULT_TRACE
from oled_sim.errors import UsageError
from oled_sim.geometry import GEOMETRIES
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace import TokenState, Trace, bundled_traces, open_trace, reader


@pytest.fixture
def shipped(tmp_path, geometry, monkeypatch):
    """Two traces in the place of the package's own."""
    rng = np.random.default_rng(0)
    for name in ("nano-gsm8k", "nano-humaneval"):
        write_trace(tmp_path / "traces" / name, [random_request(rng, geometry)], geometry)
    bundled_traces.cache_clear()
    monkeypatch.setattr(reader.resources, "files", lambda _: tmp_path / "traces")
    yield tmp_path / "traces"
    bundled_traces.cache_clear()


def test_names_are_those_of_the_folders(shipped):
    assert list(bundled_traces()) == ["nano-gsm8k", "nano-humaneval"]
    assert isinstance(open_trace("nano-gsm8k"), Trace)
    assert open_trace("nano-gsm8k").path == shipped / "nano-gsm8k"


def test_an_unknown_name_suggests_the_nearest(shipped):
    with pytest.raises(UsageError, match="no trace 'nano-gsmk8': did you mean 'nano-gsm8k'"):
        open_trace("nano-gsmk8")


def test_a_path_that_exists_goes_before_a_name(shipped, tmp_path, geometry, monkeypatch):
    written = random_request(np.random.default_rng(1), geometry, request=5)
    write_trace(tmp_path / "here" / "nano-gsm8k", [written], geometry)
    monkeypatch.chdir(tmp_path / "here")
    assert open_trace("nano-gsm8k").requests == (5,)


def test_a_folder_that_is_no_trace_does_not_hide_one(shipped, tmp_path, monkeypatch):
    """Replays of nano-gsm8k lie in a folder of that name, where they were made."""
    (tmp_path / "results" / "nano-gsm8k").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "results")
    assert open_trace("nano-gsm8k").path == shipped / "nano-gsm8k"


@pytest.mark.parametrize("name", [n for n in sorted(bundled_traces()) if n.startswith("mini-")])
def test_traces_of_narrow_mini_have_minis_routing_and_full_length(name):
    manifest = open_trace(name).manifest
    mini = GEOMETRIES["llada2.0-mini"]
    assert manifest.origin == "real"
    assert manifest.stands_for == mini.name
    assert len(manifest.model.layers) == mini.moe_layers
    assert (manifest.model.experts, manifest.model.top_k) == (mini.experts, mini.top_k)
    assert {entry.output_tokens for entry in manifest.requests} == {256}
    assert manifest.decode is not None
    assert manifest.decode.ignore_eos
    assert "rounded to multiples of 1/256" in manifest.notes


def test_the_three_sets_of_narrow_mini_are_there():
    assert {"mini-gsm8k", "mini-humaneval", "mini-science"} <= set(bundled_traces())
    assert DEFAULT_TRACE in bundled_traces()


def test_checksums_name_every_file_of_every_trace():
    folder = next(iter(bundled_traces().values())).parent
    listed = dict(
        reversed(line.split("  ", 1)) for line in (folder / "SHA256SUMS").read_text().splitlines()
    )
    files = {f.relative_to(folder).as_posix(): f for f in folder.glob("*-*/**/*") if f.is_file()}
    assert listed == {n: hashlib.sha256(f.read_bytes()).hexdigest() for n, f in files.items()}


@pytest.mark.parametrize("name", sorted(bundled_traces()))
def test_shipped_traces_are_whole_and_redacted(name):
    trace = open_trace(name)
    assert trace.manifest.prompts.redacted
    for request in trace:
        assert (request.token_id[request.state == TokenState.PROMPT] == -1).all()
