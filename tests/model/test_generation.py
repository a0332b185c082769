from collections import defaultdict

import msgspec
import numpy as np
import pytest
import torch

from oled_sim.errors import UsageError
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import generate
from oled_sim.trace.schema import Kind, TokenState


def prompt_of(length, seed=0):
    return np.random.default_rng((length, seed)).integers(0, 126, length).tolist()


class Recorder:
    """Keeps the records of a run, the block logits of every forward, and the routers' rows."""

    def __init__(self, model):
        self.records = []
        self.logits = []
        self.gate_rows = []
        self._model = model
        self._hooks = []

    def __enter__(self):
        head, gate = self._model.lm_head, self._model.sparse_blocks()[1].gate
        self._hooks = [
            head.register_forward_hook(lambda _, __, out: self.logits.append(out.clone())),
            gate.register_forward_hook(lambda _, args, __: self.gate_rows.append(len(args[0]))),
        ]
        return self

    def __exit__(self, *_):
        for hook in self._hooks:
            hook.remove()

    def block_logits(self, length):
        """(row, block, tokens held) to the logits of the block, for passes with masks."""
        found = {}
        for record in self.records:
            same = [r for r in self.records if r.forward == record.forward]
            place = [r.row for r in same].index(record.row)
            logits = self.logits[record.forward][place * length : (place + 1) * length]
            if (record.state == TokenState.MASKED).any():
                found[record.row, record.block, tuple(record.token_ids[-length:])] = logits
        return found


def run(model, prompts, **settings):
    with Recorder(model) as recorder:
        results = generate(model, prompts, DecodeSettings(**settings), recorder.records.append)
    return results, recorder


@pytest.mark.parametrize("rule", ["2.0", "2.1"])
@pytest.mark.parametrize(
    "block_length", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (8, 16)), 32]
)
def test_cached_and_full_window_agree(model, rule, block_length):
    # Shorter than a block, one token more and less than a multiple, exactly a multiple, long.
    lengths = [1, block_length - 1, block_length, 2 * block_length + 1, 50]
    prompts = [prompt_of(n) for n in lengths]
    common = {
        "rule": rule,
        "block_length": block_length,
        "max_new_tokens": 40,
        "threshold": 0.11,
        "editing_threshold": 0.12,
        "max_post_steps": 3,
    }
    cached, with_cache = run(model, prompts, **common)
    window, without = run(model, prompts, **common, prefix_cache=False)
    assert [r.tokens for r in cached] == [r.tokens for r in window]
    ours, theirs = with_cache.block_logits(block_length), without.block_logits(block_length)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for key, logits in ours.items():
        torch.testing.assert_close(logits, theirs[key], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rule", ["2.0", "2.1"])
def test_ragged_batch_equals_each_request_alone(model, rule):
    prompts = [prompt_of(n) for n in (3, 21, 16, 8)]
    settings = {
        "rule": rule,
        "block_length": 8,
        "max_new_tokens": 30,
        "threshold": 0.11,
        "editing_threshold": 0.12,
    }
    together, batch = run(model, prompts, **settings)
    for row, prompt in enumerate(prompts):
        (alone,), single = run(model, [prompt], **settings)
        assert alone == together[row]
        mine = [r for r in batch.records if r.row == row]
        assert len(mine) == len(single.records) == alone.passes
        for a, b in zip(mine, single.records, strict=True):
            assert (a.kind, a.block, a.context) == (b.kind, b.block, b.context)
            for name in ("positions", "token_ids", "state", "accepted", "edited"):
                np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
            np.testing.assert_allclose(a.confidence, b.confidence, atol=1e-4)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_records_tell_the_whole_story(model, config, prefix_cache):
    length, prompts = 8, [prompt_of(13), prompt_of(2)]
    results, recorder = run(
        model,
        prompts,
        block_length=length,
        max_new_tokens=20,
        threshold=0.11,
        prefix_cache=prefix_cache,
    )
    canvas = [np.array(p + [config.mask_token_id] * 64) for p in prompts]
    rows_of_pass, seen = defaultdict(int), set()
    for record in recorder.records:
        tokens, count = canvas[record.row], len(record.positions)
        # The ids at the start of a pass are what the accepted tokens so far have built.
        np.testing.assert_array_equal(record.token_ids, tokens[record.positions])
        first = record.row not in seen
        seen.add(record.row)
        assert (record.kind is Kind.PREFILL) == first
        stop = (record.block + 1) * length
        assert record.positions.tolist() == list(range(record.context, stop))
        assert record.context == (0 if first else record.block * length)
        in_prompt = record.positions < len(prompts[record.row])
        np.testing.assert_array_equal(record.state == TokenState.PROMPT, in_prompt)
        masked = record.token_ids == config.mask_token_id
        np.testing.assert_array_equal(record.state == TokenState.MASKED, masked)
        assert not (record.accepted & ~masked).any()
        assert record.accepted.any() == masked.any()
        np.testing.assert_array_equal(np.isnan(record.confidence), record.positions < stop - length)
        assert (record.kind is Kind.COMMIT) == (not masked.any())
        assert record.last - record.first == count
        # Without a cache the recorded tokens are the last of the window the pass ran.
        rows_of_pass[record.forward] += count if prefix_cache else stop
        assert record.last == rows_of_pass[record.forward]
        assert record.time_us > 0
        logits = recorder.logits[record.forward]
        place = sum(r.forward == record.forward and r.row < record.row for r in recorder.records)
        block = logits[place * length : (place + 1) * length].softmax(-1)
        block[:, config.mask_token_id] = 0
        tokens[record.positions[record.accepted]] = block.argmax(-1).numpy()[
            record.accepted[-length:]
        ]
        best, held = block.amax(-1), block[range(length), record.token_ids[-length:]]
        expected = np.where(masked[-length:], best, held)
        np.testing.assert_allclose(record.confidence[-length:], expected, atol=1e-5)
    # The routers saw exactly the recorded tokens (or the windows): no padding.
    assert recorder.gate_rows == [rows_of_pass[i] for i in range(len(rows_of_pass))]
    for row, result in enumerate(results):
        start = len(prompts[row])
        assert list(result.tokens) == canvas[row][start : start + len(result.tokens)].tolist()
        assert config.mask_token_id not in result.tokens


def test_forwards_per_block_are_iterations_and_one_commit(model):
    # Threshold 1 and 16 steps: one token per pass. 16 new tokens from position 0 in blocks of 8:
    # (1 prefill + 7 denoise + 1 commit) + (8 denoise + 1 commit) = 18.
    (result,), recorder = run(
        model, [[]], block_length=8, max_new_tokens=16, steps=16, threshold=1.0
    )
    kinds = [r.kind for r in recorder.records]
    assert len(result.tokens) == 16
    assert kinds == (
        [Kind.PREFILL] + [Kind.DENOISE] * 7 + [Kind.COMMIT] + [Kind.DENOISE] * 8 + [Kind.COMMIT]
    )
    assert result.passes == 18


def test_eos_ends_a_row_and_the_others_go_on(model, config):
    # Find a token that one prompt generates early and the other never, and call it end-of-text.
    prompts = [prompt_of(5), prompt_of(9, 3)]
    settings = {"block_length": 4, "max_new_tokens": 32, "threshold": 0.11}
    plain, _ = run(model, prompts, **settings)
    token = next(t for t in plain[0].tokens[:6] if t not in plain[1].tokens)
    original = model.config
    model.config = msgspec.structs.replace(config, eos_token_id=token)
    try:
        results, recorder = run(model, prompts, **settings)
    finally:
        model.config = original
    cut = plain[0].tokens.index(token) + 1
    assert results[0].tokens == plain[0].tokens[:cut]
    assert results[0].ended
    assert results[1].tokens == plain[1].tokens
    assert not results[1].ended
    assert results[0].passes < results[1].passes
    last = max(r.forward for r in recorder.records if r.row == 0)
    assert all(r.row == 1 for r in recorder.records if r.forward > last)


def test_temperature_is_reproducible_by_seed(model):
    prompts = [prompt_of(5), prompt_of(5)]

    def tokens(seed, which=slice(None)):
        results, _ = run(
            model,
            prompts[which],
            block_length=8,
            max_new_tokens=24,
            threshold=0.11,
            temperature=1.0,
            seed=seed,
        )
        return [r.tokens for r in results]

    first = tokens(1)
    assert tokens(1) == first
    assert tokens(2) != first
    # Equal prompts draw from streams of their own, which do not depend on the batch.
    assert first[0] != first[1]
    assert tokens(1, slice(1)) == first[:1]


def test_random_streams_can_be_named(model):
    settings = DecodeSettings(block_length=8, max_new_tokens=24, threshold=0.11, temperature=1.0)
    both = generate(model, [prompt_of(5)] * 2, settings, streams=[7, 3])
    assert generate(model, [prompt_of(5)], settings, streams=[3]) == both[1:]
    assert both[0] != both[1]


def test_low_temperature_approaches_greedy(model):
    settings = {"block_length": 8, "max_new_tokens": 24, "threshold": 0.11}
    greedy, _ = run(model, [prompt_of(5)], **settings)
    cold, _ = run(model, [prompt_of(5)], **settings, temperature=1e-4)
    assert cold == greedy


def test_same_input_same_bytes(model):
    settings = {"block_length": 8, "max_new_tokens": 24, "threshold": 0.11}
    _, a = run(model, [prompt_of(5), prompt_of(30)], **settings)
    _, b = run(model, [prompt_of(5), prompt_of(30)], **settings)
    assert [r.confidence.tobytes() for r in a.records] == [
        r.confidence.tobytes() for r in b.records
    ]


def test_end_of_text_can_be_left_out(config, make_model):
    settings = {"block_length": 8, "max_new_tokens": 24, "threshold": 0.11}
    (free,), _ = run(make_model(config), [prompt_of(5)], **settings)
    ends_with_fourth = msgspec.structs.replace(config, eos_token_id=free.tokens[3])
    model = make_model(ends_with_fourth)
    (ended,), _ = run(model, [prompt_of(5)], **settings)
    assert ended.ended
    (full,), recorded = run(model, [prompt_of(5)], **settings, ignore_eos=True)
    assert not full.ended
    assert len(full.tokens) == 24
    assert free.tokens[3] not in full.tokens
    assert all(0 < c <= 1 for r in recorded.records for c in r.confidence[-8:])


def test_bfloat16_runs(config, make_model):
    model = make_model(config).to(torch.bfloat16)
    results, _ = run(model, [prompt_of(5), prompt_of(9)], block_length=8, max_new_tokens=16)
    assert [len(r.tokens) for r in results] == [16, 16]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1] * 500, "500 tokens.*needs 528 positions of 512"),
        ([1, 127], "mask token 127"),
        ([128], "outside 0..127"),
        ([-1], "outside 0..127"),
    ],
)
def test_impossible_prompts(model, prompt, message):
    with pytest.raises(UsageError, match=f"prompt 1 .*{message}"):
        generate(model, [[1], prompt], DecodeSettings(max_new_tokens=16))


def test_no_prompts(model):
    with pytest.raises(UsageError, match="no prompt"):
        generate(model, [], DecodeSettings())
