"""Every built-in policy keeps the contract, in every variant and mode worth naming."""

import pytest

from oled_sim import plugins
from oled_sim.policy_spec import load_policy, parse_policy
from oled_sim.testing.contract import PolicyContract

CAUSAL = (
    "lru",
    "lru:dispatch=load",
    "lfu",
    "lfu:count=tokens,reset=request",
    "oled",
    "oled:priority",
    "oled:priority+adapt",
    "oled:dispatch=load,allocate=uniform",
    "oled:psi=square,stale=last_priority,allocate_every=1,smoothing=1",
    "oled:stale=id,swaps=0,mean_tokens=2",
    "oled:exact",
    "ktransformers",
    "ktransformers:placement=frequency,gpu_prefill_tokens=3",
    "ktransformers:placement=random,gpu_prefill_tokens=1,dynamic=true",
    "fiddler",
    "fiddler:cost=max,cpu_us=40,gpu_us=150",
    "hybrimoe",
    "hybrimoe:released,admit=scored,initial=none",
    "hybrimoe:prefetch=2,prefill=hybrid,top=3,a=1",
    "hybrimoe:block=gpu",
    "least-stale",
    "least-stale:stale=age",
    "least-stale:order=lru",
    "finemoe",
    "finemoe:aggregate=token,capacity=5,select=paper",
    "finemoe:aggregate=union,capacity=30",
    "finemoe:protect=list,evict=truncated,store=offline",
    "finemoe:distance=1,least=3,most=4,capacity=1",
    "moe-infinity",
    "moe-infinity:request",
    "moe-infinity:predict=prompt,match=all,eam=block",
    "moe-infinity:protect=list,evict=prefetch-bug,match=observed",
    "moe-infinity:evict=paper,most=5,unseen=sum,capacity=1",
    "moe-infinity:evict=priority,protect=list,most=3,count=event",
)

REFERENCES = ("full", "no-cache")
"""Tested in test_references.py: each means something with one budget only."""


def params(specs):
    """Return specifications to test: the policies and their variants quickly, the others too."""
    return [pytest.param(s, marks=[pytest.mark.slow] if "=" in s else []) for s in specs]


@pytest.mark.parametrize("spec", params(CAUSAL))
class TestCausal(PolicyContract):
    @pytest.fixture(autouse=True)
    def _spec(self, spec):
        self.spec = spec

    def make(self):
        return parse_policy(self.spec)


CLAIRVOYANT = ("ideal", "ideal:split=total", "belady", "belady:dispatch=load")


@pytest.mark.parametrize("spec", params(CLAIRVOYANT))
class TestClairvoyant(PolicyContract):
    causal = False

    @pytest.fixture(autouse=True)
    def _spec(self, spec):
        self.spec = spec

    def make(self):
        return parse_policy(self.spec)


def test_every_registered_policy_is_tested_here():
    tested = {spec.split(":")[0] for spec in CAUSAL + CLAIRVOYANT} | {*REFERENCES}
    assert set(plugins.names(plugins.POLICIES)) <= tested
    for name in tested:
        assert load_policy(name)
