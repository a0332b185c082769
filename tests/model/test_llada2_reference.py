"""The whole model against an independent numpy implementation."""

import numpy as np
import pytest
import torch
from naive_llada2 import NaiveLLaDA2, rope, route

from oled_sim.model.attention import BlockCausalAttention
from oled_sim.model.checkpoint import published_tensors
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import generate
from oled_sim.model.layers import LLaDA2MoeRotaryEmbedding, rotate


@pytest.fixture(scope="module")
def naive(config, model):
    tensors = {name: tensor.numpy() for name, tensor in published_tensors(model)}
    return NaiveLLaDA2(config, tensors)


def run(model, ids, block_length):
    ids = torch.tensor(ids)
    return model(ids, torch.arange(len(ids)), BlockCausalAttention(block_length))


@pytest.mark.parametrize("block_length", [4, 16])
def test_logits_and_routes(config, model, naive, block_length):
    ids = np.random.default_rng(block_length).integers(0, 127, 32)
    routes = {}
    hooks = [
        block.gate.register_forward_hook(
            lambda _, __, out, layer=layer: routes.update({layer: out[0].tolist()})
        )
        for layer, block in model.sparse_blocks().items()
    ]
    logits = run(model, ids, block_length).numpy()
    for hook in hooks:
        hook.remove()
    expected = naive.logits(ids, block_length)
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    assert routes == naive.routes
    assert set(routes) == set(config.moe_layers)


@pytest.mark.parametrize(("prompt_length", "threshold"), [(5, 0.1), (8, 0.3)])
def test_generation(config, model, naive, prompt_length, threshold):
    prompt = np.random.default_rng(prompt_length).integers(0, 126, prompt_length).tolist()
    tokens, passes = naive.generate(
        prompt, block_length=8, new_tokens=14, steps=5, threshold=threshold
    )
    settings = DecodeSettings(
        block_length=8, max_new_tokens=14, steps=5, threshold=threshold, prefix_cache=False
    )
    (result,) = generate(model, [prompt], settings)
    assert list(result.tokens) == tokens
    assert result.passes == passes


def test_rotation(config):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 5, config.head_dim))  # batch, heads, sequence, head_dim
    positions = np.array([[0, 1, 2, 3, 4], [100, 7, 511, 0, 63]])
    tables = LLaDA2MoeRotaryEmbedding(config)(torch.from_numpy(positions), torch.float32)
    turned = rotate(torch.from_numpy(x).float(), *tables).numpy()
    for b, h, s in np.ndindex(2, 3, 5):
        expected = rope(x[b, h, s], positions[b, s], config.rotary_dim, config.rope_theta)
        np.testing.assert_allclose(turned[b, h, s], expected, atol=1e-4)


def test_router(config, model):
    gate = model.sparse_blocks()[1].gate
    x = torch.from_numpy(np.random.default_rng(1).normal(size=(200, config.hidden_size))).float()
    ids, weights, logits = gate(x)
    assert (ids.dtype, weights.dtype, logits.dtype) == (torch.int64, torch.float32, torch.float32)
    assert logits.shape == (200, config.num_experts)
    args = (gate.weight.double().numpy(), gate.expert_bias.double().numpy(), config)
    for token, token_ids, token_weights in zip(x, ids, weights, strict=True):
        expected_ids, expected_weights = route(token.double().numpy(), *args)
        assert token_ids.tolist() == expected_ids
        np.testing.assert_allclose(token_weights.numpy(), expected_weights, rtol=1e-5)


def test_modules_carry_the_published_names(model):
    found = {name: type(module).__name__ for name, module in model.named_modules()}
    assert found[""] == "LLaDA2MoeModelLM"
    assert found["model"] == "LLaDA2MoeModel"
    assert found["model.layers.0"] == "LLaDA2MoeDecoderLayer"
    assert found["model.layers.0.mlp"] == "LLaDA2MoeMLP"
    assert found["model.layers.1.mlp"] == "LLaDA2MoeSparseMoeBlock"
    assert found["model.layers.1.mlp.gate"] == "LLaDA2MoeGate"
    parts = ("word_embeddings", "norm", "rotary_emb", "layers.1.mlp.experts")
    assert found.keys() >= {"lm_head", *(f"model.{part}" for part in parts)}
    below = ("attention", "mlp", "input_layernorm", "post_attention_layernorm")
    assert found.keys() >= {f"model.layers.2.{part}" for part in below}
    assert "model.layers.1.mlp.shared_experts" in found
