"""dInfer's engine is recorded through its routing function and its decoder."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import oled_sim
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, open_trace

MASK, EOS, EXPERTS, TOP_K, BLOCK, WIDTH = 31, 30, 8, 2, 4, 16


def top(logits):
    """Weights and ids, in this order; the weights carry a scaling factor."""
    weights, ids = logits.sigmoid().topk(TOP_K, dim=-1)
    return 2.5 * weights / weights.sum(-1, keepdim=True), ids.int()


class LLaDA2MoeGate(nn.Module):
    """``forward`` is never called."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH) / WIDTH**0.5)

    def get_logits(self, hidden):
        return hidden @ self.weight.T

    def routing(self, hidden_states, gating_output, topk, renormalize):
        return top(gating_output)


class FusedMoE(nn.Module):
    """Holds the routing function that it was given."""

    def __init__(self, routing):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)
        self.custom_routing_function = routing

    def forward_impl(self, hidden, logits):
        weights, ids = self.custom_routing_function(
            hidden_states=hidden, gating_output=logits, topk=TOP_K, renormalize=True
        )
        return (self.experts[ids.long()] * weights.unsqueeze(-1)).sum(1) * hidden


class LLaDA2MoeSparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = LLaDA2MoeGate()
        self.experts = FusedMoE(self.gate.routing)

    def forward(self, hidden):
        x = hidden.reshape(-1, WIDTH)
        return self.experts.forward_impl(x, self.gate.get_logits(x)).view_as(hidden)


class TopK(nn.Module):
    """SGLang's: a named tuple of weights, ids and logits."""

    def forward(self, hidden_states, router_logits):
        return SGLangOutput(*top(router_logits), router_logits)


class SGLangOutput(tuple):
    def __new__(cls, *values):
        return super().__new__(cls, values)


class LLaDA2SparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = LLaDA2MoeGate()
        self.topk = TopK()
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 4)

    def forward(self, hidden):
        x = hidden.reshape(-1, WIDTH)
        weights, ids, _ = self.topk(x, self.gate.get_logits(x))
        return ((self.experts[ids.long()] * weights.unsqueeze(-1)).sum(1) * x).view_as(hidden)


class Model(nn.Module):
    """Layer 0 is dense. A cache is the sum of the embeddings it holds."""

    def __init__(self, block, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=WIDTH, vocab_size=32,
            moe_intermediate_size=WIDTH, num_hidden_layers=3, first_k_dense_replace=1,
        )  # fmt: skip
        self.device = torch.device("cpu")
        self.words = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList()
        for mlp in (nn.Linear(WIDTH, WIDTH), block(), block()):
            layer = nn.Module()
            layer.mlp = mlp
            self.layers.append(layer)
        self.head = nn.Linear(WIDTH, 32)
        self.requires_grad_(False)

    def forward(self, input_ids, position_ids=None, past_key_values=None, use_cache=False):
        hidden = self.words(input_ids)
        before = 0.0 if past_key_values is None else past_key_values
        own = hidden.cumsum(1)
        hidden = hidden + 0.2 * (before + own) + 0.1 * position_ids.unsqueeze(-1).sin()
        for layer in self.layers:
            hidden = hidden + layer.mlp(hidden)
        return SimpleNamespace(logits=3 * self.head(hidden), past_key_values=before + own[:, -1:])


class ThresholdParallelDecoder:
    def __init__(self, threshold=0.5, mask_id=MASK, eos_id=EOS):
        self.threshold, self.temperature = threshold, 0
        self.mask_id, self.eos_id = mask_id, eos_id

    def decode(self, logits, block_start, block_end, x):
        held = x.data[:, block_start:block_end]
        masked = held == self.mask_id
        probability = logits.softmax(-1)
        probability[..., self.mask_id] = 0
        sure, token = probability.max(-1)
        sure = torch.where(masked, sure, -torch.inf)
        chosen = masked & (sure >= (sure.max() - 1e-5).clamp(max=self.threshold))
        held[chosen] = token[chosen]


class BlockDiffusionLLM:
    """With a cache: prefill of at least one block, then unrolled loops of two passes or more."""

    def __init__(self, block=LLaDA2MoeSparseMoeBlock, unroll=2, seed=1, **decoder):
        self.model = Model(block, seed)
        self.decoder = ThresholdParallelDecoder(**decoder)
        self.unroll = unroll

    @torch.no_grad()
    def generate(self, prompt, gen_length=128, block_length=128):
        blocks = -(-(prompt.shape[1] + gen_length) // block_length)
        x = SimpleNamespace(data=torch.full((1, blocks * block_length), MASK))
        x.data[:, : prompt.shape[1]] = prompt
        positions = torch.arange(x.data.shape[1]).unsqueeze(0)
        first = prompt.shape[1] // block_length
        span = slice(0, max(first, 1) * block_length)
        out = self.model(x.data[:, span].clone(), position_ids=positions[:, span], use_cache=True)
        cache = out.past_key_values if first else torch.zeros(1, 1, WIDTH)
        for block in range(first, blocks):
            start, end = block * block_length, (block + 1) * block_length
            span = slice(start, end)
            clean = False
            while (x.data[:, span] == MASK).any() or not clean:
                for _ in range(self.unroll):
                    clean = not (x.data[:, span] == MASK).any()
                    out = self.model(
                        x.data[:, span].clone(), position_ids=positions[:, span],
                        past_key_values=cache, use_cache=True,
                    )  # fmt: skip
                    self.decoder.decode(out.logits, start, end, x)
            cache = out.past_key_values
            if (x.data[:, max(start, prompt.shape[1]) : end] == EOS).any():
                x.data[:, end:] = EOS
                break
        return x.data[:, : prompt.shape[1] + gen_length]


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
    wrong.decoder.decode = lambda logits, start, end, x: x.data[:, start:end].fill_(5)
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
