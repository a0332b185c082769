"""A tiny checkpoint to collect from. Only the tests that use it need torch."""

from importlib.util import find_spec

import pytest

NEED_TORCH = [
    "test_native_collector.py",
    "test_collect_command.py",
    "test_hf_collector.py",
    "test_qwen3_moe_collector.py",
    "test_dinfer_collector.py",
    "test_sglang_dump.py",
]
collect_ignore = [] if find_spec("torch") else NEED_TORCH


@pytest.fixture(scope="session")
def model():
    from oled_sim.testing.models import byte_model

    return byte_model()


@pytest.fixture(scope="session")
def config(model):
    return model.config


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, model):
    """The folder of a tiny checkpoint with a byte tokenizer."""
    from oled_sim.testing.models import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), model)
