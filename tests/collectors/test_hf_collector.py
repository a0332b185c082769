"""A LLaDA2 under transformers' remote code is recorded as the native one, and left as it was."""

import numpy as np
import pytest
import torch

import oled_sim
from oled_sim.collection import PromptRequest
from oled_sim.collectors.native import NativeCollector
from oled_sim.errors import TraceError, UsageError
from oled_sim.model.decoding import DecodeSettings
from oled_sim.testing.models import byte_model
from oled_sim.testing.remote_code import LLaDA20, LLaDA21
from oled_sim.trace import Kind, Manifest, Model, TokenState, TraceWriter, open_trace

PROMPTS = [[10, 20, 30], list(range(40, 57)), [9] * 8]
RULES = {
    "2.0": (LLaDA20, {"steps": 4, "threshold": 0.02}),
    "2.1": (
        LLaDA21,
        {"threshold": 0.02, "editing_threshold": 0.1, "max_post_steps": 3, "eos_early_stop": True},
    ),
}
SIGNALS = ("full_gate", "embedding", "cosines")


@pytest.fixture(scope="module")
def native():
    model = byte_model(seed=3)
    model.lm_head.weight[model.config.mask_token_id] = 0  # the mask is never the most likely token
    return model


def settings(rule, **changes):
    return (
        {"block_length": 8, "gen_length": 16, "mask_id": 1, "eos_id": 0} | RULES[rule][1] | changes
    )


def generate(model, rule, **changes):
    calls = [torch.tensor([p]) for p in PROMPTS]
    return [model.generate(c, **settings(rule, **changes)).tolist() for c in calls]


def record_native(path, model, rule):
    """Record the same generations with the native collector, without a prefix cache."""
    config = model.config
    described = Model(
        name="tiny", layers=config.moe_layers, experts=config.num_experts,
        top_k=config.num_experts_per_tok,
    )  # fmt: skip
    signals = (*NativeCollector.SIGNALS, *SIGNALS)
    given = {k: v for k, v in RULES[rule][1].items() if k != "eos_early_stop"}
    decode = DecodeSettings(
        rule=rule, block_length=8, max_new_tokens=16, prefix_cache=False, **given
    )
    with TraceWriter(path, Manifest(model=described, origin="real", signals=signals)) as writer:
        for number, prompt in enumerate(PROMPTS):
            request = PromptRequest(prompt, writer.begin(number))
            NativeCollector(model, signals=SIGNALS).record([request], decode)
    return open_trace(path)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_are_those_of_an_unrecorded_run(tmp_path, native, rule):
    model = RULES[rule][0](native)
    plain = generate(model, rule)
    with oled_sim.record(model, tmp_path / "t", signals=SIGNALS) as recorder:
        assert generate(model, rule) == plain
    assert recorder.requests == len(PROMPTS) and not recorder.notes


@pytest.mark.parametrize("rule", RULES)
def test_the_trace_is_that_of_the_native_collector(tmp_path, native, rule):
    model = RULES[rule][0](native)
    with oled_sim.record(model, tmp_path / "t", signals=SIGNALS):
        generate(model, rule)
    expected = record_native(tmp_path / "n", native, rule)
    trace = open_trace(tmp_path / "t")
    assert trace.manifest.signals == expected.manifest.signals
    edits = 0
    for number in range(len(PROMPTS)):
        got, want = trace.read(number), expected.read(number)
        for name in (
            "kind", "block", "context", "accepted_count", "position", "token_id", "state",
            "accepted", "edited", "event_layer", "event_offset", "experts",
        ):  # fmt: skip
            assert np.array_equal(getattr(got, name), getattr(want, name)), name
        for name in ("confidence", "gates", "full_gate", "embedding", "cosines"):
            a, b = np.asarray(getattr(got, name)), np.asarray(getattr(want, name))
            assert np.allclose(a, b, atol=2e-3, equal_nan=True), name
        edits += int(got.edited.sum())
        ours, theirs = trace.manifest.entry(number), expected.manifest.entry(number)
        assert ours.output_tokens == theirs.output_tokens
        assert ours.finish_reason == theirs.finish_reason
    assert (edits > 0) == (rule == "2.1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rule", RULES)
def test_asynchronous_copies_hold_what_the_gates_chose(tmp_path, rule):
    model = RULES[rule][0](byte_model(seed=3).cuda())
    plain, chosen = generate(model, rule), []
    gate = model.model.layers[2].mlp.gate
    kept = gate.register_forward_hook(lambda m, a, out: chosen.append(out[0].cpu().numpy()))
    with oled_sim.record(model, tmp_path / "t", signals=SIGNALS):
        assert generate(model, rule) == plain
    kept.remove()
    trace = open_trace(tmp_path / "t")
    for number in trace.requests:
        request = trace.read(number)
        for v in np.flatnonzero(request.event_layer == 1):
            got = np.sort(request.experts[slice(*request.event_offset[v : v + 2])], axis=1)
            assert np.array_equal(got, np.sort(chosen.pop(0)[-len(got) :], axis=1))
    assert not chosen


def test_redundant_rows_of_the_window_are_dropped(tmp_path, native):
    model = LLaDA20(native)
    with oled_sim.record(model, tmp_path / "t"):
        generate(model, "2.0")
    request = open_trace(tmp_path / "t").read(1)
    assert request.kind[0] == Kind.PREFILL and request.tokens(0) == 24
    assert {request.tokens(i) for i in range(1, request.passes)} == {8}


def test_the_manifest_says_how_it_was_decoded(tmp_path, native):
    model = LLaDA21(native)
    with oled_sim.record(
        model,
        tmp_path / "t",
        name="tiny-2.1",
        redact=True,
        source="made up",
        stands_for="llada2.0-flash",
    ):
        generate(model, "2.1")
    trace = open_trace(tmp_path / "t")
    manifest = trace.manifest
    assert manifest.decode is not None and manifest.decode.rule == "2.1"
    assert (manifest.decode.threshold, manifest.decode.editing_threshold) == (0.02, 0.1)
    assert (manifest.model.name, manifest.model.layers) == ("tiny-2.1", (1, 2))
    assert manifest.stands_for == "llada2.0-flash" and manifest.prompts.source == "made up"
    assert manifest.runtime.name == "hf"
    assert "remote_code.LLaDA21" in manifest.notes
    request = trace.read(1)
    assert (request.token_id[request.state == TokenState.PROMPT] == -1).all()


def test_early_stop_ends_a_request_inside_its_block(tmp_path, native):
    model = LLaDA20(native)
    eos = generate(model, "2.0")[0][0][0]  # what the first request says first
    with oled_sim.record(model, tmp_path / "t"):
        out = model.generate(
            torch.tensor([PROMPTS[0]]), **settings("2.0", eos_id=eos, eos_early_stop=True)
        )
    entry = open_trace(tmp_path / "t").manifest.entry(0)
    assert (entry.output_tokens, entry.finish_reason) == (1, "eos")
    assert out[0, -1] == eos


def test_generation_beyond_an_end_of_sequence_is_said(tmp_path, native):
    model = LLaDA21(native)
    eos = generate(model, "2.1")[0][0][3]
    with oled_sim.record(model, tmp_path / "t") as recorder:
        out = model.generate(
            torch.tensor([PROMPTS[0]]), **settings("2.1", eos_id=eos, eos_early_stop=False)
        )
    assert out.shape[1] == 16 and eos in out[0, :8]
    (note,) = recorder.notes
    assert note.startswith("generation went on after an end of sequence")
    entry = open_trace(tmp_path / "t").manifest.entry(0)
    assert entry.output_tokens == out[0].tolist().index(eos) + 1
    assert entry.finish_reason == "eos"


def hooks_of(model):
    return [m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks]


def test_hooks_are_gone_after_success_and_after_an_exception(tmp_path, native):
    model = LLaDA20(native)
    with oled_sim.record(model, tmp_path / "t", signals=SIGNALS):
        assert hooks_of(model)
        generate(model, "2.0")
    assert not hooks_of(model) and "generate" not in vars(model)
    with pytest.raises(RuntimeError, match="mine"), oled_sim.record(model, tmp_path / "u"):
        generate(model, "2.0")
        raise RuntimeError("mine")
    assert not hooks_of(model) and "generate" not in vars(model)
    assert len(open_trace(tmp_path / "u").requests) == 3  # what was finished is kept


def test_a_hook_that_cannot_be_set_leaves_none_behind(tmp_path, native):
    model = LLaDA20(native)
    head = model.lm_head
    del model.lm_head
    with pytest.raises(AttributeError), oled_sim.record(model, tmp_path / "t"):
        pass
    model.lm_head = head
    assert not hooks_of(model) and "generate" not in vars(model)


def test_a_generation_that_fails_is_left_out_and_said(tmp_path, native):
    model = LLaDA20(native)
    with oled_sim.record(model, tmp_path / "t") as recorder:
        with pytest.raises(IndexError):
            model.generate(torch.tensor([[10_000]]), **settings("2.0"))
        model.generate(torch.tensor([PROMPTS[0]]), **settings("2.0"))
    assert recorder.notes == ["a generation that failed was left out"]
    assert len(open_trace(tmp_path / "t").requests) == 1


def test_nothing_recorded_is_an_error_and_leaves_no_trace(tmp_path, native):
    model = LLaDA20(native)
    with (
        pytest.raises(TraceError, match="nothing was recorded"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        model.forward(torch.tensor([[1, 2]]), attention_mask=8, position_ids=torch.arange(2)[None])
    assert not (tmp_path / "t").exists()


class Bypassing(LLaDA20):
    """Routes in a fused kernel from the second pass on, as under a CUDA graph."""

    calls = 0

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 2:
            for layer in list(self.model.layers)[1:]:
                gate = layer.mlp.gate
                layer.mlp.gate.__dict__["_call_impl"] = gate.forward
        return super().forward(*args, **kwargs)


def test_bypassed_gates_are_reported_by_the_pass_that_bypasses_them(tmp_path):
    model = Bypassing(byte_model(seed=3))
    with (
        pytest.raises(TraceError, match="called 0 of 2 gates"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        generate(model, "2.0")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda out: (out[0][:, :2], out[1][:, :2], out[2]), "layer 1 chose 2 experts a token"),
        (lambda out: tuple(part[:-3] for part in out), "layer 1 routed 5 of the 8 tokens"),
    ],
)
def test_wrong_k_and_dropped_tokens_are_reported(tmp_path, change, sentence):
    model = LLaDA20(byte_model(seed=3))
    gate, real = model.model.layers[1].mlp.gate, []

    def distort(_module, _args, out):
        real.append(out)
        return change(out)

    with pytest.raises(TraceError, match=sentence), oled_sim.record(model, tmp_path / "t"):
        before = gate.register_forward_hook(distort, prepend=True)
        after = gate.register_forward_hook(lambda *_: real.pop())  # the model itself sees no change
        try:
            generate(model, "2.0")
        finally:
            before.remove()
            after.remove()


def test_a_missing_layer_is_reported_before_anything_runs(tmp_path):
    model = LLaDA20(byte_model(seed=3))
    model.config.num_hidden_layers = 4
    with (
        pytest.raises(TraceError, match="no LLaDA2MoeGate in 1 of 3 MoE layers, layer 3 first"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        pass


class Copying(LLaDA20):
    """Gives every pass a copy, so that nothing shows what the last one accepted."""

    def forward(self, input_ids=None, **kwargs):
        return super().forward(input_ids.clone(), **kwargs)


def test_a_generator_that_works_on_copies_is_reported(tmp_path, native):
    model = Copying(native)
    with pytest.raises(TraceError, match="works on a copy"), oled_sim.record(model, tmp_path / "t"):
        generate(model, "2.0")


def test_one_trace_holds_one_setting(tmp_path, native):
    model = LLaDA20(native)
    with (
        pytest.raises(TraceError, match=r"threshold is 0\.5, and was 0\.02 for the first"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        generate(model, "2.0")
        generate(model, "2.0", threshold=0.5)


def test_mistakes_of_the_caller_are_usage_errors(tmp_path, native):
    model = LLaDA20(native)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    cases = [
        (native, {}, "no collector knows a LLaDA2MoeModelLM"),
        (object(), {}, "no collector knows a object"),
        (model, {"signals": ["colour"]}, "no signal 'colour'"),
        (model, {"collector": "hff"}, "unknown collector 'hff': did you mean 'hf'"),
        (model, {"stands_for": "gpt"}, "unknown geometry 'gpt'"),
        (model, {"depth": 3}, "unexpected keyword argument 'depth'"),
        (model, {"out": tmp_path / "full"}, "is not empty"),
    ]
    for subject, options, sentence in cases:
        options = {"out": tmp_path / "t"} | options
        with pytest.raises(UsageError, match=sentence), oled_sim.record(subject, **options):
            pass
    with (
        pytest.raises(UsageError, match="give one request"),
        oled_sim.record(model, tmp_path / "t"),
    ):
        model.generate(torch.tensor([[5, 6], [7, 8]]), **settings("2.0"))
