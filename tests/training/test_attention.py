import pytest
import torch
from how_many import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from oled_sim.model.training.attention import (
    TILE,
    DenseAttention,
    DocumentAttention,
    SparseAttention,
    Visibility,
)
from oled_sim.model.training.layout import lay_out


def visibility(starts, lengths, window, copies):
    flags = torch.zeros(len(starts), window, dtype=torch.bool)
    for row, places in enumerate(starts):
        flags[row, list(places)] = True
    return Visibility.of(lay_out(flags, torch.tensor(lengths)), copies)


def test_hand_checked_mask():
    # Two documents of 4 and 2 tokens, block length 2: blocks aa bb | cc. One noisy copy.
    mask = visibility([[0, 4]], [2], window=6, copies=1).dense()[0, 0].int().tolist()
    assert mask == [
        # noisy a a b b c c   clean a a b b c c
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # noisy a: itself
        [1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0],  # noisy b: itself and clean a
        [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],  # noisy c: another document
        [0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0],  # clean a
        [0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0],  # clean b: a and itself
        [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],  # clean c
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1],
    ]


def test_copies_do_not_see_each_other():
    mask = visibility([[0]], [4], window=8, copies=3).dense()[0, 0]
    noisy = mask[:24, :24].view(3, 8, 3, 8)
    for query in range(3):
        for key in range(3):
            assert noisy[query, :, key].any() == (query == key)
    assert not mask[24:, :24].any()  # clean never sees noisy


@given(
    lengths=st.lists(st.sampled_from([1, 4, 8, 16, 32, 64, 128]), min_size=2, max_size=2),
    places=st.lists(st.sets(st.integers(1, 31)), min_size=2, max_size=2),
    copies=st.integers(1, 3),
)
@settings(max_examples=examples(25), deadline=None)
def test_tiles_cover_every_visible_pair(lengths, places, copies):
    starts = [{0, *(16 * place for place in row)} for row in places]
    seen = visibility(starts, lengths, window=512, copies=copies)
    tiles = seen.tiles().repeat_interleave(TILE, 1).repeat_interleave(TILE, 2)
    assert not (seen.dense()[:, 0] & ~tiles).any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    "kind", [pytest.param(SparseAttention, marks=pytest.mark.slow), DocumentAttention]
)
def test_backends_agree_with_dense(kind):
    generator = torch.Generator().manual_seed(0)
    seen = visibility([[0, 48, 160], [0, 16, 128]], [16, 32], window=256, copies=2)
    q, k, v = (torch.randn(2, heads, 3 * 256, 16, generator=generator) for heads in (4, 2, 2))
    dense = DenseAttention(seen)(0, q, k, v)
    torch.testing.assert_close(kind(seen)(0, q, k, v), dense, atol=1e-5, rtol=1e-5)
