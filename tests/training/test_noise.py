import msgspec
import pytest
import torch

from oled_sim.model.training.layout import lay_out
from oled_sim.model.training.noise import corrupt, draw_mask
from oled_sim.model.training.recipe import Noise

MASK = 3
PLAIN = Noise(
    copies=2,
    complementary=True,
    block_lengths=((4, 1.0),),
    level=(0.0, 1.0),
    prefix_share=0.0,
    edit_share=0.0,
    edit_rate=0.0,
)


def noise(**changes) -> Noise:
    return msgspec.structs.replace(PLAIN, **changes)


def layout(starts, length):
    flags = torch.zeros(1, 16, dtype=torch.bool)
    flags[0, list(starts)] = True
    return lay_out(flags, torch.tensor([length]))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def many(length=4, rows=400):
    starts = torch.zeros(rows, 16, dtype=torch.bool)
    starts[:, 0] = True
    return lay_out(starts, torch.full((rows,), length))


def test_layout_counts_blocks_from_each_document():
    # Documents at 0 and 6, block length 4: the first has blocks of 4 and 2, then 4, 4, 2.
    found = layout([0, 6], 4)
    assert found.position[0].tolist() == [*range(6), *range(10)]
    assert found.block[0].tolist() == [0] * 4 + [1] * 2 + [2] * 4 + [3] * 4 + [4] * 2
    assert found.offset[0].tolist() == [0, 1, 2, 3, 0, 1] + [0, 1, 2, 3] * 2 + [0, 1]
    assert found.document[0].tolist() == [1] * 6 + [2] * 10


def test_windows_may_differ_in_block_length():
    starts = torch.zeros(2, 8, dtype=torch.bool)
    starts[:, 0] = True
    found = lay_out(starts, torch.tensor([1, 8]))
    assert found.block.tolist() == [list(range(8)), [0] * 8]


def test_complementary_copies_mask_every_token_once():
    clean = torch.arange(4, 20).view(1, 16)
    noisy = corrupt(clean, layout([0], 4), noise(), MASK, generator())
    first, second = noisy.counted[0]
    assert (first ^ second).all()
    assert torch.equal(noisy.tokens == MASK, noisy.counted)
    assert torch.equal(noisy.tokens[0, 0][~first], clean[0][~first])


@pytest.mark.parametrize(("level", "share"), [((0.0, 0.0), 0.0), ((1.0, 1.0), 1.0)])
def test_fixed_levels_mask_nothing_or_everything(level, share):
    masked = draw_mask(many(), noise(level=level), None, generator())
    assert masked.float().mean() == share


def test_level_is_uniform_per_block():
    # With t uniform, the masked count of a block of 4 is uniform on 0..4: a share of 1/5 each.
    masked = draw_mask(many(rows=4000), noise(), None, generator())
    counts = masked.view(-1, 4).sum(1)  # 16000 blocks
    shares = torch.bincount(counts, minlength=5) / len(counts)
    assert (shares - 0.2).abs().max() < 0.02  # standard deviation 0.003


def test_prefix_blocks_show_a_prefix_of_each_length():
    masked = draw_mask(many(rows=2000), noise(prefix_share=1.0), None, generator())
    blocks = masked.view(-1, 4)
    assert (blocks[:, 1:] >= blocks[:, :-1]).all()  # once masked, masked to the end
    shares = torch.bincount(blocks.sum(1), minlength=5) / len(blocks)
    assert shares[0] == 0  # at least one token is predicted
    assert (shares[1:] - 0.25).abs().max() < 0.03


def test_edit_blocks_count_everywhere_and_replace_some_visible_tokens():
    clean = torch.arange(4, 20).repeat(400, 1)
    chosen = noise(copies=1, edit_share=1.0, edit_rate=0.5, level=(0.5, 0.5))
    noisy = corrupt(clean, many(), chosen, MASK, generator())
    tokens = noisy.tokens[:, 0]
    assert noisy.counted.all()
    visible = tokens != MASK
    replaced = (tokens != clean)[visible].float().mean()
    assert 0.45 < replaced < 0.55  # half of some 3200 tokens


def test_only_edit_blocks_are_replaced():
    clean = torch.arange(4, 20).repeat(400, 1)
    chosen = noise(copies=1, edit_share=0.3, edit_rate=1.0)
    noisy = corrupt(clean, many(), chosen, MASK, generator())
    tokens, counted = noisy.tokens[:, 0], noisy.counted[:, 0]
    outside = ~counted
    assert torch.equal(tokens[outside], clean[outside])


def test_same_seed_same_noise():
    clean = torch.arange(4, 20).repeat(4, 1)
    chosen = noise(prefix_share=0.5, edit_share=0.5, edit_rate=0.5)
    first, second = (corrupt(clean, many(rows=4), chosen, MASK, generator(7)) for _ in range(2))
    assert torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.counted, second.counted)
