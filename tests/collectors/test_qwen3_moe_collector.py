"""Softmax top-k mixtures, causal and by block diffusion, are recorded as they route."""

import numpy as np
import pytest
import torch
from qwen3_moe_standin import (
    EOS,
    EXPERTS,
    MASK,
    TOP_K,
    Qwen3MoeForCausalLM,
    Qwen3MoeTopKRouter,
    diffuse,
)
from torch import nn

import oled_sim
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, TokenState, open_trace

SIGNALS = ("full_gate", "embedding", "cosines")


PROMPTS = torch.tensor([[EOS, EOS, 5, 6], [7, 8, 9, 10], [1, 2, 3, 4]])
PADDING = torch.tensor([[0, 0, 1, 1], [1] * 4, [1] * 4])


def generate(model):
    return model.generate(PROMPTS, attention_mask=PADDING, max_new_tokens=6)


def reference(model, ids):
    """Ids, renormalised weights and gate of both layers for all tokens of a text [T]."""
    seen = []
    sites = [layer.mlp.gate for layer in list(model.model.layers)[1:]]
    hooks = [
        s.register_forward_hook(lambda m, a, out: seen.append(m.weight @ a[0].T)) for s in sites
    ]
    model(input_ids=ids.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    gate = torch.stack(seen).mT.softmax(-1)
    weights, experts = gate.topk(TOP_K, dim=-1)
    return experts, weights / weights.sum(-1, keepdim=True), gate


@pytest.mark.parametrize("router", [nn.Linear, Qwen3MoeTopKRouter])
def test_every_row_of_a_causal_batch_is_a_request(tmp_path, router):
    model = Qwen3MoeForCausalLM(router, seed=4)
    plain = generate(model)
    with oled_sim.record(model, tmp_path / "t", signals=SIGNALS) as recorder:
        assert torch.equal(generate(model), plain)
    assert recorder.requests == 3
    trace = open_trace(tmp_path / "t")
    assert trace.manifest.decode.rule == "autoregressive" and trace.manifest.model.layers == (1, 2)
    for number in range(3):
        padding = int((PADDING[number] == 0).sum())
        text = plain[number, padding:]
        generated = text[4 - padding :].tolist()
        length = generated.index(EOS) + 1 if EOS in generated else len(generated)
        entry, request = trace.manifest.entry(number), trace.read(number)
        assert (entry.prompt_tokens, entry.output_tokens) == (4 - padding, length)
        assert entry.finish_reason == ("eos" if EOS in generated else "length")
        assert request.kind.tolist() == [Kind.PREFILL] + [Kind.DENOISE] * (length - 1)
        assert request.accepted_count.tolist() == [0] + [1] * (length - 1)
        assert request.token_id.tolist() == text[: len(request.token_id)].tolist()
        assert request.position.tolist() == list(range(len(request.position)))
        experts, weights, gate = reference(model, text)
        sure = model(input_ids=text[None]).logits[0].softmax(-1).amax(-1)
        for v in range(request.events):
            rows = slice(*request.event_offset[v : v + 2])
            at = request.position[request.row_token[rows]]
            layer = request.event_layer[v]
            assert np.array_equal(request.experts[rows], experts[layer, at].numpy())
            assert np.allclose(request.gates[rows], weights[layer, at], atol=1e-3)
            assert np.allclose(request.full_gate[v], gate[layer, at].mean(0), atol=1e-3)
        last = request.token_offset[1:] - 1
        assert np.allclose(request.confidence[last], sure[request.position[last]], atol=1e-3)


@pytest.mark.parametrize("cached", [True, False])
def test_block_diffusion_is_recorded_request_by_request(tmp_path, cached):
    model = Qwen3MoeForCausalLM(seed=5)
    prompts = [[1, 2, 3, 4, 5, 6], [7, 8]]
    plain = [diffuse(model, p, 8, 4, cached=cached) for p in prompts]
    options = {"mask_id": MASK, "block_length": 4, "max_new_tokens": 8, "signals": SIGNALS}
    with oled_sim.record(model, tmp_path / "t", **options) as recorder:
        diffuse(model, [3], 4, 4)  # in no request
        for prompt, text in zip(prompts, plain, strict=True):
            with recorder.request([prompt]):
                assert torch.equal(diffuse(model, prompt, 8, 4, cached=cached), text)
    assert recorder.notes == ["passes outside a request were left out"]
    trace = open_trace(tmp_path / "t")
    for number, (prompt, text) in enumerate(zip(prompts, plain, strict=True)):
        request = trace.read(number)
        tokens = text.tolist()
        # Passes: prefill of whole prompt blocks if there are any, one a mask, one commit a block.
        masks = len(tokens) - len(prompt)
        first = len(prompt) // 4
        prefill = int(cached and first > 0)
        assert request.passes == prefill + masks + len(tokens) // 4 - first
        assert request.kind[0] == Kind.PREFILL
        assert (request.kind == Kind.COMMIT).sum() == len(tokens) // 4 - first
        assert request.accepted_count.sum() == masks
        held = dict(zip(request.position.tolist(), request.token_id.tolist(), strict=True))
        assert [held[p] for p in range(len(tokens))] == tokens
        assert (request.state[request.position < len(prompt)] == TokenState.PROMPT).all()
        starts = request.token_offset[:-1]
        assert np.array_equal(request.context, request.position[starts])
        for i in range(request.passes):
            rows = slice(*request.token_offset[i : i + 2])
            accepted = request.accepted[rows]
            assert (request.state[rows][accepted] == TokenState.MASKED).all()
            assert np.isfinite(request.confidence[rows][request.state[rows] == 0]).all()


def test_mistakes_are_said(tmp_path):
    model = Qwen3MoeForCausalLM()
    with pytest.raises(UsageError, match="both mask_id and block_length"), oled_sim.record(
        model, tmp_path / "t", mask_id=MASK
    ):  # fmt: skip
        pass
    with pytest.raises(UsageError, match="marks the requests of a causal model"), oled_sim.record(
        model, tmp_path / "t"
    ) as recorder, recorder.request([1]):  # fmt: skip
        pass
    options = {"mask_id": MASK, "block_length": 4}
    with pytest.raises(TraceError, match="no pass ran through the model"), oled_sim.record(
        model, tmp_path / "t", **options
    ) as recorder, recorder.request([1]):  # fmt: skip
        pass
    with pytest.raises(TraceError, match="position 0 of the prompt holds another token"), (
        oled_sim.record(model, tmp_path / "t", **options)
    ) as recorder, recorder.request([1]):  # fmt: skip
        diffuse(model, [1], 4, 4)
        diffuse(model, [2], 4, 4)


def test_a_token_that_is_masked_again_is_edited(tmp_path):
    model = Qwen3MoeForCausalLM()
    passes = ([1, 5, MASK, MASK], [1, MASK, 6, MASK], [1, 5, 6, 7])
    with oled_sim.record(model, tmp_path / "t", mask_id=MASK, block_length=4) as recorder, (
        recorder.request([1])
    ):  # fmt: skip
        for ids in passes:
            model(input_ids=torch.tensor([ids]), position_ids=torch.arange(4).unsqueeze(0))
    request = open_trace(tmp_path / "t").read(0)
    assert np.flatnonzero(request.edited).tolist() == [1]
    assert np.flatnonzero(request.accepted).tolist() == [2, 5, 7]
    assert request.kind.tolist() == [Kind.PREFILL, Kind.DENOISE, Kind.COMMIT]


class Beams(Qwen3MoeForCausalLM):
    """Runs two beams a prompt."""

    def generate(self, inputs=None, **kwargs):
        return self(input_ids=inputs.repeat_interleave(2, 0))


def test_beams_are_refused(tmp_path):
    model = Beams()
    with (
        pytest.raises(TraceError, match="6 rows for 3 prompts"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        generate(model)


class Packing(Qwen3MoeForCausalLM):
    """Batches continuously, as transformers does: all tokens in one row, not by ``generate``."""

    def generate_batch(self, inputs):
        return self(input_ids=torch.tensor([[token for row in inputs for token in row]]))


def test_continuous_batching_is_refused(tmp_path):
    model = Packing()
    with (
        pytest.raises(UsageError, match=r"continuous batching .* call model.generate on a padded"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        model.generate_batch([[1, 2], [3]])
    assert not (tmp_path / "t").exists()
    assert model.generate_batch([[1, 2], [3]]).logits.shape[1] == 3


class Uncached(Qwen3MoeForCausalLM):
    """Runs the whole text again for every token."""

    def generate(self, inputs=None, **kwargs):
        for _ in range(kwargs["max_new_tokens"]):
            token = self(input_ids=inputs).logits[:, -1:].argmax(-1)
            inputs = torch.cat((inputs, token), 1)
        return inputs


def test_a_causal_model_without_a_cache_is_refused(tmp_path):
    model = Uncached()
    with (
        pytest.raises(TraceError, match="a decoding pass over 5 tokens: without a KV cache"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        generate(model)


def test_transformers_own_qwen3_moe(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=200, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=EXPERTS,
        num_experts_per_tok=TOP_K, moe_intermediate_size=16, mlp_only_layers=[0],
        initializer_range=0.2, eos_token_id=7, pad_token_id=7, bos_token_id=1,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval()

    def run():
        return model.generate(
            PROMPTS + 10, attention_mask=PADDING, max_new_tokens=6, do_sample=False
        )

    plain = run()
    with oled_sim.record(model, tmp_path / "t", signals=SIGNALS) as recorder:
        assert torch.equal(run(), plain)
    assert recorder.requests == 3
    text = plain[1]
    with torch.no_grad():
        logits = model(text[None], output_router_logits=True).router_logits
    request = open_trace(tmp_path / "t").read(1)
    for v in range(request.events):
        rows = slice(*request.event_offset[v : v + 2])
        at = request.position[request.row_token[rows]]
        want = logits[request.event_layer[v]][at].topk(TOP_K).indices.numpy()
        assert np.array_equal(request.experts[rows], want)


BLOCKS = {"mask_id": MASK, "block_length": 4}


def test_a_loop_that_keeps_gradients_is_recorded(tmp_path):
    model = Qwen3MoeForCausalLM(seed=5).requires_grad_(True)
    with (
        oled_sim.record(model, tmp_path / "t", **BLOCKS, signals=SIGNALS) as recorder,
        recorder.request([1, 2]),
    ):
        diffuse(model, [1, 2], 6, 4)
    model.requires_grad_(False)
    with (
        oled_sim.record(model, tmp_path / "u", **BLOCKS, signals=SIGNALS) as recorder,
        recorder.request([1, 2]),
    ):
        diffuse(model, [1, 2], 6, 4)
    kept, plain = (open_trace(tmp_path / name).read(0) for name in "tu")
    for signal in ("experts", "gates", "confidence", "full_gate", "embedding", "cosines"):
        assert np.array_equal(getattr(kept, signal), getattr(plain, signal), equal_nan=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"block_length": 0}, "block_length=0: give a whole number of at least 1"),
        ({"block_length": -4}, "block_length=-4: give a whole number of at least 1"),
        ({"block_length": "4"}, "block_length='4': give a whole number of at least 1"),
        ({"block_length": True}, "block_length=True: give a whole number of at least 1"),
        ({"mask_id": 1.5}, "mask_id=1.5: give a whole number of at least 0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: give a whole number of at least 1"),
        ({"eos_id": "</s>"}, "eos_id='</s>': give a whole number of at least 0"),
        ({"signals": "full_gate"}, "signals='full_gate': give a list, as in"),
        ({"signals": [7]}, "give a list of names"),
        ({"name": 5}, "name=5: give a text"),
    ],
)
def test_an_option_that_makes_no_sense_costs_one_sentence(tmp_path, options, sentence):
    with (
        pytest.raises(UsageError, match=sentence),
        oled_sim.record(Qwen3MoeForCausalLM(), tmp_path / "t", **(BLOCKS | options)),
    ):
        pass
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("text", "a prompt is token ids, .* not a str: give input_ids"),
        ({"input_ids": [1]}, "a prompt is token ids, .* not a dict: give input_ids"),
        ([1.5, 2.0], "whole numbers, not torch.float32"),
        ([[1], [2]], r"a prompt of shape \[2, 1\]: give one request"),
    ],
)
def test_a_prompt_that_is_none_costs_one_sentence(tmp_path, prompt, sentence):
    with (
        pytest.raises(UsageError, match=sentence),
        oled_sim.record(Qwen3MoeForCausalLM(), tmp_path / "t", **BLOCKS) as recorder,
        recorder.request(prompt),
    ):
        pass


def test_broken_logits_are_called_that(tmp_path):
    model = Qwen3MoeForCausalLM()
    model.lm_head.weight.fill_(torch.nan)
    with (
        pytest.raises(TraceError, match="the model's logits are NaN or infinite"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        generate(model)
    with (
        pytest.raises(TraceError, match="the model's logits are NaN or infinite"),
        oled_sim.record(model, tmp_path / "t", **BLOCKS) as recorder,
        recorder.request([1]),
    ):
        diffuse(model, [1], 3, 4)
    assert not (tmp_path / "t").exists()


def test_a_dense_model_is_said_to_have_no_experts(tmp_path):
    model = Qwen3MoeForCausalLM()
    for layer in model.model.layers:
        layer.mlp = nn.Linear(16, 16)
    with (
        pytest.raises(UsageError, match="this Qwen3MoeForCausalLM has no MoE layers"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        pass


def test_blocks_are_entered_once_and_one_after_the_other(tmp_path):
    model = Qwen3MoeForCausalLM()
    recording = oled_sim.record(model, tmp_path / "t", **BLOCKS)
    with recording as recorder:
        request = recorder.request([1])
        with request:
            diffuse(model, [1], 3, 4)
            with (
                pytest.raises(UsageError, match="a request is open already"),
                recorder.request([2]),
            ):
                pass
        with pytest.raises(UsageError, match=r"this request\(\) was entered before"), request:
            pass
    with pytest.raises(UsageError, match=r"this record\(\) was entered before"), recording:
        pass
    with pytest.raises(UsageError, match=r"the block of record\(\) was left"):
        recorder.request([1])
    with (
        pytest.raises(UsageError, match=r"is not empty: .* give overwrite=True"),
        oled_sim.record(model, tmp_path / "t", **BLOCKS),
    ):
        pass
    assert open_trace(tmp_path / "t").requests == (0,)
