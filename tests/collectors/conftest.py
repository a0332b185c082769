"""A tiny checkpoint to collect from. Only the tests that use it need torch."""

from importlib.util import find_spec

import pytest

SPECIALS = ["<|endoftext|>", "<|mask|>"]

NEED_TORCH = ["test_native_collector.py", "test_collect_command.py"]
collect_ignore = [] if find_spec("torch") else NEED_TORCH


def byte_tokenizer():
    """One token a byte, plus the special ones: 258 tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture(scope="session")
def config():
    from oled_sim.model.config import LLaDA2Config

    return LLaDA2Config(
        hidden_size=32,
        num_hidden_layers=3,
        first_k_dense_replace=1,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=16,
        num_experts_per_tok=4,
        num_shared_experts=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        partial_rotary_factor=0.5,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
        vocab_size=258,
        tie_word_embeddings=False,
        max_position_embeddings=256,
        mask_token_id=1,
        eos_token_id=0,
        pad_token_id=0,
    )


@pytest.fixture(scope="session")
def model(config):
    import msgspec

    from oled_sim.model.llada2 import LLaDA2MoeModelLM

    spread = msgspec.structs.replace(config, initializer_range=0.2)
    return LLaDA2MoeModelLM(spread, seed=1).eval().requires_grad_(False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, model):
    """The folder of a tiny checkpoint with a byte tokenizer."""
    from oled_sim.model.checkpoint import save_checkpoint

    folder = tmp_path_factory.mktemp("tiny")
    save_checkpoint(model, folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder
