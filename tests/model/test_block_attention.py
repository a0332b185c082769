import pytest
import torch

from oled_sim.model.attention import (
    BlockCausalAttention,
    CachedAttention,
    KVCache,
    Segment,
    segment_positions,
)


def tokens(count, seed=0):
    return torch.randint(0, 126, (count,), generator=torch.Generator().manual_seed(seed))


def full(model, ids, block_length):
    return model(ids, torch.arange(len(ids)), BlockCausalAttention(block_length))


def test_a_block_sees_itself_and_earlier_blocks_only(model):
    ids = tokens(32)
    before = full(model, ids, 8)
    changed = ids.clone()
    changed[16] = (changed[16] + 1) % 126
    after = full(model, changed, 8)
    torch.testing.assert_close(before[:16], after[:16], atol=1e-5, rtol=0)
    # Within the block attention is bidirectional: every position of it has moved.
    moved = (before - after).abs().amax(1)
    assert (moved[16:] > 1e-2).all()


def test_blocks_count_from_position_zero(model):
    # With blocks of 8, position 7 sees 0..7: it does not depend on position 8, but 8 on 7.
    ids = tokens(16)
    torch.testing.assert_close(full(model, ids[:8], 8), full(model, ids, 8)[:8], atol=1e-5, rtol=0)


def test_rows_of_a_batch_and_of_a_flat_pass_agree(model):
    ids = torch.stack([tokens(16, 1), tokens(16, 2)])
    positions = torch.arange(16).expand(2, -1)
    batched = model(ids, positions, BlockCausalAttention(4))
    flat = model(ids.flatten(), positions.flatten(), BlockCausalAttention(4, [16, 16]))
    torch.testing.assert_close(flat.view_as(batched), batched, atol=1e-5, rtol=0)


def test_only_chosen_rows_reach_the_head(model):
    ids, rows = tokens(16), torch.tensor([3, 15, 0])
    attention = BlockCausalAttention(4)
    positions = torch.arange(16)
    everything = model(ids, positions, attention)
    torch.testing.assert_close(model(ids, positions, attention, rows), everything[rows])


def run_cached(model, cache, sequences, segments, block_length):
    ids = torch.cat([sequences[s.row][s.start : s.stop] for s in segments])
    attention = CachedAttention(cache, segments, block_length)
    return model(ids, segment_positions(segments), attention)


@pytest.mark.parametrize("block_length", [4, 8])
def test_ragged_cached_passes_equal_full_windows(config, model, block_length):
    n = block_length
    sequences = [tokens(5 * n, seed) for seed in range(3)]
    cache = KVCache(config, 3, 5 * n, torch.device("cpu"), torch.float32)
    plan = [
        # Prefills of different lengths in one pass, then rows at different depths, some absent.
        [Segment(0, 0, 3 * n), Segment(1, 0, n), Segment(2, 0, 2 * n)],
        [Segment(0, 3 * n, 4 * n), Segment(1, n, 2 * n), Segment(2, 2 * n, 3 * n)],
        [Segment(0, 4 * n, 5 * n), Segment(2, 3 * n, 4 * n)],
        # Rows of one depth, and a row that runs more than the others.
        [Segment(1, 2 * n, 4 * n), Segment(2, 4 * n, 5 * n)],
        [Segment(1, 4 * n, 5 * n)],
    ]
    for segments in plan:
        logits = run_cached(model, cache, sequences, segments, n)
        parts = logits.split([s.length for s in segments])
        for segment, part in zip(segments, parts, strict=True):
            window = full(model, sequences[segment.row][: segment.stop], n)
            torch.testing.assert_close(part, window[segment.start :], atol=1e-4, rtol=0)


def test_a_later_pass_replaces_the_block_in_the_cache(config, model):
    sequences = [tokens(8, 1)]
    cache = KVCache(config, 1, 8, torch.device("cpu"), torch.float32)
    noisy = [torch.full((8,), config.mask_token_id)]
    run_cached(model, cache, noisy, [Segment(0, 0, 4)], 4)
    run_cached(model, cache, sequences, [Segment(0, 0, 4)], 4)
    logits = run_cached(model, cache, sequences, [Segment(0, 4, 8)], 4)
    torch.testing.assert_close(logits, full(model, sequences[0], 4)[4:], atol=1e-4, rtol=0)
