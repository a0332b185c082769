import msgspec
import pytest
import torch

from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.testing.models import tiny_config


@pytest.fixture(scope="session")
def config():
    """A LLaDA2 with every trait of the published ones, small."""
    return tiny_config()


def random_model(config, seed=0):
    """A model with weights large enough that routing and confidence vary, biases included."""
    model = LLaDA2MoeModelLM(msgspec.structs.replace(config, initializer_range=0.2), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for name, tensor in model.state_dict().items():
        if name.endswith("expert_bias"):
            tensor.normal_(0, 0.3, generator=generator)
        elif name.endswith("norm.weight"):
            tensor.uniform_(0.5, 1.5, generator=generator)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="session")
def model(config):
    return random_model(config)


@pytest.fixture(scope="session")
def make_model():
    return random_model
