"""What is said to be kept of a recording that Ctrl-C ends."""

import numpy as np
import pytest

from oled_sim.cli.interrupted import contents, recorded
from oled_sim.testing.traces import random_manifest, random_request, write_trace
from oled_sim.trace import TraceWriter


@pytest.fixture
def old(tmp_path, geometry):
    """A trace of two requests."""
    rng = np.random.default_rng(0)
    requests = [random_request(rng, geometry, request=n) for n in range(2)]
    return write_trace(tmp_path / "t", requests, geometry).path


def stop(path, geometry, *finished):
    with (
        pytest.raises(KeyboardInterrupt),
        TraceWriter(path, random_manifest(geometry), overwrite=True) as writer,
    ):
        for request in finished:
            one = random_request(np.random.default_rng(1), geometry, request=request)
            writer.write_request(one, prompt_tokens=1, output_tokens=1)
        raise KeyboardInterrupt


def test_an_old_trace_is_no_progress(old, geometry):
    before = contents(old)
    stop(old, geometry)
    assert recorded(old, before, 3, "") == f"no request was finished, {old} is as it was"


def test_what_is_finished_is_counted(old, geometry):
    before = contents(old)
    stop(old, geometry, 5)
    assert recorded(old, before, 3, "; go on") == f"1 of 3 requests are in {old}; go on"


def test_nothing_is_nothing(tmp_path):
    assert contents(tmp_path) == contents(None) == b""
    for out in (tmp_path, None):
        assert recorded(out, b"", 3, "") == "nothing was recorded"
