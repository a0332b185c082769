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
    from oled_sim.testing.models import tiny_config

    ids = {"mask_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_config(vocab_size=258, max_position_embeddings=256, **ids)


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
