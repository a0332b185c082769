"""Writing: nothing is overwritten unasked, nothing half-written is ever read."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from oled_sim.errors import TraceError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_manifest, random_request, write_trace
from oled_sim.trace import Decode, LayerRoutes, RequestBuilder, TraceWriter, open_trace
from oled_sim.trace.files import write_atomic

COUNTS = {"prompt_tokens": 3, "output_tokens": 2}


def files(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def one(geometry, request=0):
    return random_request(np.random.default_rng(request), geometry, request=request, passes=4)


@pytest.mark.parametrize(("content", "said"), [("trace", "not empty"), ("file", "no trace")])
def test_a_directory_in_use_is_left_alone(tmp_path, geometry, content, said):
    path = tmp_path / "t"
    if content == "trace":
        write_trace(path, [one(geometry)], geometry)
    else:
        path.mkdir()
        (path / "thesis.tex").write_text("years of work")
    before = files(path)
    with pytest.raises(UsageError, match=said):
        TraceWriter(path, random_manifest(geometry))
    assert files(path) == before


@pytest.mark.parametrize("flags", [{"overwrite": True}, {"resume": True}])
def test_no_flag_touches_a_directory_that_is_no_trace(tmp_path, geometry, flags):
    (tmp_path / "routing").mkdir()
    (tmp_path / "routing" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="no trace"):
        TraceWriter(tmp_path, random_manifest(geometry), **flags)
    assert (tmp_path / "routing" / "notes.txt").read_text() == "mine"


def test_a_file_in_the_way_is_refused(tmp_path, geometry):
    (tmp_path / "t").write_text("mine")
    with pytest.raises(UsageError, match="is a file"):
        TraceWriter(tmp_path / "t", random_manifest(geometry), overwrite=True)


def test_overwriting_leaves_nothing_of_the_old_trace_and_all_of_the_users_files(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry, i) for i in range(3)], geometry).path
    (path / "README.md").write_text("mine")
    writer = TraceWriter(path, random_manifest(geometry), overwrite=True)
    writer.write_request(one(geometry, 7), **COUNTS)
    assert open_trace(path).requests == (7,)
    assert sorted(str(p) for p in files(path)) == [
        "README.md",
        "iterations/00007.parquet",
        "manifest.json",
        "routing/00007.parquet",
        "tokens/00007.parquet",
    ]


def test_resuming_keeps_finished_requests_and_drops_leftovers(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry, 0), one(geometry, 2)], geometry).path
    (path / "routing" / "00005.parquet").write_bytes(b"finished, but not in the manifest")
    (path / "tokens" / "00005.parquet.part").write_bytes(b"half")
    writer = TraceWriter(path, random_manifest(geometry), resume=True)
    assert writer.finished == {0, 2}
    writer.write_request(one(geometry, 5), **COUNTS)
    assert open_trace(path).requests == (0, 2, 5)
    assert len(files(path)) == 10
    for request in open_trace(path):
        np.testing.assert_array_equal(request.experts, one(geometry, request.request).experts)


def test_resuming_starts_afresh_where_nothing_is_there(tmp_path, geometry):
    writer = TraceWriter(tmp_path / "new" / "t", random_manifest(geometry), resume=True)
    assert writer.finished == frozenset()


def test_resuming_with_other_settings_is_refused(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry)], geometry).path
    before = files(path)
    other = msgspec.structs.replace(
        random_manifest(geometry), decode=Decode(rule="2.0", block_length=32)
    )
    with pytest.raises(TraceError, match="another 'decode' and cannot be resumed"):
        TraceWriter(path, other, resume=True)
    assert files(path) == before


def test_resuming_a_trace_with_a_lost_file_is_refused(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry)], geometry).path
    (path / "tokens" / "00000.parquet").unlink()
    with pytest.raises(TraceError, match=r"tokens/00000.parquet is missing or truncated"):
        TraceWriter(path, random_manifest(geometry), resume=True)


def test_a_request_is_written_once(tmp_path, geometry):
    writer = TraceWriter(tmp_path / "t", random_manifest(geometry))
    writer.write_request(one(geometry), **COUNTS)
    with pytest.raises(UsageError, match="request 0 is in the trace"):
        writer.begin(0)
    writer.begin(1)
    with pytest.raises(UsageError, match=r"request 1 of the trace .* is open"):
        writer.begin(1)


def test_nothing_of_an_invalid_request_reaches_the_disk(tmp_path, geometry):
    writer = TraceWriter(tmp_path / "t", random_manifest(geometry))
    before = files(tmp_path / "t")
    bad = dataclasses.replace(one(geometry), experts=np.zeros_like(one(geometry).experts))
    with pytest.raises(TraceError, match="all 0"):
        writer.write_request(bad, **COUNTS)
    assert files(tmp_path / "t") == before


def test_a_trace_without_a_finished_request_says_so(tmp_path, geometry):
    TraceWriter(tmp_path / "t", random_manifest(geometry)).begin(0)
    with pytest.raises(TraceError, match="holds no finished request"):
        open_trace(tmp_path / "t")


def test_a_recording_that_fails_before_its_first_request_leaves_nothing(tmp_path, geometry):
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", random_manifest(geometry)) as w:
        w.begin(0)
        raise RuntimeError
    assert not (tmp_path / "t").exists()


def test_overwriting_keeps_the_old_trace_until_a_request_is_finished(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry, i) for i in range(3)], geometry).path
    (path / "routing" / "notes.txt").write_text("mine")
    before = files(path)
    with (
        pytest.raises(KeyboardInterrupt),
        TraceWriter(path, random_manifest(geometry), overwrite=True) as writer,
    ):
        writer.begin(7)
        raise KeyboardInterrupt
    assert files(path) == before
    with (
        pytest.raises(KeyboardInterrupt),
        TraceWriter(path, random_manifest(geometry), overwrite=True) as writer,
    ):
        writer.write_request(one(geometry, 7), **COUNTS)
        raise KeyboardInterrupt
    assert open_trace(path).requests == (7,)
    assert len(files(path)) == 5
    assert (path / "routing" / "notes.txt").read_text() == "mine"


def test_a_killed_writer_loses_no_trace_that_it_was_to_replace(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry, i) for i in range(3)], geometry).path
    before = files(path)
    TraceWriter(path, random_manifest(geometry), overwrite=True)  # and nothing more: killed
    assert open_trace(path).requests == (0, 1, 2)
    assert open_trace(path).read(1).passes == 4
    with TraceWriter(path, random_manifest(geometry), overwrite=True):
        pass
    assert files(path) == before
    TraceWriter(path, random_manifest(geometry), overwrite=True)
    with TraceWriter(path, random_manifest(geometry), resume=True) as writer:
        writer.write_request(one(geometry, 7), **COUNTS)
    assert open_trace(path).requests == (0, 1, 2, 7)
    assert not (path / ".replaced").exists()


def test_a_recording_that_fails_later_keeps_what_is_finished(tmp_path, geometry):
    with pytest.raises(RuntimeError), TraceWriter(tmp_path / "t", random_manifest(geometry)) as w:
        w.write_request(one(geometry), **COUNTS)
        raise RuntimeError
    assert open_trace(tmp_path / "t").requests == (0,)


def test_a_directory_that_was_there_stays(tmp_path, geometry):
    with TraceWriter(tmp_path, random_manifest(geometry)):
        pass
    assert list(tmp_path.iterdir()) == []


def test_files_of_the_user_stay_where_nothing_was_recorded(tmp_path, geometry):
    with TraceWriter(tmp_path / "t", random_manifest(geometry)):
        (tmp_path / "t" / "README.md").write_text("mine")
    assert files(tmp_path / "t").keys() == {Path("README.md")}


def test_a_failed_write_leaves_the_old_file_and_no_temporary(tmp_path, monkeypatch):
    file = tmp_path / "f"
    file.write_bytes(b"old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TraceError, match="f cannot be written: No space left on device"):
        write_atomic(file, b"new")
    assert files(tmp_path) == {file.relative_to(tmp_path): b"old"}


def test_a_directory_that_cannot_be_made_is_named(tmp_path, geometry):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UsageError, match="cannot make the trace"):
        TraceWriter(tmp_path / "file" / "t", random_manifest(geometry))


WRITER = """
    import sys
    import numpy as np
    from oled_sim.geometry import RoutingGeometry
    from oled_sim.testing.traces import random_manifest, random_request
    from oled_sim.trace import TraceWriter

    geometry = RoutingGeometry((1, 2, 5), 12, 3)
    writer = TraceWriter(sys.argv[1], random_manifest(geometry), resume=True)
    for i in range(10**6):
        trace = random_request(np.random.default_rng(i), geometry, request=i, passes=20)
        if i not in writer.finished:
            writer.write_request(trace, prompt_tokens=1, output_tokens=1)
"""


def finished_count(path):
    try:
        return len(open_trace(path))
    except (TraceError, UsageError):
        return 0


def test_a_killed_writer_leaves_every_finished_request_readable(tmp_path):
    path = tmp_path / "t"
    for round_ in range(3):
        known = finished_count(path)
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(WRITER), str(path)])
        try:
            deadline = time.monotonic() + 60
            while finished_count(path) < known + 3 and time.monotonic() < deadline:
                time.sleep(0.003 * (round_ + 1))
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        trace = open_trace(path)
        assert len(trace) >= known + 3
        for request in trace:  # checksums and rules of every one
            expected = random_request(
                np.random.default_rng(request.request), trace.geometry, passes=20
            )
            np.testing.assert_array_equal(request.experts, expected.experts)


class TestBuilder:
    """Refusals while a request is put together."""

    geometry = RoutingGeometry((1, 2), 8, 2)

    def add(self, builder, **changes):
        arguments = {
            "kind": 1,
            "block": 0,
            "context": 0,
            "token_id": [5, 6],
            "position": [0, 1],
            "state": [0, 0],
            "confidence": [0.5, 0.5],
            "accepted": [0, 1],
            "edited": [0, 0],
            "experts": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
            "gates": [[[0.5, 0.5]] * 2] * 2,
        }
        builder.add_pass(**(arguments | changes))

    @pytest.mark.parametrize(
        ("changes", "problem"),
        [
            ({"experts": [[[0, 1], [2, -1]], [[4, 5], [6, 7]]]}, r"layer 1: experts \[2, -1\]"),
            ({"experts": [[[0, 1], [2, 3]], [[4, 5], [6, 8]]]}, r"layer 2: experts \[6, 8\]"),
            ({"experts": [[[0, 1], [2, 3]]]}, "expected"),
            ({"experts": [[[0], [2]], [[4], [5]]]}, "experts has shape"),
            ({"gates": [[[1.0]] * 2] * 2}, "gates has shape"),
            ({"position": [0]}, "differ in shape"),
            ({"full_gate": np.zeros((2, 7))}, "full_gate has shape"),
            ({"cosines": np.zeros((1, 8))}, "cosines has shape"),
            (
                {"experts": [LayerRoutes(0, [2], [[0, 1]], [[0.5, 0.5]])]},
                "token 2 of a pass with 2",
            ),
        ],
    )
    def test_what_does_not_fit_is_refused_with_its_place(self, changes, problem):
        builder = RequestBuilder(self.geometry, 3)
        self.add(builder)
        with pytest.raises(TraceError, match=f"request 3, iteration 1.*{problem}"):
            self.add(builder, **changes)

    def test_a_request_without_passes_is_refused(self):
        with pytest.raises(TraceError, match="request 3 has no pass"):
            RequestBuilder(self.geometry, 3).build()

    @pytest.mark.parametrize("signal", ["gates", "embedding", "cosines"])
    def test_a_signal_of_some_passes_only_is_refused(self, signal):
        values = {"gates": None, "embedding": [1.0, 2.0], "cosines": np.zeros((2, 8))}
        builder = RequestBuilder(self.geometry, 3)
        self.add(builder)
        self.add(builder, **{signal: values[signal]})
        with pytest.raises(TraceError, match=f"{signal} .* for some passes only"):
            builder.build()

    def test_buffers_may_be_reused_by_the_caller(self):
        builder = RequestBuilder(self.geometry, 0)
        experts, state = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], np.uint8), np.array([0, 0])
        self.add(builder, experts=experts, state=state)
        experts[:], state[:] = 0, 2
        built = builder.build()
        assert built.experts.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert built.state.tolist() == [0, 0]

    def test_ragged_events_are_put_in_layer_and_position_order(self):
        builder = RequestBuilder(self.geometry, 0)
        events = [
            LayerRoutes(1, [1, 0], [[3, 2], [5, 4]], [[0.75, 0.25], [0.25, 0.75]]),
            LayerRoutes(0, [1], [[6, 7]], [[0.5, 0.5]]),
        ]
        self.add(builder, experts=events, gates=None)
        self.add(builder, experts=[], gates=None)  # a pass that no layer recorded
        built = builder.build()
        assert built.event_layer.tolist() == [0, 1]
        assert built.event_pass.tolist() == [0, 0]
        assert built.event_offset.tolist() == [0, 1, 3]
        assert built.row_token.tolist() == [1, 0, 1]
        assert built.experts.tolist() == [[6, 7], [4, 5], [3, 2]]
        assert built.passes == 2
