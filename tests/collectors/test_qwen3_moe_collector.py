"""Softmax top-k mixtures, causal and by block diffusion, are recorded as they route."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import oled_sim
from oled_sim.errors import TraceError, UsageError
from oled_sim.trace import Kind, TokenState, open_trace

MASK, EOS, EXPERTS, TOP_K = 31, 30, 8, 2
SIGNALS = ("full_gate", "embedding", "cosines")


class Qwen3MoeTopKRouter(nn.Linear):
    """The gate of transformers 5: takes softmax and top-k itself, returns a triple."""

    def forward(self, hidden):
        logits = super().forward(hidden)
        weights, ids = logits.softmax(-1, dtype=torch.float).topk(TOP_K, dim=-1)
        return logits.softmax(-1), weights / weights.sum(-1, keepdim=True), ids


class Qwen3MoeSparseMoeBlock(nn.Module):
    """``gate`` is a linear layer, as under transformers 4, or a router."""

    def __init__(self, width, router):
        super().__init__()
        self.gate = router(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, hidden):
        x = hidden.reshape(-1, hidden.shape[-1])
        out = self.gate(x)
        if isinstance(out, tuple):
            _, weights, ids = out
        else:
            weights, ids = out.softmax(-1, dtype=torch.float).topk(TOP_K, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
        y = torch.stack([e(x) for e in self.experts], 1)
        y = y.gather(1, ids.unsqueeze(-1).expand(-1, -1, y.shape[-1]))
        return (y * weights.unsqueeze(-1)).sum(1).view_as(hidden)


class Qwen3MoeModel(nn.Module):
    """Layer 0 is dense. What a token's cache holds is the sum of what came before it."""

    def __init__(self, width, router):
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        mlp = [nn.Linear(width, width), *(Qwen3MoeSparseMoeBlock(width, router) for _ in range(2))]
        self.layers = nn.ModuleList()
        for part in mlp:
            layer = nn.Module()
            layer.mlp = part
            self.layers.append(layer)

    def forward(self, input_ids=None, position_ids=None, attention_mask=None, context=0.0):
        hidden = self.embed_tokens(input_ids)
        seen = hidden if attention_mask is None else hidden * attention_mask.unsqueeze(-1)
        hidden = hidden + 0.3 * (context + seen.cumsum(1))
        for layer in self.layers:
            hidden = hidden + layer.mlp(hidden)
        return hidden, context + seen.sum(1, keepdim=True)


class Qwen3MoeForCausalLM(nn.Module):
    def __init__(self, router=nn.Linear, seed=0, width=16):
        super().__init__()
        torch.manual_seed(seed)
        self.config = SimpleNamespace(
            num_experts=EXPERTS, num_experts_per_tok=TOP_K, hidden_size=width, vocab_size=32,
            moe_intermediate_size=width, num_hidden_layers=3, mlp_only_layers=[0],
            decoder_sparse_step=1, eos_token_id=EOS,
        )  # fmt: skip
        self.generation_config = SimpleNamespace(eos_token_id=[EOS], do_sample=False)
        self.model = Qwen3MoeModel(width, router)
        self.lm_head = nn.Linear(width, 32, bias=False)
        self.lm_head.weight.data *= 3
        self.requires_grad_(False)

    def forward(self, **inputs):
        hidden, context = self.model(**inputs)
        return SimpleNamespace(logits=self.lm_head(hidden), context=context)

    def generate(self, inputs=None, generation_config=None, **kwargs):
        """Greedy, with a cache; rows that are done are padded until all are."""
        ids, mask = inputs, kwargs.get("attention_mask")
        out = self(input_ids=ids, attention_mask=mask)
        done = torch.zeros(len(ids), dtype=torch.bool)
        for step in range(kwargs["max_new_tokens"]):
            token = out.logits[:, -1].argmax(-1)
            token[done] = EOS
            done |= token == EOS
            ids = torch.cat((ids, token.unsqueeze(1)), 1)
            if done.all() or step == kwargs["max_new_tokens"] - 1:
                break
            out = self(input_ids=token.unsqueeze(1), context=out.context)
        return ids


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


def diffuse(model, prompt, gen_length, block_length, *, cached=True):
    """A block-diffusion loop as SDAR's: prefill of whole blocks, denoising, a commit pass."""
    blocks = -(-(len(prompt) + gen_length) // block_length)
    x = torch.full((1, blocks * block_length), MASK)
    x[0, : len(prompt)] = torch.tensor(prompt)
    context, first = 0.0, len(prompt) // block_length
    positions = torch.arange(x.shape[1]).unsqueeze(0)
    if first and cached:
        span = slice(0, first * block_length)
        context = model(input_ids=x[:, span], position_ids=positions[:, span]).context
    for block in range(first, blocks):
        span = slice(block * block_length if cached else 0, (block + 1) * block_length)
        window = x[:, span].clone() if cached else x[:, span]
        while True:
            masked = window[0, -block_length:] == MASK
            out = model(input_ids=window, position_ids=positions[:, span], context=context)
            if not masked.any():
                context = out.context if cached else 0.0
                break
            probability = out.logits[0, -block_length:].softmax(-1)
            probability[:, MASK] = 0
            sure, token = probability.max(-1)
            best = torch.where(masked, sure, -1.0).argmax()
            window[0, -block_length:][best] = token[best]
        x[:, span] = window
    return x[0]


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
    with pytest.raises(TraceError, match="position 1 held a token and is masked again"), (
        oled_sim.record(model, tmp_path / "t", **options)
    ) as recorder, recorder.request([1]):  # fmt: skip
        for ids in ([1, 5, MASK, MASK], [1, MASK, 6, MASK], [1, 5, 6, 7]):
            model(input_ids=torch.tensor([ids]), position_ids=torch.arange(4).unsqueeze(0))


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
