"""What the native collector writes is what the model did."""

import numpy as np
import pytest
import torch

from oled_sim.collection import PromptRequest
from oled_sim.collectors.native import NativeCollector
from oled_sim.collectors.taps import GateTap
from oled_sim.errors import TraceError, UsageError
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import generate
from oled_sim.trace import Kind, Manifest, Model, TokenState, TraceWriter, open_trace

SETTINGS = DecodeSettings(block_length=8, max_new_tokens=24, threshold=0.02, steps=4)
PROMPTS = [[10, 20, 30], list(range(40, 57)), [9] * 8]


def writer_for(path, model, signals):
    config = model.config
    described = Model(
        name="tiny", layers=config.moe_layers, experts=config.num_experts,
        top_k=config.num_experts_per_tok,
    )  # fmt: skip
    signals = (*NativeCollector.SIGNALS, *signals)
    return TraceWriter(path, Manifest(model=described, origin="real", signals=signals))


def record(path, model, prompts=PROMPTS, settings=SETTINGS, signals=(), **kwargs):
    """Record ``prompts`` as one batch; return the generations and the trace."""
    with writer_for(path, model, signals) as writer:
        requests = [PromptRequest(p, writer.begin(n)) for n, p in enumerate(prompts)]
        collector = NativeCollector(model, signals=signals, **kwargs)
        done = collector.record(requests, settings)
    return done, open_trace(path)


def reference_routes(model, tokens, start, block_length):
    """Routes of positions ``start``.. of a full-window pass over ``tokens``, without the tap."""
    from oled_sim.model.attention import BlockCausalAttention

    kept = []
    hooks = [
        b.gate.register_forward_hook(lambda m, a, out: kept.append(out))
        for b in model.sparse_blocks().values()
    ]
    ids = torch.as_tensor(tokens)
    with torch.inference_mode():
        model(ids, torch.arange(len(ids)), BlockCausalAttention(block_length, [len(ids)]))
    for hook in hooks:
        hook.remove()
    idx = torch.stack([k[0] for k in kept])[:, start:]
    weight = torch.stack([k[1] for k in kept])[:, start:]
    return idx.numpy(), (weight / model.config.routed_scaling_factor).numpy()


def test_generated_tokens_are_those_of_an_unrecorded_run(tmp_path, model):
    done, _ = record(tmp_path / "t", model, signals=["full_gate", "embedding", "cosines"])
    assert done == generate(model, PROMPTS, SETTINGS)


@pytest.mark.parametrize("settings", [SETTINGS, DecodeSettings(
    block_length=8, max_new_tokens=24, threshold=0.02, rule="2.1", editing_threshold=0.01,
    max_post_steps=3)])  # fmt: skip
def test_recorded_routes_are_those_of_a_full_window_pass(tmp_path, model, settings):
    _, trace = record(tmp_path / "t", model, settings=settings)
    for number, prompt in enumerate(PROMPTS):
        request = trace.read(number)
        canvas = list(prompt)
        for i in range(request.passes):
            rows = slice(*request.token_offset[i : i + 2])
            start = int(request.position[rows][0])
            canvas[start:] = request.token_id[rows]
            ids, gates = reference_routes(model, canvas, start, settings.block_length)
            for v in np.flatnonzero(request.event_pass == i):
                layer = request.event_layer[v]
                routes = slice(*request.event_offset[v : v + 2])
                want = np.sort(ids[layer], axis=1)
                assert np.array_equal(np.sort(request.experts[routes], axis=1), want)
                by_id = np.take_along_axis(gates[layer], np.argsort(ids[layer], axis=1), axis=1)
                got = np.take_along_axis(
                    np.asarray(request.gates[routes]), np.argsort(request.experts[routes], 1), 1
                )
                assert np.allclose(got, by_id, atol=2e-3)


def test_states_follow_acceptance_from_pass_to_pass(tmp_path, model):
    done, trace = record(tmp_path / "t", model)
    for number, prompt in enumerate(PROMPTS):
        request = trace.read(number)
        assert request.kind[0] == Kind.PREFILL and request.kind[-1] == Kind.COMMIT
        held = {}
        for i in range(request.passes):
            rows = slice(*request.token_offset[i : i + 2])
            for position, token, state, accepted in zip(
                request.position[rows], request.token_id[rows], request.state[rows],
                request.accepted[rows], strict=True,
            ):  # fmt: skip
                if position < len(prompt):
                    assert state == TokenState.PROMPT and token == prompt[position]
                elif held.get(position):
                    assert state == TokenState.DECODED and token != model.config.mask_token_id
                else:
                    assert state == TokenState.MASKED and token == model.config.mask_token_id
                held[position] = held.get(position, False) or accepted
        output = done[number].tokens
        last = dict(zip(request.position, request.token_id, strict=True))
        assert [last[len(prompt) + j] for j in range(len(output))] == list(output)
        entry = trace.manifest.entry(number)
        assert (entry.prompt_tokens, entry.output_tokens) == (len(prompt), len(output))


def test_a_batch_records_what_its_rows_record_alone(tmp_path, model):
    _, together = record(tmp_path / "t", model)
    for number, prompt in enumerate(PROMPTS):
        _, alone = record(tmp_path / f"a{number}", model, [prompt])
        a, b = together.read(number), alone.read(0)
        assert np.array_equal(a.experts, b.experts)
        assert np.array_equal(a.token_id, b.token_id)
        assert np.array_equal(a.kind, b.kind)


def test_samples_do_not_depend_on_the_batch(tmp_path, model):
    settings = DecodeSettings(block_length=8, max_new_tokens=16, temperature=1.0, seed=3, steps=8)
    done, _ = record(tmp_path / "t", model, settings=settings)
    with writer_for(tmp_path / "u", model, ()) as writer:
        collector = NativeCollector(model)
        alone = [
            collector.record([PromptRequest(p, writer.begin(n))], settings)[0]
            for n, p in enumerate(PROMPTS)
        ]
    assert done == alone


def test_optional_signals_are_the_means_they_claim(tmp_path, model):
    prompt = list(range(60, 79))
    signals = ["full_gate", "embedding", "cosines"]
    _, trace = record(tmp_path / "t", model, [prompt], signals=signals)
    request = trace.read(0)
    table = model.model.word_embeddings.weight.numpy()
    for i in range(request.passes):
        ids = request.token_id[slice(*request.token_offset[i : i + 2])]
        assert np.allclose(request.embedding[i], table[ids].mean(0), atol=2e-3)
    assert request.full_gate.shape == (request.events, model.config.num_experts)
    assert (request.full_gate > 0).all() and (request.full_gate < 1).all()
    layers = len(model.config.moe_layers)
    assert np.isnan(request.cosines[:layers]).all()  # nothing precedes the first pass
    second = request.cosines[layers : 2 * layers]
    assert np.isfinite(second[:, 0]).all() and np.isnan(second[:, 1:]).all()
    assert (np.abs(second[:, 0]) <= 1 + 1e-6).all()


def test_redacted_prompts_leave_no_token_id(tmp_path, model):
    _, trace = record(tmp_path / "t", model, redact=True)
    for number in trace.requests:
        request = trace.read(number)
        prompt = request.state == TokenState.PROMPT
        assert (request.token_id[prompt] == -1).all()
        assert (request.token_id[~prompt] >= 0).all()


def test_hooks_are_gone_after_success_and_after_an_exception(tmp_path, model):
    gates = [b.gate for b in model.sparse_blocks().values()]
    record(tmp_path / "t", model, signals=["embedding"])
    assert not any(g._forward_hooks for g in gates)
    with writer_for(tmp_path / "u", model, ()) as writer, pytest.raises(UsageError):
        NativeCollector(model).record(
            [PromptRequest([model.config.mask_token_id], writer.begin(0))], SETTINGS
        )
    assert not any(g._forward_hooks for g in gates)
    assert not model.model.word_embeddings._forward_hooks


def test_bypassed_gates_are_reported(model):
    with GateTap(model) as tap:
        model.sparse_blocks()[1].gate(torch.zeros(1, model.config.hidden_size))
        with pytest.raises(TraceError, match="called 1 of 2 gates"):
            tap.take()


def test_a_model_without_gates_is_refused():
    with pytest.raises(TraceError, match="no module of class"):
        GateTap(torch.nn.Linear(2, 2))


def test_an_unknown_signal_is_refused(model):
    with pytest.raises(UsageError, match="no signal 'colour'"):
        NativeCollector(model, signals=["colour"])
