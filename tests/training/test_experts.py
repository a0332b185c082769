import pytest
import torch

from oled_sim.model.moe import LLaDA2MoeExperts, LLaDA2MoeGate, LLaDA2MoeSparseMoeBlock
from oled_sim.model.training.balance import imbalance, update_bias
from oled_sim.model.training.experts import CountingExperts, GroupedExperts
from oled_sim.model.training.recipe import load_recipe
from oled_sim.model.training.router import FusibleGate

CONFIG = load_recipe("tiny").model


def experts(seed=0) -> LLaDA2MoeExperts:
    torch.manual_seed(seed)
    stacked = LLaDA2MoeExperts(CONFIG)
    for weight in stacked.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return stacked


def routes(tokens):
    chosen = torch.stack([torch.randperm(16)[:4] for _ in range(tokens)])
    return chosen, torch.rand(tokens, 4)


def run(executor, x, index, weight, stacked):
    leaves = (x.clone().requires_grad_(), weight.clone().requires_grad_())
    stacked.zero_grad()
    out = executor(leaves[0], index, leaves[1], stacked)
    (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
    gradients = [leaf.grad for leaf in leaves] + [p.grad.clone() for p in stacked.parameters()]
    return out, gradients, executor.load


@pytest.mark.parametrize("tokens", [1, 5, 200])
def test_grouped_agrees_with_the_loop_in_value_gradient_and_load(tokens):
    stacked = experts()
    x = torch.randn(tokens, CONFIG.hidden_size)
    index, weight = routes(tokens)
    loop = run(CountingExperts(torch.zeros(16)), x, index, weight, stacked)
    grouped = run(GroupedExperts(torch.zeros(16)), x, index, weight, stacked)
    torch.testing.assert_close(grouped[0], loop[0], atol=1e-5, rtol=1e-4)
    for fast, plain in zip(grouped[1], loop[1], strict=True):
        torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-4)
    assert torch.equal(grouped[2], loop[2])
    assert loop[2].sum() == 4 * tokens


def test_fusible_gate_chooses_as_the_model_does():
    torch.manual_seed(0)
    block = LLaDA2MoeSparseMoeBlock(CONFIG)
    torch.nn.init.normal_(block.gate.weight)
    block.gate.expert_bias.normal_(std=0.3)
    names = set(block.state_dict())
    x = torch.randn(500, CONFIG.hidden_size)
    expected = block.gate(x)
    FusibleGate.replace(block)
    assert isinstance(block.gate, LLaDA2MoeGate)
    found = block.gate(x)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(found[2], expected[2])
    assert set(block.state_dict()) == names


def test_fusible_gate_gives_the_same_gradient():
    torch.manual_seed(1)
    block = LLaDA2MoeSparseMoeBlock(CONFIG)
    torch.nn.init.normal_(block.gate.weight)
    x = torch.randn(50, CONFIG.hidden_size)
    gradients = []
    for _ in range(2):
        block.gate.weight.grad = None
        (block.gate(x)[1] * torch.arange(4.0)).sum().backward()
        gradients.append(block.gate.weight.grad.clone())
        FusibleGate.replace(block)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_bias_moves_against_the_excess_load():
    bias, load = torch.zeros(4), torch.tensor([10.0, 2.0, 6.0, 6.0])  # mean 6
    update_bias(bias, load, 0.25)
    assert bias.tolist() == [-0.25, 0.25, 0.0, 0.0]
    assert imbalance(load) == pytest.approx(10 / 6)


def test_bias_rule_balances_a_skewed_router():
    torch.manual_seed(0)
    gate = LLaDA2MoeGate(CONFIG)
    torch.nn.init.normal_(gate.weight, std=0.1)
    x = torch.randn(2000, CONFIG.hidden_size) + 1.0  # a common direction: some experts are ahead
    ratios = []
    for _ in range(300):
        load = torch.bincount(gate(x)[0].flatten(), minlength=16).float()
        ratios.append(float(imbalance(load)))
        update_bias(gate.expert_bias, load, 1e-2)
    assert ratios[0] > 2.0
    assert ratios[-1] < 1.3
