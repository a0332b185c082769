"""A trace that is written whole or not at all: whatever stops the writer, the old one stays."""

from pathlib import Path

import numpy as np
import pytest

from oled_sim.errors import TraceError, UsageError
from oled_sim.testing.traces import random_manifest, random_request, write_trace
from oled_sim.trace import open_trace
from oled_sim.trace.whole import STAGING, whole_trace

COUNTS = {"prompt_tokens": 3, "output_tokens": 2}


def files(path):
    return {p.relative_to(path): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def one(geometry, request=0):
    return random_request(np.random.default_rng(request), geometry, request=request, passes=4)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_stops_the_writer_leaves_the_old_trace(tmp_path, geometry, error):
    path = write_trace(tmp_path / "t", [one(geometry, i) for i in range(2)], geometry).path
    before = files(path)
    with pytest.raises(error), whole_trace(path, random_manifest(geometry), overwrite=True) as w:
        w.write_request(one(geometry, 7), **COUNTS)
        raise error
    assert files(path) == before
    assert not (path / STAGING).exists()


def test_what_stops_the_writer_leaves_no_folder(tmp_path, geometry):
    path = tmp_path / "new" / "deep" / "t"
    for _ in range(2):  # and so a second call finds nothing in its way
        with pytest.raises(KeyboardInterrupt), whole_trace(path, random_manifest(geometry)) as w:
            w.write_request(one(geometry), **COUNTS)
            raise KeyboardInterrupt
        assert list(tmp_path.iterdir()) == []


def test_the_new_trace_takes_the_place_of_the_old_one(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry, i) for i in range(3)], geometry).path
    (path / "README.md").write_text("mine")
    (path / "tokens" / "notes.txt").write_text("mine too")
    with whole_trace(path, random_manifest(geometry), overwrite=True) as writer:
        writer.write_request(one(geometry, 7), **COUNTS)
        assert open_trace(path).requests == (0, 1, 2)
    assert open_trace(path).requests == (7,)
    open_trace(path).read(7)
    assert sorted(str(p) for p in files(path)) == [
        "README.md",
        "iterations/00007.parquet",
        "manifest.json",
        "routing/00007.parquet",
        "tokens/00007.parquet",
        "tokens/notes.txt",
    ]


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path, geometry):
    left = tmp_path / "t" / STAGING / "new" / "tokens"
    left.mkdir(parents=True)
    (left / "00000.parquet").write_bytes(b"half")
    with whole_trace(tmp_path / "t", random_manifest(geometry)) as writer:
        writer.write_request(one(geometry), **COUNTS)
    assert len(files(tmp_path / "t")) == 4


def test_a_directory_in_use_is_refused_and_left_alone(tmp_path, geometry):
    path = write_trace(tmp_path / "t", [one(geometry)], geometry).path
    before = files(path)
    with pytest.raises(UsageError, match="not empty"), whole_trace(path, random_manifest(geometry)):
        pass
    assert files(path) == before
    (tmp_path / "u").mkdir()
    (tmp_path / "u" / "thesis.tex").write_text("years of work")
    manifest = random_manifest(geometry)
    with pytest.raises(UsageError, match="no trace"), whole_trace(
        tmp_path / "u", manifest, overwrite=True
    ):  # fmt: skip
        pass
    assert (tmp_path / "u" / "thesis.tex").exists()


def test_a_move_that_fails_brings_the_old_trace_back(tmp_path, geometry, monkeypatch):
    path = write_trace(tmp_path / "t", [one(geometry)], geometry).path
    before = files(path)
    rename, moves = Path.rename, []

    def fails_once(self, target):
        moves.append(self)
        if len(moves) == 6:  # the old trace has gone aside, one table of the new one is in
            raise OSError(28, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails_once)
    with (
        pytest.raises(TraceError, match="cannot be written: No space left on device"),
        whole_trace(path, random_manifest(geometry), overwrite=True) as writer,
    ):
        writer.write_request(one(geometry, 7), **COUNTS)
    assert files(path) == before
