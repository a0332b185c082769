"""The backbone with grouped experts is the native model, layer by layer."""

import numpy as np
import pytest
import torch

from oled_sim.hardware.backbone import Backbone
from oled_sim.hardware.grouped import GroupedExperts
from oled_sim.hardware.host_experts import HostExperts
from oled_sim.hardware.rows import event_rows
from oled_sim.hardware.slab import Slab
from oled_sim.hardware.static_attention import padded_keys
from oled_sim.model.attention import CachedAttention, KVCache, Segment
from oled_sim.model.checkpoint_writer import save_checkpoint

BLOCK, CONTEXT = 8, 64


class OnHardware:
    """A model with every routed expert resident, or every second one computed by the CPU lane."""

    def __init__(self, source, place, split, **options):
        self.backbone = Backbone.from_model(source, place, BLOCK, CONTEXT, **options)
        self.experts = HostExperts.from_model(source, place)
        cost = self.experts.cost
        self.slab = Slab(place, cost, cost.experts)
        self.grouped = GroupedExperts(place, cost, self.slab, CONTEXT)
        self.split = split
        self.routing, self.hidden = [], []

    def run(self, ids, context):
        backbone = self.backbone
        backbone.begin_pass(len(ids), context, ids)
        for layer, packed in enumerate(self.experts.packed):
            backbone.to_gate(layer)
            routes, weights = backbone.wait_routing()
            self.routing.append((routes, weights))
            rows = event_rows(routes, weights, np.unique(routes), 2.5)
            self.slab.weights.copy_(packed)
            backbone.shared(layer)
            self.grouped.load(rows)
            here = np.arange(0, len(rows.expert), 2 if self.split else 1)
            there = np.setdiff1d(np.arange(len(rows.expert)), here)
            self.grouped.run(backbone.x, here, rows.expert[here], backbone.out)
            backbone.merge(layer, self.elsewhere(rows, there) if self.split else None)
            self.hidden.append(backbone.hidden.clone())
        backbone.head()
        return backbone.wait_head()

    def elsewhere(self, rows, which):
        out = torch.zeros_like(self.backbone.out)
        self.grouped.run(self.backbone.x, which, rows.expert[which], out)
        return out.view(rows.tokens, rows.top_k, -1).sum(1)


class Native:
    """The native model over the same passes, with what its layers saw."""

    def __init__(self, model):
        self.model, self.cache = model, KVCache(model.config, 1, CONTEXT, model.device, model.dtype)
        self.routing, self.hidden = [], []
        for layer, block in model.sparse_blocks().items():
            block.gate.register_forward_hook(lambda *a: self.routing.append(a[2][:2]))
            model.model.layers[layer].register_forward_hook(lambda *a: self.hidden.append(a[2][0]))

    def run(self, ids, context):
        segment = Segment(0, context, context + len(ids))
        positions = torch.arange(context, context + len(ids))
        attention = CachedAttention(self.cache, [segment], BLOCK)
        return self.model(torch.from_numpy(ids), positions, attention)


def passes():
    """Prefill over five blocks, a block after it, the same block again, the next one."""
    random = np.random.default_rng(0)
    for tokens, context in ((5 * BLOCK, 0), (BLOCK, 40), (BLOCK, 40), (BLOCK, 48), (2 * BLOCK, 48)):
        yield random.integers(0, 126, tokens), context


def check_equal(ours, native):
    """Run the same passes on both."""
    for ids, context in passes():
        best, confidence = ours.run(ids, context)
        logits = native.run(ids, context)[-BLOCK:]
        expected = logits.softmax(-1).max(-1)
        torch.testing.assert_close(ours.backbone.logits, logits, atol=1e-4, rtol=1e-5)
        assert np.array_equal(best, expected.indices.numpy())
        np.testing.assert_allclose(confidence, expected.values.numpy(), rtol=1e-4)
    assert len(ours.routing) == len(native.routing) == 5 * len(ours.experts.packed)
    for (routes, weights), (ids, gates) in zip(ours.routing, native.routing, strict=True):
        assert np.array_equal(routes, ids.numpy())
        np.testing.assert_allclose(weights, gates.numpy(), rtol=1e-5)
    for ours_out, out in zip(ours.hidden, native.hidden, strict=True):
        assert (ours_out - out).norm() <= 1e-5 * out.norm()


@pytest.mark.parametrize("split", [False, True])
def test_equals_the_native_model(model, cpu, split):
    check_equal(OnHardware(model, cpu, split), Native(model))


def test_reads_a_checkpoint_folder(model, cpu, tmp_path):
    save_checkpoint(model, tmp_path / "model", dtype=torch.float32)
    loaded, read = OnHardware(model, cpu, False), OnHardware(tmp_path / "model", cpu, False)
    for ids, context in list(passes())[:2]:
        for one, other in zip(loaded.run(ids, context), read.run(ids, context), strict=True):
            assert np.array_equal(one, other)
    assert torch.equal(loaded.backbone.logits, read.backbone.logits)


def test_random_weights_keep_activations_finite(cpu, cost):
    backbone = Backbone(cpu, cost, 2, BLOCK, CONTEXT, seed=1)
    backbone.begin_pass(BLOCK, 24)
    for layer in range(2):
        backbone.to_gate(layer)
        routes, weights = backbone.wait_routing()
        assert all(len(set(row)) == cost.top_k for row in routes.tolist())
        np.testing.assert_allclose(weights.sum(1), 2.5, rtol=1e-5)
        backbone.shared(layer)
        backbone.merge(layer, None)
    backbone.head()
    best, confidence = backbone.wait_head()
    assert ((confidence > 0) & (confidence <= 1)).all() and best.shape == (BLOCK,)
    again = Backbone(cpu, cost, 2, BLOCK, CONTEXT, seed=1)
    assert torch.equal(again.weights.head, backbone.weights.head)


def test_too_long_a_pass_is_refused(cpu, cost):
    with pytest.raises(ValueError, match="exceed max_context"):
        Backbone(cpu, cost, 1, BLOCK, CONTEXT, seed=1).begin_pass(BLOCK, CONTEXT)


def test_padding_is_bounded_and_ascends():
    sizes = [padded_keys(n) for n in range(1, 5000)]
    assert sizes == sorted(sizes)
    assert all(n <= size <= max(64, 1.25 * n + 64) for n, size in enumerate(sizes, 1))
    assert all(size % 64 == 0 for size in sizes)
    assert len(set(sizes)) < 30
