import msgspec
import pytest
import torch

from oled_sim.model.config import LLaDA2Config
from oled_sim.model.llada2 import LLaDA2MoeModelLM


@pytest.fixture(scope="session")
def config():
    """A LLaDA2 with every trait of the published ones, small."""
    return LLaDA2Config(
        hidden_size=64,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=96,
        moe_intermediate_size=24,
        num_experts=16,
        num_experts_per_tok=4,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        partial_rotary_factor=0.5,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        vocab_size=128,
        tie_word_embeddings=False,
        max_position_embeddings=512,
        mask_token_id=127,
        eos_token_id=126,
        pad_token_id=126,
    )


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
