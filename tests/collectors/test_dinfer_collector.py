"""dInfer's engine is recorded through its routing function and its decoder."""

import numpy as np
import pytest
import torch
from dinfer_standin import (
    EOS,
    MASK,
    BlockDiffusionLLM,
    LLaDA2MoeSparseMoeBlock,
    LLaDA2SparseMoeBlock,
)

import oled_sim
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, open_trace

BLOCK = 4


PROMPTS = [[1, 2, 3, 4, 5, 6], [7, 8]]


def generate(engine):
    return [engine.generate(torch.tensor([p]), 8, BLOCK).tolist() for p in PROMPTS]


@pytest.mark.parametrize("block", [LLaDA2MoeSparseMoeBlock, LLaDA2SparseMoeBlock])
def test_passes_are_recorded_and_unrolled_ones_left_out(tmp_path, block):
    engine = BlockDiffusionLLM(block, unroll=3)
    plain = generate(engine)
    forwards = []
    counter = engine.model.register_forward_hook(lambda m, a, out: forwards.append(1))
    with oled_sim.record(engine, tmp_path / "t", signals=("full_gate", "cosines")) as recorder:
        assert generate(engine) == plain
    counter.remove()
    assert recorder.requests == 2
    assert recorder.notes == ["passes that an unrolled loop ran after the last mask were left out"]
    trace = open_trace(tmp_path / "t")
    assert trace.manifest.model.layers == (1, 2)
    recorded = 0
    for number, (prompt, text) in enumerate(zip(PROMPTS, plain, strict=True)):
        request = trace.read(number)
        recorded += request.passes
        blocks = -(-len(text[0]) // BLOCK)
        assert request.kind[0] == Kind.PREFILL
        assert (request.kind == Kind.COMMIT).sum() == blocks - len(prompt) // BLOCK
        # No pass repeats the one before without a mask to decode.
        for i in range(1, request.passes):
            rows = slice(*request.token_offset[i : i + 2])
            assert (request.state[rows] == 0).any() or request.kind[i] == Kind.COMMIT
        held = dict(zip(request.position.tolist(), request.token_id.tolist(), strict=True))
        assert [held[p] for p in range(len(text[0]))] == text[0]
        generated = text[0][len(prompt) :]
        output = generated.index(EOS) + 1 if EOS in generated else len(generated)
        assert trace.manifest.entry(number).output_tokens == output
    assert recorded < len(forwards)


def test_routes_are_those_of_the_routing_function(tmp_path):
    engine = BlockDiffusionLLM(unroll=1)
    seen = []
    for layer in list(engine.model.layers)[1:]:
        experts = layer.mlp.experts
        real = experts.custom_routing_function

        def keep(real=real, **kwargs):
            out = real(**kwargs)
            seen.append((*out, kwargs["gating_output"]))
            return out

        experts.custom_routing_function = keep
    with oled_sim.record(engine, tmp_path / "t", signals=["full_gate"]) as recorder:
        engine.generate(torch.tensor([PROMPTS[0]]), 8, BLOCK)
    assert not recorder.notes
    request = open_trace(tmp_path / "t").read(0)
    assert len(seen) == request.events
    for v, (weights, ids, logits) in enumerate(seen):
        rows = slice(*request.event_offset[v : v + 2])
        assert np.array_equal(request.experts[rows], ids.numpy())
        assert np.allclose(request.gates[rows], weights / 2.5, atol=1e-3)
        assert np.allclose(request.full_gate[v], logits.sigmoid().mean(0), atol=1e-3)


def test_everything_is_put_back(tmp_path):
    engine = BlockDiffusionLLM()
    block = engine.model.layers[1].mlp
    before = block.experts.custom_routing_function
    with pytest.raises(RuntimeError, match="mine"), oled_sim.record(engine, tmp_path / "t"):
        generate(engine)
        raise RuntimeError("mine")
    assert block.experts.custom_routing_function == before
    assert "routing" not in vars(block.gate)
    assert "generate" not in vars(engine) and "decode" not in vars(engine.decoder)
    assert not engine.model._forward_hooks and not engine.model._forward_pre_hooks


def test_what_cannot_be_recorded_is_said(tmp_path):
    wrong = BlockDiffusionLLM(mask_id=MASK, eos_id=EOS)
    wrong.decoder.mask_id = 29  # as if it were another model's
    wrong.decoder.decode = lambda logits, start, end, x: x.data.masked_fill_(x.data == MASK, 5)
    with pytest.raises(TraceError, match="no pass holds the mask token 29"), oled_sim.record(
        wrong, tmp_path / "t"
    ):  # fmt: skip
        generate(wrong)
    replayed = BlockDiffusionLLM()
    for layer in list(replayed.model.layers)[1:]:
        layer.mlp.forward = lambda hidden: hidden
    with pytest.raises(TraceError, match="called 0 of 2 gates"), oled_sim.record(
        replayed, tmp_path / "t"
    ):  # fmt: skip
        generate(replayed)
    with pytest.raises(UsageError, match="'embedding' cannot be recorded"), oled_sim.record(
        BlockDiffusionLLM(), tmp_path / "t", signals=["embedding"]
    ):  # fmt: skip
        pass
