"""A request that comes about pass by pass must look to decisions as its trace does."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.engine.batch import make_batch
from oled_sim.engine.unfolding import PassStart, Room, Unfolding
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request

GEOMETRY = RoutingGeometry((1, 2, 3), 12, 3)
COSTS = costs_by_hand()


def unfold(trace, geometry, confidence="previous", extra=2):
    """Return a request filled as a model would; ``extra`` passes of room are left."""
    tokens = np.diff(trace.token_offset)
    later = int(tokens[1:].max(initial=1))
    room = Room(trace.passes + extra, int(tokens[0]), later, int(trace.position.max()) + 1)
    live = Unfolding(trace.request, geometry, room, confidence)
    rng = np.random.default_rng(0)
    for p in range(trace.passes):
        mine = slice(trace.token_offset[p], trace.token_offset[p + 1])
        live.begin_pass(
            PassStart(
                int(trace.kind[p]), int(trace.block[p]), trace.position[mine], trace.state[mine]
            )
        )
        for v in np.flatnonzero(trace.event_pass == p):
            rows = slice(trace.event_offset[v], trace.event_offset[v + 1])
            # A gate lists experts in an order of its own.
            order = rng.permuted(np.tile(np.arange(geometry.top_k), (tokens[p], 1)), axis=1)
            live.at_gate(
                int(v),
                np.take_along_axis(trace.experts[rows].astype(np.int64), order, axis=1),
                np.take_along_axis(trace.gates[rows], order, axis=1),
            )
        live.finish_pass(
            int(trace.kind[p]), trace.confidence[mine], trace.accepted[mine], trace.edited[mine]
        )
    return live


@given(st.integers(0, 10_000))
def test_it_holds_what_a_batch_of_its_trace_holds(seed):
    trace = random_request(np.random.default_rng(seed), GEOMETRY, passes=7, tokens=4)
    batch = make_batch([trace], GEOMETRY, COSTS)
    live = unfold(trace, GEOMETRY)
    events, passes = len(batch.event_layer), batch.passes
    rows, active = batch.rows[-1], batch.course.offset[-1]
    assert live.passes == passes
    for name in ("routes", "gates", "confidence", "confidence_after", "position", "state", "owner"):
        wanted = getattr(batch, name)
        found = getattr(live, name)[:rows]
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), name
    for name in ("experts", "tokens", "gate_mass"):
        wanted = getattr(batch, name)
        found = getattr(live, name)[:active]
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), name
    assert np.array_equal(live.rows[: events + 1], batch.rows)
    assert np.array_equal(live.kind[:passes], batch.kind)
    assert np.array_equal(live.block[:passes], batch.block)
    for name in ("event_layer", "event_pass", "rows", "decode"):
        wanted, found = getattr(batch.course, name), getattr(live.course, name)
        assert np.array_equal(found[: len(wanted)], wanted), name
    course = live.measured(batch)
    assert len(course.counts) == events and len(course.pass_times) == passes
    assert [e.pass_index for e in live.ends(passes - 1)] == [passes - 1]


def test_a_trace_of_something_else_is_noticed():
    rng = np.random.default_rng(1)
    trace = random_request(rng, GEOMETRY, passes=4)
    other = random_request(rng, GEOMETRY, passes=4)
    live = unfold(trace, GEOMETRY)
    with pytest.raises(RuntimeError, match="other routes than its trace"):
        live.measured(make_batch([other], GEOMETRY, COSTS))


def test_more_passes_than_there_is_room_for_are_refused():
    trace = random_request(np.random.default_rng(2), GEOMETRY, passes=4)
    live = unfold(trace, GEOMETRY, extra=0)
    mine = slice(0, 4)
    start = PassStart(1, 0, trace.position[mine], trace.state[mine])
    with pytest.raises(RuntimeError, match="more than 4 passes"):
        live.begin_pass(start)


def test_the_confidence_of_the_pass_that_runs_cannot_be_seen():
    with pytest.raises(UsageError, match="known only after it"):
        Unfolding(0, GEOMETRY, Room(1, 4, 4, 8), "current")
