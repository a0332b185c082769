"""The four failure patterns, counted by hand and against the engine's own figures."""

from dataclasses import replace

import numpy as np
import pytest

from oled_sim.engine.runner import simulate
from oled_sim.errors import UsageError
from oled_sim.experiment import Inputs, RunPoint
from oled_sim.experiments._failures import Failures, SystemPoint
from oled_sim.policy import Event, Future, Lane
from oled_sim.policy_spec import parse_policy
from oled_sim.run_inputs import costs_for, source_for
from oled_sim.trace import Kind, open_trace

POINT = SystemPoint("nano-gsm8k", policy="lru", cache=16, requests=4)


def event(experts, resident, *, request=0, kind=Kind.DENOISE, layer=0, n=6):
    mask = np.zeros(n, bool)
    mask[list(resident)] = True
    ids = np.array(experts)
    return Event(
        request=request, pass_index=0, kind=kind, block=0, layer=layer, experts=ids,
        tokens=np.ones(len(ids), np.int64), gate_mass=np.ones(len(ids)), routes=ids[None],
        gates=None, confidence=None, position=np.zeros(1, np.int32), state=None, full_gate=None,
        embedding=None, resident=mask, capacity=3, last_use=np.full(n, -1),
        owner=np.zeros(1, np.int32), future=Future(),
    )  # fmt: skip


def test_by_hand():
    """Layer 0: {0, 1} resident, 2 copied, 3 on the CPU; then {0, 2} resident and 1, 2, 3 needed."""
    found = Failures()
    found.note(event([0, 2, 3], {0, 1}), np.array([Lane.GPU, Lane.TRANSFER, Lane.CPU]))
    found.note(event([5], {5}, layer=1), np.array([Lane.GPU]))  # another layer's pool
    found.note(event([1, 2, 3], {0, 2}), np.array([Lane.TRANSFER, Lane.GPU, Lane.CPU]))
    counts = found.columns(0)
    assert counts["gates"] == 3
    assert counts["residents"] == 2 + 1 + 2
    assert counts["idle_residents"] == 1 + 0 + 1  # expert 1, then expert 0
    assert counts["next_misses"] == 2  # 1 and 3
    assert (counts["evicted"], counts["evicted_reused"]) == (1, 1)  # 1 was resident and is needed
    assert (counts["cpu_followed"], counts["cpu_reused"], counts["cpu_repeated"]) == (1, 1, 1)
    assert (counts["transfers_followed"], counts["transfers_reused"]) == (1, 1)  # expert 2


def test_another_request_is_no_next_event():
    found = Failures()
    found.note(event([0], set()), np.array([Lane.CPU]))
    found.note(event([0], set(), request=1), np.array([Lane.CPU]))
    assert found.columns(0)["cpu_followed"] == found.columns(1)["cpu_followed"] == 0


def test_prefill_is_not_counted():
    found = Failures()
    found.note(event([0], set(), kind=Kind.PREFILL), np.array([Lane.CPU]))
    found.note(event([0], set()), np.array([Lane.CPU]))
    assert found.columns(0)["gates"] == 1
    assert found.columns(0)["cpu_followed"] == 0


@pytest.mark.parametrize("policy", ["lru", "oled", "ktransformers", "ideal"])
def test_decisions_and_figures_stay_the_same(policy, tmp_path):
    inputs = Inputs(tmp_path)
    plain = RunPoint("nano-gsm8k", policy=policy, cache=16, requests=4).measure(inputs)
    watched = replace(POINT, policy=policy).measure(inputs)
    assert len(watched) == len(plain) > 0
    for with_counts, row in zip(watched, plain, strict=True):
        assert {name: with_counts[name] for name in row} == row


@pytest.mark.parametrize("policy", ["lru", "oled", "finemoe"])
def test_counts_agree_with_the_engine(policy, tmp_path):
    for row in replace(POINT, policy=policy).measure(Inputs(tmp_path)):
        layers = row["layers"]
        assert row["gates"] == row["passes"] * layers
        assert row["residents"] - row["idle_residents"] == row["hits"]
        assert row["evicted_reused"] <= min(row["evicted"], row["next_misses"])
        assert row["cpu_repeated"] <= row["cpu_reused"] <= row["cpu_followed"] <= row["cpu_experts"]
        assert row["reused"] <= row["transfers_reused"]
        assert 0 <= row["late_h2d_critical_us"] <= row["h2d_critical_us"]


def test_without_a_cache_nothing_is_evicted_unused(tmp_path):
    """Without slots every miss is copied and dropped: all reused ones were evicted just before."""
    trace, policy, found = open_trace("nano-gsm8k"), parse_policy("lru"), Failures()
    costs = costs_for(trace, None, None, False)
    watched = found.watched(policy)
    result = simulate(source_for(trace, [watched]), watched, costs, 0, POINT.rules)
    for request in result.requests:
        counts = found.columns(request.request)
        assert counts["residents"] == 0
        assert counts["evicted"] == counts["transfers_followed"] == request.followed
        assert counts["evicted_reused"] == counts["transfers_reused"]


def test_one_request_at_a_time():
    with pytest.raises(UsageError, match="one request at a time"):
        replace(POINT, batch=2)
