"""How experts are divided among CPU workers: every output once, and evenly."""

from __future__ import annotations

import numpy as np
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.hardware.cpu_shares import GRAIN, PIECE_TOKENS, WEIGHTS_TOKENS, empty_shares
from oled_sim.hardware.rows import EventRows


def event_of(counts, top_k=4):
    """Return an event in which expert 10 + i has ``counts[i]`` rows."""
    n, total = len(counts), sum(counts)
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    tokens = -(-total // top_k)
    row = np.arange(total, dtype=np.int32)
    return EventRows(tokens, top_k, np.arange(10, 10 + n, dtype=np.int32), first, row,
        np.linspace(1, 2, total, dtype=np.float32))  # fmt: skip


def shares_of(counts, workers, f=64, h=96, which=None):
    event = event_of(counts)
    shares = empty_shares(workers, 300, max(4, 4 * event.tokens))
    chosen = np.arange(len(counts)) if which is None else np.array(which)
    most = shares.lay_out(event, chosen, f, h)
    pieces = shares.pieces[: shares.starts[-1]].tolist()
    return shares, pieces, most


def per_worker(shares, pieces):
    return [pieces[a:b] for a, b in zip(shares.starts[:-1], shares.starts[1:], strict=True)]


def test_one_expert_is_cut_over_all_workers():
    shares, pieces, _ = shares_of([1], 4)
    assert [len(p) for p in per_worker(shares, pieces)] == [1, 1, 1, 1]
    assert [p[3:] for p in pieces] == [
        [0, 16, 0, 24], [16, 32, 24, 48], [32, 48, 48, 72], [48, 64, 72, 96],
    ]  # fmt: skip


def test_one_expert_more_than_workers_costs_a_share_more_and_not_twice():
    shares, pieces, _ = shares_of([1] * 5, 4)
    assert [sum(p[4] - p[3] for p in share) for share in per_worker(shares, pieces)] == [80] * 4
    assert [len(share) for share in per_worker(shares, pieces)] == [2] * 4


def test_an_expert_with_most_of_the_work_is_cut_where_others_are_whole():
    _, pieces, _ = shares_of([2000, 1, 1, 1, 1, 1, 1, 1], 4)
    assert sum(p[0] == 10 for p in pieces) == 4
    assert all(p[4] - p[3] == 64 for p in pieces if p[0] != 10)


def test_rows_of_a_job_are_those_of_its_experts_in_their_order():
    shares, pieces, most = shares_of([3, 2, 4], 1, which=[2, 0])
    assert shares.tokens[:7].tolist() == [1, 1, 1, 2, 0, 0, 0]
    assert {p[0]: p[1:3] for p in pieces} == {12: [0, 4], 10: [4, 7]}
    assert most == 3
    # Token 0 has rows 5 to 7, token 1 rows 1 to 3, token 2 row 4.
    assert shares.places[:9].reshape(3, 3).tolist() == [[5, 1, 4], [6, 2, 0], [7, 3, 0]]
    assert not shares.place_of.any()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 16),
    st.sampled_from([(64, 96), (512, 2048), (18, 7)]),
)
def test_every_output_is_computed_once_and_evenly(counts, workers, widths):
    f, h = widths
    shares, pieces, _ = shares_of(counts, workers, f, h)
    inner, outer = np.zeros((len(counts), f)), np.zeros((len(counts), h))
    for e, first, last, a, b, c, d in pieces:
        assert last - first == counts[e - 10]
        assert (a % GRAIN, c % GRAIN) == (0, 0)
        inner[e - 10, a:b] += 1
        outer[e - 10, c:d] += 1
    assert (inner == 1).all()
    assert (outer == 1).all()
    if f < 512:
        return
    work = [
        sum((WEIGHTS_TOKENS + p[2] - p[1]) * (p[4] - p[3]) / f + PIECE_TOKENS for p in share)
        for share in per_worker(shares, pieces)
    ]
    whole = sum(WEIGHTS_TOKENS + c for c in counts)
    most = WEIGHTS_TOKENS + max(counts) + PIECE_TOKENS
    # No worse than cutting nothing, largest expert first (at most 4/3 of the best).
    assert max(work) <= max(1.34 * whole / workers, most) + workers * PIECE_TOKENS + most / 8
