import msgspec
import pytest
import torch

from oled_sim.model.experts import GroupedExperts, LoopExperts, combine, sort_by_expert
from oled_sim.model.moe import LLaDA2MoeExperts, set_executor


def make_layer(config, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    layer = LLaDA2MoeExperts(config).to(dtype)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(0, 0.2, generator=generator)
    return layer


def make_tokens(config, count, dtype, skew=0.0, seed=0):
    """Inputs, distinct experts per token (low ids likelier with more skew) and weights."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, config.hidden_size, generator=generator).to(dtype)
    scores = torch.randn(count, config.num_experts, generator=generator)
    scores = scores - skew * torch.arange(config.num_experts)
    idx = scores.topk(config.num_experts_per_tok).indices
    weights = torch.rand(count, config.num_experts_per_tok, generator=generator)
    return x, idx, weights


def by_definition(x, idx, weights, layer):
    out = torch.zeros(x.shape, dtype=torch.float64)
    for token in range(len(x)):
        for slot, expert in enumerate(idx[token].tolist()):
            gate, up, down = (w[expert].double() for w in layer.parameters())
            row = x[token].double()
            value = down @ (torch.nn.functional.silu(gate @ row) * (up @ row))
            out[token] += weights[token, slot].double() * value
    return out


EXECUTORS = [LoopExperts(), GroupedExperts()]


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
@pytest.mark.parametrize(("count", "skew"), [(1, 0), (7, 0), (33, 0), (33, 2.0)])
def test_sum_of_weighted_experts(config, executor, dtype, tolerance, count, skew):
    layer = make_layer(config, dtype)
    x, idx, weights = make_tokens(config, count, dtype, skew)
    out = executor(x, idx, weights, layer)
    expected = by_definition(x, idx, weights, layer)
    assert out.dtype == dtype
    assert (out - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
def test_result_does_not_depend_on_the_rest_of_the_batch(config, executor):
    layer = make_layer(config, torch.float32)
    x, idx, weights = make_tokens(config, 20, torch.float32)
    whole = executor(x, idx, weights, layer)
    alone = torch.cat(
        [executor(x[i : i + 1], idx[i : i + 1], weights[i : i + 1], layer) for i in range(20)]
    )
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)
    assert torch.equal(whole, executor(x, idx, weights, layer))


@pytest.mark.parametrize("executor", EXECUTORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(config, executor, dtype):
    layer = make_layer(config, dtype)
    x, idx, weights = make_tokens(config, 12, dtype)

    def gradients(run):
        inputs = [x.clone().requires_grad_(), weights.clone().requires_grad_()]
        out = run(inputs[0], idx, inputs[1], layer)
        return torch.autograd.grad(out.double().sum(), [*inputs, *layer.parameters()])

    for ours, exact in zip(gradients(executor), gradients(by_definition), strict=True):
        assert (ours - exact).norm() <= (1e-5 if dtype == torch.float32 else 5e-2) * exact.norm()


def test_unaligned_widths_leave_the_grouped_product(config):
    # An inner width of 4 in bf16 is 8 bytes: not a multiple of 16.
    narrow = msgspec.structs.replace(config, moe_intermediate_size=4)
    layer = make_layer(narrow, torch.bfloat16)
    x, idx, weights = make_tokens(narrow, 9, torch.bfloat16)
    expected = by_definition(x, idx, weights, layer)
    out = GroupedExperts()(x, idx, weights, layer)
    assert (out - expected).norm() <= 2e-2 * expected.norm()


def test_sort_by_expert():
    order, counts = sort_by_expert(torch.tensor([[2, 0], [0, 3], [2, 3]]), 5)
    # Assignments in flat order: experts 2 0 0 3 2 3.
    assert order.tolist() == [1, 2, 0, 4, 3, 5]
    assert counts.tolist() == [2, 0, 2, 2, 0]


def test_combine_sums_in_single_precision():
    # In bf16, 256 + 1 + 1 would stay 256.
    outputs = torch.tensor([[[256.0], [1.0], [1.0]]], dtype=torch.bfloat16)
    assert combine(outputs, torch.ones(1, 3)).item() == 258.0


def test_swapped_executor_is_used(config, make_model):
    model = make_model(config)
    seen = []

    def spy(x, idx, weights, experts):
        seen.append(len(x))
        return LoopExperts()(x, idx, weights, experts)

    set_executor(model, spy)
    ids = torch.arange(8)
    model(ids, ids, lambda layer, q, k, v: q)
    assert seen == [8, 8]
