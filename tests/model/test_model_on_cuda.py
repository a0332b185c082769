"""The model on a GPU: the same results, and no needless wait for the device."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch

from oled_sim.model.attention import BlockCausalAttention, CachedAttention, KVCache, Segment
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.experts import GroupedExperts, LoopExperts
from oled_sim.model.generate import generate
from oled_sim.model.moe import LLaDA2MoeExperts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def wide(config):
    """Wide enough that no grouped kernel is special-cased, with more experts than tokens."""
    return msgspec.structs.replace(
        config, hidden_size=192, num_experts=128, num_experts_per_tok=8, n_group=8, topk_group=4
    )


def prompt_of(length):
    return np.random.default_rng(length).integers(0, 126, length).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("count", [1, 16, 700])
def test_grouped_equals_loop(wide, dtype, count):
    generator = torch.Generator("cuda").manual_seed(0)
    layer = LLaDA2MoeExperts(wide).to("cuda", dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0, 0.1, generator=generator)
    x = torch.randn(count, wide.hidden_size, device="cuda", generator=generator).to(dtype)
    scores = torch.randn(count, wide.num_experts, device="cuda", generator=generator)
    idx = scores.topk(wide.num_experts_per_tok).indices
    weights = torch.rand(count, wide.num_experts_per_tok, device="cuda", generator=generator)
    loop = LoopExperts()(x, idx, weights, layer).float()
    grouped = GroupedExperts()(x, idx, weights, layer)
    assert (grouped.float() - loop).norm() <= {4: 1e-5, 2: 2e-2}[dtype.itemsize] * loop.norm()
    assert torch.equal(grouped, GroupedExperts()(x, idx, weights, layer))
    out = GroupedExperts()(x.requires_grad_(), idx, weights, layer)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [x, *layer.parameters()]))


def test_logits_equal_the_cpu(wide, make_model):
    model = make_model(wide)
    ids = torch.tensor(prompt_of(64))
    positions = torch.arange(64)
    cpu = model(ids, positions, BlockCausalAttention(16))
    gpu = model.to("cuda")(ids.cuda(), positions.cuda(), BlockCausalAttention(16))
    torch.testing.assert_close(gpu.cpu(), cpu, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rule", ["2.0", "2.1"])
def test_generation_equals_the_cpu_and_the_full_window(config, make_model, rule):
    prompts = [prompt_of(n) for n in (3, 16, 41)]
    settings = DecodeSettings(
        rule=rule,
        block_length=16,
        max_new_tokens=40,
        threshold=0.11,
        editing_threshold=0.12,
        max_post_steps=3,
    )
    model = make_model(config)
    on_cpu = generate(model, prompts, settings)
    model = model.to("cuda")
    on_gpu = generate(model, prompts, settings)
    assert on_gpu == on_cpu
    window = generate(model, prompts, dataclasses.replace(settings, prefix_cache=False))
    assert [r.tokens for r in window] == [r.tokens for r in on_gpu]
    alone = [generate(model, [prompt], settings)[0] for prompt in prompts]
    assert alone == on_gpu


def test_bfloat16_generation_is_reproducible(wide, make_model):
    model = make_model(wide).to("cuda", torch.bfloat16)
    prompts = [prompt_of(n) for n in (3, 16, 41)]
    for temperature in (0.0, 1.0):
        settings = DecodeSettings(max_new_tokens=40, threshold=0.11, temperature=temperature)
        first = generate(model, prompts, settings)
        assert generate(model, prompts, settings) == first
        assert all(len(r.tokens) == 40 or r.ended for r in first)


@torch.inference_mode()
def test_a_pass_never_waits_for_the_device(wide, make_model):
    model = make_model(wide).to("cuda", torch.bfloat16)
    cache = KVCache(wide, 2, 64, model.device, model.dtype)
    ids = torch.randint(0, 126, (48,), device="cuda")
    positions = torch.cat([torch.arange(32), torch.arange(16)]).cuda()
    rows = torch.arange(32, 48, device="cuda")
    segments = [Segment(0, 0, 32), Segment(1, 0, 16)]

    def forward():
        return model(ids, positions, CachedAttention(cache, segments, 16), rows)

    forward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
