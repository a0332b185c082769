"""The same on a GPU: page-locked experts, Triton's kernels, graphs. Under a minute."""

import dataclasses

import numpy as np
import pytest
import torch
from grouping import make, random_event, random_slab, run_some

from oled_sim.geometry import find_geometry
from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.grouped import RING, ROOMS, GroupedExperts
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.memory import available_gpu_bytes
from oled_sim.hardware.place import Place
from oled_sim.hardware.slab import Slab

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GPU = torch.device("cuda")
BF16, FP32 = Place(GPU, torch.bfloat16), Place(GPU, torch.float32)
MINI = dataclasses.replace(
    find_geometry("llada2.0-mini"), layers=4, experts=32, vocabulary=4096, name="short mini"
)
"""Widths of mini, few experts and layers."""

TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-5}


def near(one, other, dtype):
    one, other = one.double().cpu(), other.double().cpu()
    assert one.isfinite().all()
    assert (one - other).norm() <= TOLERANCE[dtype] * other.norm()


@pytest.fixture(autouse=True)
def exact_fp32():
    assert not torch.backends.cuda.matmul.allow_tf32


def test_locked_experts_arrive_intact_on_a_stream_of_their_own():
    with HostExperts.random(MINI, 2, BF16, seed=1) as experts:
        assert all(packed.is_pinned() for packed in experts.packed)
        slab, stream = Slab(BF16, MINI, 8), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the slab's zeros come first
        wanted = [(0, 3), (1, 31), (1, 0), (0, 30)]
        with torch.cuda.stream(stream):
            for slot, (layer, expert) in enumerate(wanted):
                slab.weights[2 * slot].copy_(experts.packed[layer][expert], non_blocking=True)
        stream.synchronize()
        for slot, (layer, expert) in enumerate(wanted):
            assert torch.equal(slab.up[2 * slot].cpu(), experts.up(layer, expert))
            assert torch.equal(slab.down[2 * slot].cpu(), experts.down(layer, expert))
            assert not slab.weights[2 * slot + 1].any()
        packed = experts.packed[0]
        assert packed.float().std().item() == pytest.approx(2**-5, rel=0.05)
    assert not packed.is_pinned()


def test_free_memory_of_the_device_counts_what_torch_caches():
    before = available_gpu_bytes(GPU)
    held = torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    assert available_gpu_bytes(GPU) <= before - (1 << 30)
    del held
    assert available_gpu_bytes(GPU) > before - (1 << 29)


@pytest.mark.parametrize("place", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 16, 90])
@pytest.mark.parametrize("cost", ["mini", "odd"])
def test_triton_equals_the_dense_reference(place, tokens, cost, on_gpu):
    odd = dataclasses.replace(on_gpu, hidden_size=72, moe_intermediate_size=40)
    grouped = make(place, {"mini": MINI, "odd": odd}[cost], 90)
    out, expected = run_some(grouped, place, {"mini": MINI, "odd": odd}[cost], tokens, tokens)
    near(out, expected, place.dtype)


def test_captured_calls_equal_launched_ones_however_many():
    """More calls than the ring of staged tables holds, none waited for."""
    tokens, hidden = 16, MINI.hidden_size
    x = torch.randn(tokens, hidden, device=GPU, dtype=torch.bfloat16)
    captured = torch.zeros(tokens * MINI.top_k, hidden, device=GPU, dtype=torch.bfloat16)
    launched = torch.zeros_like(captured)
    slab = random_slab(BF16, MINI, MINI.experts)
    fast, plain = (GroupedExperts(BF16, MINI, slab, tokens) for _ in range(2))
    fast.capture(x, launched)
    fast.capture(x, captured)
    random = np.random.default_rng(0)
    results = []
    for step in range(3 * RING + 5):
        rows, slots = random_event(MINI, tokens, step)
        chosen = random.permutation(len(rows.expert))[: random.integers(0, len(rows.expert) + 1)]
        for grouped, out in ((fast, captured), (plain, launched)):
            grouped.load(rows)
            grouped.run(x, chosen, slots[chosen], out)
        if step % 50 == 0:
            results.append((captured.clone(), launched.clone()))
    results.append((captured, launched))
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in results)
    assert ROOMS[0] == 4 and captured.any()


def test_a_row_does_not_depend_on_what_else_runs():
    x = torch.randn(16, MINI.hidden_size, device=GPU, dtype=torch.bfloat16)
    rows, slots = random_event(MINI, 16)
    grouped = make(BF16, MINI, 16)
    together = torch.zeros(16 * MINI.top_k, MINI.hidden_size, device=GPU, dtype=torch.bfloat16)
    apart = torch.zeros_like(together)
    grouped.load(rows)
    grouped.run(x, np.arange(len(rows.expert)), slots, together)
    for i in range(len(rows.expert)):
        grouped.run(x, [i], [slots[i]], apart)
    assert torch.equal(together, apart)


def run_pass(backbone, context, ids, from_cpu):
    """One pass whose routed outputs are a known function of the routing; all that it leaves."""
    backbone.begin_pass(len(ids), context, ids)
    left = []
    for layer in range(MINI.moe_layers):
        backbone.to_gate(layer)
        routes, weights = backbone.wait_routing()
        assert not backbone.out.any()
        backbone.shared(layer)
        backbone.out.copy_(backbone.x.repeat_interleave(MINI.top_k, 0) * 0.1)
        backbone.merge(layer, from_cpu if layer % 2 else None)
        left += [torch.from_numpy(routes), torch.from_numpy(weights), backbone.hidden.clone()]
    backbone.head()
    return left + [torch.from_numpy(one) for one in backbone.wait_head()]


@pytest.mark.parametrize("place", [BF16, FP32], ids=["bf16", "fp32"])
def test_graphs_equal_eager_passes(place):
    block, contexts = 16, (0, 16, 48, 112, 500)
    from_cpu = torch.randn(block, MINI.hidden_size, device=GPU).to(place.dtype)
    fast, eager = (
        Backbone(place, MINI, MINI.moe_layers, block, 600, seed=2, graphs=graphs)
        for graphs in (True, False)
    )
    fast.capture(contexts, from_cpu)
    random = np.random.default_rng(1)
    for backbone in (fast, eager):  # keys and values that later contexts see
        run_pass(backbone, 0, np.arange(528), from_cpu.repeat(33, 1))
    for context in contexts:
        ids = random.integers(0, MINI.vocabulary, block)
        ours, theirs = (run_pass(one, context, ids, from_cpu) for one in (fast, eager))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("place", [BF16, FP32], ids=["bf16", "fp32"])
def test_the_gpu_computes_what_the_cpu_computes(place):
    """Hidden states, where routing agrees so far (in bf16 near ties may be decided otherwise)."""
    on_gpu = Backbone(place, MINI, MINI.moe_layers, 16, 128, seed=3)
    cpu = Place(torch.device("cpu"), torch.float32)
    on_cpu = Backbone(cpu, MINI, MINI.moe_layers, 16, 128, seed=3)
    for name, tensor in on_cpu.weights.named().items():
        tensor.copy_(on_gpu.weights.named()[name])
    on_gpu.capture([64])
    random = np.random.default_rng(1)
    for tokens, context in ((64, 0), (16, 64)):
        ids = random.integers(0, MINI.vocabulary, tokens)
        gpu, host = (run_pass(one, context, ids, None) for one in (on_gpu, on_cpu))
        near(gpu[2], host[2], place.dtype)
        if place is FP32:
            assert torch.equal(gpu[0], host[0])
            near(gpu[-3], host[-3], place.dtype)
