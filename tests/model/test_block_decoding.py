"""Acceptance rules and the walk over blocks, on hand-worked confidences."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oled_sim.errors import UsageError
from oled_sim.model.block_decoder import BlockDecoder
from oled_sim.model.decoding import DecodeSettings, Prediction, accept, edit
from oled_sim.trace.schema import Kind, TokenState

MASK, EOS = 99, 98
MASKED, DECODED, PROMPT = TokenState.MASKED, TokenState.DECODED, TokenState.PROMPT


def floats(*values):
    return np.array(values, dtype=np.float32)


def says(candidates, probabilities, held=None):
    """A prediction for one block; greedy, so best = probability."""
    p = floats(*probabilities)
    held = floats(*held) if held else np.full(len(p), 0.5, np.float32)
    return Prediction(np.array(candidates, dtype=np.int64), p, p, held)


def decoder(prompt, **settings):
    return BlockDecoder(prompt, DecodeSettings(**settings), MASK, EOS)


def chosen(flags):
    return np.flatnonzero(flags).tolist()


ALL = np.ones(4, dtype=bool)


@pytest.mark.parametrize(
    ("confidence", "threshold", "at_least", "expected"),
    [
        # Two are above 0.8, and two are enough.
        ((0.9, 0.1, 0.85, 0.2), 0.8, 2, [0, 2]),
        # More than enough: all above the threshold.
        ((0.9, 0.1, 0.85, 0.2), 0.8, 1, [0, 2]),
        # Two are above, three are due: the best three instead.
        ((0.9, 0.1, 0.85, 0.2), 0.8, 3, [0, 2, 3]),
        # The threshold is strict: 0.5 is not above 0.5, so the one best (leftmost of the tie).
        ((0.5, 0.5, 0.5, 0.4), 0.5, 1, [0]),
        # A tie for the second place goes to the left.
        ((0.3, 0.6, 0.3, 0.3), 0.7, 2, [0, 1]),
        # A quota of nothing accepts nothing below the threshold, anything above.
        ((0.3, 0.6, 0.3, 0.3), 0.7, 0, []),
        ((0.3, 0.8, 0.3, 0.3), 0.7, 0, [1]),
    ],
)
def test_accept(confidence, threshold, at_least, expected):
    assert chosen(accept(floats(*confidence), ALL, threshold, at_least)) == expected


def test_accept_only_masked_and_no_more_than_remain():
    masked = np.array([False, True, False, True])
    # Position 0 is the most confident but not masked; five are due, two remain.
    assert chosen(accept(floats(0.9, 0.2, 0.9, 0.1), masked, 0.5, 5)) == [1, 3]


def test_threshold_is_compared_in_single_precision():
    # 0.95 in fp32 is 0.949999988: a confidence of exactly that is not above the threshold.
    assert chosen(accept(floats(0.95, 0, 0, 0), ALL, 0.95, 0)) == []


@given(
    st.lists(st.tuples(st.floats(0, 1, width=32), st.booleans()), min_size=1, max_size=20),
    st.floats(0, 1),
    st.integers(0, 20),
)
def test_accept_properties(positions, threshold, at_least):
    confidence = floats(*(c for c, _ in positions))
    masked = np.array([m for _, m in positions])
    result = accept(confidence, masked, threshold, at_least)
    assert not (result & ~masked).any()
    assert result.sum() >= min(at_least, masked.sum())
    left = confidence[masked & ~result]
    if result.any() and left.size:
        assert left.max() <= confidence[result].min()


def test_edit():
    current = np.array([1, 2, 3, 4])
    editable = np.array([True, True, True, False])
    # 0: another token at 0.95; 1: the same token; 2: another at exactly 0.9; 3: not editable.
    prediction = says([9, 2, 9, 9], [0.95, 0.99, 0.9, 0.99])
    assert chosen(edit(prediction, current, editable, 0.9)) == [0]


@pytest.mark.parametrize(
    ("length", "steps", "new", "minimal", "expected"),
    [
        (16, 32, 256, 1, [1] * 16 + [0] * 16),
        (32, 5, 256, 1, [7, 7, 6, 6, 6]),
        # Steps are cut to 8 // 2 = 4.
        (16, 32, 8, 2, [4, 4, 4, 4]),
    ],
)
def test_quota(length, steps, new, minimal, expected):
    settings = DecodeSettings(
        block_length=length, steps=steps, max_new_tokens=new, minimal_topk=minimal
    )
    assert [settings.quota(step) for step in range(len(expected))] == expected
    assert sum(expected) == length


def test_rule_2_0_walk():
    # Prompt of 5, blocks of 4: block 0 is all prompt, block 1 holds the prompt's tail (7) and
    # three masks. 4 new tokens: canvas 12, blocks 1 and 2.
    d = decoder([3, 4, 5, 6, 7], block_length=4, max_new_tokens=4, threshold=0.8)
    assert (len(d.tokens), d.start, d.context, d.stop) == (12, 0, 4, 8)

    # Prefill: position 5 is above the threshold and written by the prefill pass.
    out = d.advance(says([0, 10, 11, 12], [0.99, 0.9, 0.3, 0.2], held=[0.6, 0.1, 0.1, 0.1]))
    assert (out.kind, out.block, out.start) == (Kind.PREFILL, 1, 0)
    assert out.token_ids.tolist() == [3, 4, 5, 6, 7, MASK, MASK, MASK]
    assert out.state.tolist() == [PROMPT] * 5 + [MASKED] * 3
    assert chosen(out.accepted) == [5]
    # Unknown before the block, the held token's for the prompt's tail, the argmax's at masks.
    np.testing.assert_array_equal(out.confidence, floats(*[np.nan] * 4, 0.6, 0.9, 0.3, 0.2))

    # Denoise over the block: nothing above 0.8, so the quota of one: the best, position 7.
    assert (d.start, d.stop) == (4, 8)
    out = d.advance(says([0, 0, 11, 12], [0.9, 0.9, 0.3, 0.4], held=[0.6, 0.7, 0.1, 0.1]))
    assert (out.kind, out.start) == (Kind.DENOISE, 4)
    assert out.state.tolist() == [PROMPT, DECODED, MASKED, MASKED]
    np.testing.assert_array_equal(out.confidence, floats(0.6, 0.7, 0.3, 0.4))
    assert chosen(out.accepted) == [3]

    out = d.advance(says([0, 0, 11, 0], [0.9, 0.9, 0.3, 0.4]))
    assert chosen(out.accepted) == [2]
    assert d.tokens[4:8].tolist() == [7, 10, 11, 12]

    # No masks are left: one more pass commits the clean block, and changes nothing.
    out = d.advance(says([0, 0, 0, 0], [1, 1, 1, 1]))
    assert out.kind is Kind.COMMIT
    assert not out.accepted.any()
    assert d.tokens[4:8].tolist() == [7, 10, 11, 12]

    # Block 2, the last: denoised at once, committed, done. Output: 4 tokens from position 5.
    assert (d.block, d.start) == (2, 8)
    assert d.advance(says([20, 21, 22, 23], [0.9] * 4)).kind is Kind.DENOISE
    assert not d.done
    assert d.advance(says([0] * 4, [1] * 4)).kind is Kind.COMMIT
    assert d.done
    assert d.output.tolist() == [10, 11, 12, 20]


def test_rule_2_0_without_cache_needs_no_commit():
    d = decoder([], block_length=4, max_new_tokens=8, threshold=0.8, prefix_cache=False)
    assert d.advance(says([1, 2, 3, 4], [0.9] * 4)).kind is Kind.PREFILL
    assert d.block == 1
    assert d.advance(says([5, 6, 7, 8], [0.9] * 4)).kind is Kind.DENOISE
    assert d.done


def test_quota_spreads_over_the_steps():
    # Blocks of 4 in 2 steps: two positions per pass although nothing is above the threshold.
    d = decoder([], block_length=4, max_new_tokens=4, steps=2, threshold=1.0)
    out = d.advance(says([1, 2, 3, 4], [0.1, 0.4, 0.3, 0.2]))
    assert chosen(out.accepted) == [1, 2]
    out = d.advance(says([1, 0, 0, 4], [0.1, 0, 0, 0.2]))
    assert chosen(out.accepted) == [0, 3]


def test_eos_ends_the_request_after_its_block():
    d = decoder([1], block_length=4, max_new_tokens=11, threshold=0.5)
    d.advance(says([0, 5, EOS, 6], [0.9] * 4))
    assert not d.done
    assert d.advance(says([0] * 4, [0.9] * 4)).kind is Kind.COMMIT
    assert d.done
    assert d.output.tolist() == [5, EOS]


def test_eos_in_the_prompt_does_not_end_it():
    d = decoder([EOS, EOS], block_length=4, max_new_tokens=6, threshold=0.5)
    d.advance(says([0, 0, 5, 6], [0.9] * 4))
    d.advance(says([0] * 4, [0.9] * 4))
    assert not d.done


def test_early_stop_waits_for_everything_before_eos():
    d = decoder([], block_length=4, max_new_tokens=8, threshold=0.5, eos_early_stop=True)
    # EOS at 2 is accepted while 1 is masked; the later pass accepts no EOS, so no early stop.
    d.advance(says([5, 6, EOS, 7], [0.9, 0.1, 0.9, 0.1]))
    assert not d.done
    d.advance(says([0, 6, 0, 7], [0, 0.9, 0, 0.1]))
    assert not d.done

    d = decoder([], block_length=4, max_new_tokens=8, threshold=0.5, eos_early_stop=True)
    d.advance(says([5, EOS, 6, 7], [0.9, 0.9, 0.1, 0.1]))
    assert d.done
    assert d.output.tolist() == [5, EOS]


def test_rule_2_1_edits_and_commits_with_the_pass_that_changes_nothing():
    d = decoder(
        [1], rule="2.1", block_length=4, max_new_tokens=3, threshold=0.7, editing_threshold=0.5
    )
    out = d.advance(says([9, 2, 3, 4], [0.9, 0.9, 0.2, 0.3]))
    # Prefill: position 1 above 0.7. The prompt's token is never edited.
    assert (out.kind, chosen(out.accepted), chosen(out.edited)) == (Kind.PREFILL, [1], [])

    # One position (3, the best) is accepted and position 1 is overwritten in the same pass.
    out = d.advance(says([9, 8, 3, 4], [0.9, 0.6, 0.2, 0.3]))
    assert (out.kind, chosen(out.accepted), chosen(out.edited)) == (Kind.DENOISE, [3], [1])
    assert out.token_ids.tolist() == [1, 2, MASK, MASK]
    out = d.advance(says([9, 8, 3, 4], [0.9, 0.6, 0.9, 0.9]))
    assert (chosen(out.accepted), chosen(out.edited)) == ([2], [])

    # Post steps: one that edits is a denoising pass, the first that does not is the commit.
    out = d.advance(says([9, 8, 7, 4], [0.9, 0.9, 0.9, 0.9]))
    assert (out.kind, chosen(out.accepted), chosen(out.edited)) == (Kind.DENOISE, [], [2])
    assert not d.done
    out = d.advance(says([9, 8, 7, 5], [0.9, 0.9, 0.9, 0.4]))
    assert (out.kind, chosen(out.edited)) == (Kind.COMMIT, [])
    assert d.done
    assert d.output.tolist() == [8, 7, 4]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_rule_2_1_runs_out_of_post_steps_after_an_edit(prefix_cache):
    d = decoder(
        [],
        rule="2.1",
        block_length=2,
        max_new_tokens=2,
        threshold=0.5,
        editing_threshold=0.5,
        max_post_steps=2,
        prefix_cache=prefix_cache,
    )
    d.advance(says([1, 2], [0.9, 0.9]))
    assert d.advance(says([3, 2], [0.9, 0.9])).kind is Kind.DENOISE
    assert d.advance(says([4, 2], [0.9, 0.9])).kind is Kind.DENOISE
    # Two post steps edited: with a cache a commit follows, which edits no more.
    if prefix_cache:
        out = d.advance(says([5, 2], [0.9, 0.9]))
        assert (out.kind, chosen(out.edited)) == (Kind.COMMIT, [])
    assert d.done
    assert d.output.tolist() == [4, 2]


def test_rule_2_1_without_post_steps_commits_plainly():
    d = decoder([], rule="2.1", block_length=2, max_new_tokens=2, threshold=0.5, max_post_steps=0)
    d.advance(says([1, 2], [0.9, 0.9]))
    out = d.advance(says([3, 4], [0.99, 0.99]))
    assert (out.kind, chosen(out.edited), d.done) == (Kind.COMMIT, [], True)


def test_rule_2_1_accepts_the_best_few_when_too_few_qualify():
    d = decoder([], rule="2.1", block_length=4, max_new_tokens=4, threshold=0.8, num_to_transfer=2)
    assert chosen(d.advance(says([1, 2, 3, 4], [0.9, 0.1, 0.3, 0.2])).accepted) == [0, 2]


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_length": 0},
        {"steps": 0},
        {"threshold": 1.5},
        {"editing_threshold": -0.1},
        {"rule": "3.0"},
        {"temperature": -1.0},
        {"minimal_topk": 300},
        {"max_post_steps": -1},
    ],
)
def test_settings_out_of_range(wrong):
    with pytest.raises(UsageError):
        DecodeSettings(**wrong)
