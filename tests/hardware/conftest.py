import dataclasses

import pytest
import torch

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.place import Place
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.testing.models import tiny_config

SMALL = CostGeometry("small", 64, 96, 32, 3, 1, 16, 4, 1, 4, 2, 16, 128, 4)


@pytest.fixture(scope="session")
def cost():
    """A model small enough for quick tests, every width of its own."""
    return SMALL


@pytest.fixture(scope="session")
def cpu():
    return Place(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def on_gpu():
    """The small model in bf16."""
    return dataclasses.replace(SMALL, weight_bytes=2)


@pytest.fixture(scope="session")
def model():
    return varied_model()


def varied_model():
    """A native model with weights large enough that routing varies, biases and norms included."""
    model = LLaDA2MoeModelLM(tiny_config(initializer_range=0.2), seed=3)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in model.state_dict().items():
        if name.endswith("expert_bias"):
            tensor.normal_(0, 0.3, generator=generator)
        elif name.endswith("norm.weight"):
            tensor.uniform_(0.5, 1.5, generator=generator)
    return model.eval().requires_grad_(False)
