"""Routed rows sorted by expert, against the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.hardware.rows import event_rows


@st.composite
def events(draw):
    experts = draw(st.integers(1, 40))
    tokens, top_k = draw(st.integers(1, 20)), draw(st.integers(1, min(8, experts)))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    routes = np.argsort(random.random((tokens, experts)))[:, :top_k]
    dtype = draw(st.sampled_from([np.uint8, np.int32, np.int64]))
    order = random.permutation(np.unique(routes))
    gates = random.random((tokens, top_k)).astype(draw(st.sampled_from([np.float16, np.float32])))
    return routes.astype(dtype), gates + gates.dtype.type(0.01), order


@given(events())
def test_rows_are_the_assignments_grouped_by_expert(event):
    routes, gates, order = event
    rows = event_rows(routes, gates, order, 2.5)
    assert (rows.tokens, rows.top_k) == routes.shape
    assert rows.first[0] == 0 and rows.first[-1] == routes.size
    assert np.array_equal(rows.expert, order)
    for i, expert in enumerate(order):
        mine = rows.row[rows.first[i] : rows.first[i + 1]]
        assert np.array_equal(mine, np.flatnonzero(routes.ravel() == expert))
    wide = gates.astype(np.float64)
    expected = (2.5 * wide / wide.sum(1, keepdims=True)).ravel()
    np.testing.assert_allclose(rows.weight, expected[rows.row], rtol=1e-5)


@given(events())
def test_without_gates_all_rows_weigh_the_same(event):
    routes, _, order = event
    rows = event_rows(routes, None, order, 2.5)
    with_equal = event_rows(routes, np.ones(routes.shape), order, 2.5)
    assert np.array_equal(rows.row, with_equal.row)
    np.testing.assert_allclose(rows.weight, with_equal.weight, rtol=1e-6)
    assert rows.weight.dtype == np.float32 and rows.row.dtype == rows.first.dtype == np.int32


def test_an_expert_may_have_no_rows():
    rows = event_rows([[4, 2]], None, [2, 9, 4], 1.0)
    assert rows.first.tolist() == [0, 1, 1, 2]
    assert rows.row.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("routes", "experts", "message"),
    [
        ([[1, 2]], [1], "not among the activated"),
        ([[1, 200]], [1, 2], "not among the activated"),
        ([[1, -1]], [1], "not among the activated"),
        ([[1, 2]], [1, 2, 1], "named twice"),
    ],
)
def test_contradictions_are_refused(routes, experts, message):
    with pytest.raises(ValueError, match=message):
        event_rows(routes, None, experts, 1.0)
    with pytest.raises(ValueError, match=message):
        event_rows(routes, np.ones_like(routes, np.float32), experts, 1.0)
