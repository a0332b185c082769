"""Traces that ship with the package: found by name, whole, and without prompt text."""

import numpy as np
import pytest

from oled_sim.errors import TraceError
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
    with pytest.raises(TraceError, match="no trace 'nano-gsmk8': did you mean 'nano-gsm8k'"):
        open_trace("nano-gsmk8")


def test_a_path_that_exists_goes_before_a_name(shipped, tmp_path, geometry, monkeypatch):
    written = random_request(np.random.default_rng(1), geometry, request=5)
    write_trace(tmp_path / "here" / "nano-gsm8k", [written], geometry)
    monkeypatch.chdir(tmp_path / "here")
    assert open_trace("nano-gsm8k").requests == (5,)


@pytest.mark.parametrize("name", sorted(bundled_traces()))
def test_shipped_traces_are_whole_and_redacted(name):
    trace = open_trace(name)
    assert trace.manifest.prompts.redacted
    for request in trace:
        assert (request.token_id[request.state == TokenState.PROMPT] == -1).all()
