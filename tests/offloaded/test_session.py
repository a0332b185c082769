"""A model that generates under a policy: same decisions as its trace's simulation, same tokens."""

import threading
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import N_CPU_MISSES, N_DEMAND, N_HITS
from oled_sim.errors import UsageError
from oled_sim.model.experts import DefaultExperts
from oled_sim.model.generate import generate
from oled_sim.offloaded.agreement import simulate_again
from oled_sim.offloaded.divergence import first_divergence
from oled_sim.offloaded.recording import record_resident
from oled_sim.offloaded.session import Session


def run(model, experts, plan, forced=None):
    """Return all requests, the figures, and the session."""
    with Session(model, experts, plan) as session:
        numbers = range(len(plan.prompts))
        done = [session.run(n, forced=forced and forced[n]) for n in numbers]
    return done, session


def residents(model, plan):
    return [record_resident(model, n, p, plan.settings) for n, p in enumerate(plan.prompts)]


def agreement(model, plan, done):
    source = MemoryTrace(
        model.config.routing_geometry,
        [live.trace for live in done],
        signals=plan.signals,
        outputs={n: len(live.recording.generation.tokens) for n, live in enumerate(done)},
    )
    return simulate_again(source, done, plan.contender, plan.costs, plan.rules)


def tokens(done):
    return [live.recording.generation.tokens for live in done]


DEMAND_ONLY = [
    ("lru", {}),
    ("lfu", {}),
    ("oled", {}),
    ("fiddler", {}),
    ("full", {}),
    ("no-cache", {}),
]


@pytest.mark.parametrize(("spec", "rules"), DEMAND_ONLY, ids=[spec for spec, _ in DEMAND_ONLY])
def test_the_simulation_of_the_trace_decides_the_same(model, experts, plan_for, spec, rules):
    cache = {"full": 16, "no-cache": 0}.get(spec, 5)
    plan = plan_for(spec, cache=cache, rules=rules)
    done, session = run(model, experts, plan)
    found = agreement(model, plan, done)
    assert found.decisions.identical, found.decisions.first_difference
    assert found.decisions.events == sum(live.trace.events for live in done) > 20
    mine, theirs = session.result().summary, found.predicted.summary
    for name in ("output_tokens", "passes", "hit_rate", "demand_bytes", "cpu_bytes"):
        assert getattr(mine, name) == getattr(theirs, name)
    assert np.isclose(mine.utilization, theirs.utilization, equal_nan=True)
    assert mine.tpot_us > 0


@pytest.mark.parametrize(
    ("rules", "decoding"),
    [
        ({"scope": "global"}, {}),
        ({"cold": True}, {}),
        ({"warmup": 1}, {}),
        ({"confidence": "end"}, {}),
        ({}, {"rule": "2.1", "editing_threshold": 0.05, "max_post_steps": 2}),
        ({}, {"temperature": 1.0, "seed": 3}),
        ({"staging": 1}, {}),
    ],
    ids=["global", "cold", "warmup", "end", "rule 2.1", "sampled", "one staging slot"],
)
def test_it_does_so_under_every_rule(model, experts, plan_for, rules, decoding):
    plan = plan_for("oled", rules=rules, **decoding)
    done, session = run(model, experts, plan)
    found = agreement(model, plan, done)
    assert found.decisions.identical, found.decisions.first_difference
    assert len(session.result().requests) == len(done) - rules.get("warmup", 0)


def test_the_cpu_takes_its_part(model, experts, plan_for):
    plan = plan_for("oled:dispatch=load", cache=3)
    done, session = run(model, experts, plan)
    counts = np.concatenate([live.record.course.counts for live in done])
    assert counts[:, N_CPU_MISSES].sum() > 0 and counts[:, N_DEMAND].sum() > 0
    assert counts[:, N_HITS].sum() > 0
    assert session.copies == counts[:, N_DEMAND].sum()
    assert session.result().summary.cpu_busy_us > 0


@pytest.mark.parametrize("spec", ["moe-infinity", "finemoe"])
def test_prefetching_policies_stay_near_their_simulation(model, experts, plan_for, spec):
    plan = plan_for(spec, cache=6)
    done, _ = run(model, experts, plan)
    found = agreement(model, plan, done).decisions
    prefetched = sum(live.record.course.pass_counts[:, 1].sum() for live in done)
    assert prefetched > 0 and found.prefetching
    # Copies of this model take no time worth mentioning, those that are simulated do.
    assert abs(found.hits_error) < 0.5


def test_tokens_are_those_of_the_resident_model(model, experts, plan_for):
    plan = plan_for("oled", prompts=("What is 3 + 4?", "", "abc"))
    plain = [
        generate(model, [prompt], plan.settings, streams=[n])[0].tokens
        for n, prompt in enumerate(plan.prompts)
    ]
    resident = residents(model, plan)
    assert [r.generation.tokens for r in resident] == plain
    forced, _ = run(model, experts, plan, forced=resident)
    assert tokens(forced) == plain
    free, _ = run(model, experts, plan)
    for mine, live in zip(resident, free, strict=True):
        same = mine.generation.tokens == live.recording.generation.tokens
        found = first_divergence(mine, live.recording, model.config.moe_layers, plan.settings)
        assert same == (found is None)


@contextmanager
def perturbed(tensor, scale=1.0, noise=0.0):
    """Change a weight of the model for a while."""
    before = tensor.clone()
    generator = torch.Generator().manual_seed(0)
    tensor.copy_(scale * before + noise * torch.randn(before.shape, generator=generator))
    try:
        yield
    finally:
        tensor.copy_(before)


def bias_of(model, layer):
    return model.sparse_blocks()[layer].gate.expert_bias


def test_a_forced_run_keeps_routes_and_acceptances_of_another_model(model, experts, plan_for):
    plan = plan_for("lru", threshold=0.3)
    resident = residents(model, plan)
    with perturbed(bias_of(model, 1), noise=1.0), perturbed(model.lm_head.weight, scale=3.0):
        done, _ = run(model, experts, plan, forced=resident)
        other = residents(model, plan)
    differ = 0
    for mine, live, free in zip(resident, done, other, strict=True):
        for a, b in zip(mine.passes, live.recording.passes, strict=True):
            assert np.array_equal(np.stack(a.routes), np.stack(b.routes))
            assert np.array_equal(a.record.accepted, b.record.accepted)
        differ += not np.array_equal(np.sort(mine.passes[0].routes), np.sort(free.passes[0].routes))
    assert differ  # on its own it would have chosen otherwise


def test_a_perturbed_router_is_named(model, experts, plan_for):
    plan = plan_for("lru")
    resident = residents(model, plan)
    layer = model.config.moe_layers[1]
    with perturbed(bias_of(model, layer), noise=0.05):
        done, _ = run(model, experts, plan)
    layers = model.config.moe_layers
    found = first_divergence(resident[0], done[0].recording, layers, plan.settings)
    assert found is not None
    assert (found.cause, found.layer, found.pass_index) == ("router", layer, 0)
    assert 0 <= found.margin < 0.5 and "became" in found.what


@pytest.mark.parametrize(
    ("threshold", "scale", "noise", "cause"),
    [(0.3, 3.0, 0.0, "acceptance"), (0.0, 1.0, 0.2, "token")],
)
def test_a_perturbed_head_is_named(model, experts, plan_for, threshold, scale, noise, cause):
    plan = plan_for("lru", threshold=threshold)
    resident = residents(model, plan)
    with perturbed(model.lm_head.weight, scale, noise):
        done, _ = run(model, experts, plan)
    layers = model.config.moe_layers
    found = first_divergence(resident[0], done[0].recording, layers, plan.settings)
    assert found is not None
    assert (found.cause, found.layer, found.pass_index) == (cause, None, 0)
    assert found.margin >= 0


def test_everything_is_as_before_when_a_run_breaks(model, experts, plan_for):
    plan = plan_for("oled")
    threads = set(threading.enumerate())

    def stop(record):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), Session(model, experts, plan) as session:
        session.run(0, on_pass=stop)
    assert set(threading.enumerate()) == threads
    for block in model.sparse_blocks().values():
        assert isinstance(block.executor, DefaultExperts)
        assert not block.gate._forward_hooks
    with pytest.raises(ZeroDivisionError), Session(model, experts, plan) as session:
        session.machine.copies.submit = lambda *_: 1 // 0
        session.run(0)
    assert set(threading.enumerate()) == threads
    assert not any(block.gate._forward_hooks for block in model.sparse_blocks().values())


def test_a_policy_that_looks_ahead_is_refused(plan_for):
    with pytest.raises(UsageError, match="looks into the future"):
        plan_for("belady")


def test_a_batch_is_refused(plan_for):
    with pytest.raises(UsageError, match="one request at a time"):
        plan_for("lru", rules={"batch": 2})


def test_decisions_are_timed_apart(model, experts, plan_for):
    plan = plan_for("lru")
    done, _ = run(model, experts, plan)
    for live in done:
        assert len(live.decide_us) == live.trace.passes and (live.decide_us > 0).all()
        times = live.record.course.pass_times
        assert np.allclose(live.trace.time_us, times[:, 1] - times[:, 0])
