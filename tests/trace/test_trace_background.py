"""Requests written in the background are those written in the foreground, and nothing is lost."""

import numpy as np
import pytest

from oled_sim.errors import TraceError
from oled_sim.testing.traces import random_manifest
from oled_sim.trace import TraceWriter, open_trace
from oled_sim.trace.background import Background, BackgroundWriter


def passes(geometry, seed=0, count=3, tokens=4):
    """Arguments of ``add_pass`` for passes over the same masked tokens."""
    rng = np.random.default_rng(seed)
    shape = (len(geometry.layers), tokens)
    for i in range(count):
        ids = [rng.permuted(np.arange(geometry.experts)) for _ in range(np.prod(shape))]
        known = {
            "kind": int(i > 0), "block": 0, "context": 0, "token_id": np.ones(tokens),
            "position": np.arange(tokens), "state": np.zeros(tokens), "accepted": np.zeros(tokens),
            "edited": np.zeros(tokens), "confidence": rng.random(tokens),
        }  # fmt: skip
        late = {
            "experts": np.array(ids)[:, : geometry.top_k].reshape(*shape, -1),
            "gates": np.full((*shape, geometry.top_k), 1 / geometry.top_k),
        }
        yield known, late


def write(path, geometry, background):
    manifest = random_manifest(geometry)
    with TraceWriter(path, manifest) as writer:
        if background:
            with BackgroundWriter(writer) as begin:
                fill(begin, geometry)
        else:
            fill(writer, geometry)


def fill(writer, geometry):
    for number in range(3):
        request = writer.begin(number)
        for known, late in passes(geometry, number):
            request.add_late(lambda late=late: late, **known)
        request.finish(prompt_tokens=0, output_tokens=0)


def test_the_files_are_those_of_the_foreground(tmp_path, geometry):
    for background in (False, True):
        write(tmp_path / str(background), geometry, background)
    names = [p.relative_to(tmp_path / "True") for p in (tmp_path / "True").rglob("*.*")]
    assert len(names) == 10
    for name in names:
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes()


def test_an_error_stops_the_next_hand_over_and_is_raised_at_the_end(tmp_path, geometry):
    known, late = next(passes(geometry))
    late["experts"] = late["experts"] + geometry.experts
    with pytest.raises(TraceError, match="are not all within"), TraceWriter(
        tmp_path / "t", random_manifest(geometry)
    ) as writer, BackgroundWriter(writer) as begin:  # fmt: skip
        begin.begin(0).add_late(lambda: late, **known)
    assert not (tmp_path / "t").exists()

    ran = []
    with pytest.raises(ZeroDivisionError), Background() as background:
        background.put(lambda: 1 / 0)
        while True:  # ends: the thread gets to the first job sooner or later
            background.put(lambda: ran.append(1))
    assert not ran  # nothing is done after an error


def test_an_error_of_the_body_is_not_covered_up_and_finished_requests_stay(tmp_path, geometry):
    with pytest.raises(KeyError, match="mine"), TraceWriter(
        tmp_path / "t", random_manifest(geometry)
    ) as writer, BackgroundWriter(writer) as begin:  # fmt: skip
        fill(begin, geometry)
        known, _ = next(passes(geometry))
        begin.begin(7).add_late(lambda: 1 / 0, **known)
        raise KeyError("mine")
    assert open_trace(tmp_path / "t").requests == (0, 1, 2)


def test_no_more_than_the_queue_is_ever_waiting():
    handed, done, waiting = [0], [0], []

    def job():
        done[0] += 1
        waiting.append(handed[0] - done[0])

    with Background(depth=4) as background:
        for _ in range(500):
            background.put(job)
            handed[0] += 1
    assert done[0] == 500
    assert max(waiting) <= 4
