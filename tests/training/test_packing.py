from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.model.training.packing import pack

EOS = 0


def documents(lengths):
    rng = np.random.default_rng(1)
    return [rng.integers(1, 50, length).astype(np.int32) for length in lengths]


def test_documents_end_with_eos_and_start_at_multiples():
    # Lengths with end-of-text: 4 -> 1 unit of 4, 5 -> 2 units, 3 -> 1 unit; a window has 4 units.
    first, second, third = documents([3, 4, 2])
    windows = pack([first, second, third], window=16, multiple=4, eos=EOS)
    assert len(windows) == 1
    expected = [*first, 0, *second, 0, 0, 0, 0, *third, 0, 0]
    assert windows.tokens[0].tolist() == expected
    assert np.flatnonzero(windows.starts[0]).tolist() == [0, 4, 12]
    assert windows.real[0].astype(int).tolist() == [1] * 4 + [1] * 5 + [0] * 3 + [1] * 3 + [0]
    assert windows.used.all()


def test_unused_tail_is_a_document_of_its_own():
    windows = pack(documents([3]), window=16, multiple=4, eos=EOS)
    assert np.flatnonzero(windows.starts[0]).tolist() == [0, 4]
    assert windows.used[0].sum() == 4


def test_best_fit_fills_the_tightest_gap():
    # Units 3, 2, 1 of 4 per window: 3 opens a window, 2 the next, 1 fits the first exactly.
    windows = pack(documents([11, 7, 3]), window=16, multiple=4, eos=EOS)
    assert len(windows) == 2
    assert windows.used[0].all()
    assert windows.used[1].sum() == 8


@given(st.lists(st.integers(0, 90), min_size=1, max_size=40))
def test_every_token_is_packed_once(lengths):
    given_documents = documents(lengths)
    windows = pack(given_documents, window=32, multiple=8, eos=EOS)
    pieces = []
    for row in range(len(windows)):
        bounds = [*np.flatnonzero(windows.starts[row]), 32]
        for start, stop in pairwise(bounds):
            assert start % 8 == 0
            piece = windows.tokens[row, start:stop][windows.real[row, start:stop]]
            if len(piece):
                pieces.append(tuple(piece.tolist()))
    wanted = []
    for document in given_documents:
        ended = [*document.tolist(), EOS]
        wanted += [tuple(ended[i : i + 32]) for i in range(0, len(ended), 32)]
    assert sorted(pieces) == sorted(wanted)
    assert not (windows.real & ~windows.used).any()
