"""A tiny model with its experts in host memory. These tests need torch."""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = [] if find_spec("torch") else [f.name for f in Path(__file__).parent.glob("*.py")]

PROMPTS = ("What is 3 + 4?", "Count to ten, slowly: ", "")


@pytest.fixture(scope="session")
def model():
    """Its embeddings are small against its layers, so that the layers' experts decide."""
    from oled_sim.testing.models import byte_model

    return byte_model()


@pytest.fixture(scope="session")
def place():
    import torch

    from oled_sim.hardware.place import Place

    return Place(torch.device("cpu"), torch.float32)


@pytest.fixture(scope="session")
def experts(model, place):
    from oled_sim.hardware.host_experts import HostExperts

    with HostExperts.from_model(model, place) as experts:
        yield experts


@pytest.fixture(scope="session")
def costs():
    from oled_sim.costs.lanes import load_costs
    from oled_sim.geometry import find_geometry

    return load_costs(find_geometry("llada2.0-mini"))


@pytest.fixture(scope="session")
def plan_for(costs):
    """Return a function that makes a plan: a policy, a cache, and what differs from usual."""
    from oled_sim.engine.budget import Budget
    from oled_sim.engine.rules import Rules
    from oled_sim.engine.runner import Contender
    from oled_sim.model.decoding import DecodeSettings
    from oled_sim.offloaded.plan import Plan
    from oled_sim.policy_spec import parse_policies
    from oled_sim.testing.models import byte_tokenizer

    tokenizer = byte_tokenizer()

    def make(spec, cache=5, prompts=PROMPTS[:2], rules=None, **decoding):
        ((label, policy),) = parse_policies([spec]).items()
        rules = {"history": 0, "warmup": 0, "staging": 4} | (rules or {})
        decoding = {"block_length": 8, "max_new_tokens": 16, "threshold": 0.05} | decoding
        return Plan(
            contender=Contender(label, policy, Budget(cache=cache)),
            costs=costs,
            rules=Rules(**rules),
            settings=DecodeSettings(**decoding),
            prompts=[tokenizer.encode(text).ids for text in prompts],
            workers=1,
        )

    return make


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, model):
    from oled_sim.testing.models import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), model)
