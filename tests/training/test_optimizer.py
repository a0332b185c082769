import msgspec
import pytest
import torch
from torch import nn

from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.training.optimizer import (
    Muon,
    Trainable,
    is_layer_matrix,
    orthogonalise,
    rate_factor,
)
from oled_sim.model.training.recipe import load_recipe

RECIPE = load_recipe("tiny")


@pytest.mark.parametrize("shape", [(3, 4, 9), (2, 9, 4), (5, 5)])
def test_orthogonalised_matrices_have_singular_values_near_one(shape):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.3  # five steps of the quintic iteration end between 0.7 and 1.2 ...
    assert values.max() < 1.3  # ... except for singular values that began near zero


def test_stacked_matrices_are_orthogonalised_one_by_one():
    torch.manual_seed(0)
    stack = torch.randn(3, 4, 6)
    together = orthogonalise(stack)
    for one, each in zip(stack, together, strict=True):
        torch.testing.assert_close(orthogonalise(one), each)


def test_muon_step_has_the_size_of_an_adamw_step():
    torch.manual_seed(0)
    weight = torch.zeros(64, 64, requires_grad=True)
    weight.grad = torch.randn(64, 64) * 1e-3
    Muon([weight], lr=0.1, momentum=0.9, weight_decay=0.0).step()
    # 0.2 * lr root mean square: 0.02, up to the spread of the singular values around 1.
    assert weight.square().mean().sqrt().item() == pytest.approx(0.02, rel=0.25)


def test_schedule_warms_up_and_ends_at_zero():
    recipe = msgspec.structs.replace(RECIPE.optimizer, warmup=0.1, decay_from=0.5)
    factors = [rate_factor(progress, recipe) for progress in (0.0, 0.05, 0.3, 0.75, 1.0, 1.5)]
    assert factors == pytest.approx([0.0, 0.5, 1.0, 0.5, 0.0, 0.0])


def test_matrices_of_layers_are_told_from_embeddings_router_and_norms():
    model = LLaDA2MoeModelLM(RECIPE.model)
    chosen = {name for name, p in model.named_parameters() if is_layer_matrix(name, p)}
    assert "model.layers.1.mlp.experts.gate_proj" in chosen
    assert "model.layers.0.attention.query_key_value.weight" in chosen
    assert not any("norm" in name or ".gate.weight" in name for name in chosen)
    assert not {"lm_head.weight", "model.word_embeddings.weight"} & chosen


class Stack(nn.Module):
    """Parameters named like those of a model: one matrix of a layer, one head."""

    def __init__(self):
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList([nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)])
        self.lm_head = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.lm_head(self.model.layers[0](x))


@pytest.mark.parametrize(("kind", "rate"), [("muon", 1e-3), ("adamw", 2e-4)])
def test_masters_hold_what_rounding_loses(kind, rate):
    torch.manual_seed(0)
    stack = Stack()
    x = torch.randn(64, 8, dtype=torch.bfloat16)
    recipe = msgspec.structs.replace(RECIPE.optimizer, matrices=kind, matrix_rate=rate, rate=2e-4)
    trainable = Trainable(stack, recipe)
    before = [master.clone() for master in trainable.masters]
    losses, moved = [], []
    for _ in range(20):
        loss = (stack(x) - x).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        trainable.step(1.0)
        trainable.zero_grad()
        moved.append(
            max((m - b).abs().max() for m, b in zip(trainable.masters, before, strict=True))
        )
    assert losses[-1] < losses[0]
    # One step is below bf16's spacing of weights near 0.3 (2e-3); twenty are above it.
    assert moved[0] < 1e-3
    assert moved[-1] > 2e-3
    for parameter, master in zip(trainable.parameters, trainable.masters, strict=True):
        assert torch.equal(parameter, master.bfloat16())
