"""Replays on CPU threads: the code that runs on a GPU, small."""

from __future__ import annotations

import datetime
import functools

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.synthetic import affine_profile
from oled_sim.engine.source import MemoryTrace
from oled_sim.engine.state import EVENT_COUNTS
from oled_sim.errors import MeasurementError, UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.hardware.lossless import LosslessCheck
from oled_sim.hardware.machine import Sizes, build_machine
from oled_sim.hardware.replay import PointRun, slots_for
from oled_sim.policy_spec import parse_policies
from oled_sim.testing.traces import random_request
from oled_sim.validation import measured
from oled_sim.validation.decisions import compare_decisions
from oled_sim.validation.order import decide_in_order
from oled_sim.validation.predicted import Basis, policy_of, predict
from oled_sim.validation.prepared import prepare
from oled_sim.validation.repetitions import joined

LAYERS, CACHE, BLOCK = 2, 5, 4
TRUE_TO_TIME = ("staging_peak", "free_bytes")
"""Counts that say when things happened, not what was decided."""


@pytest.fixture(scope="module")
def source(cost):
    geometry = RoutingGeometry(tuple(range(1, LAYERS + 1)), cost.experts, cost.top_k)
    rng = np.random.default_rng(5)
    requests = [
        random_request(rng, geometry, request=n, passes=14, tokens=BLOCK, prompt=6)
        for n in range(3)
    ]
    return MemoryTrace(geometry, requests)


@pytest.fixture(scope="module")
def costs(cost):
    return LaneCosts(affine_profile(cost), extrapolate=True)


@pytest.fixture(scope="module")
def machine(cost, cpu):
    sizes = Sizes(LAYERS, LAYERS * cost.experts + 4, BLOCK, 32, 128)
    with build_machine(cpu, cost, sizes, workers=1, seed=0) as built:
        built.get_ready([0])
        yield built


def about(costs, spec, *, cache=CACHE, staging=4, repetitions=1, scope="layer"):
    (label, policy), profile = *parse_policies([spec]).items(), costs.profile
    return policy, measured.About(
        policy=measured.PolicyUsed(spec=spec, label=label, parameters=dict(policy.describe())),
        cache=cache,
        rules=measured.Rules(scope=scope, staging=staging, extrapolate=True),
        geometry=profile.geometry,
        trace=measured.TraceUsed(name="made up", sha256=""),
        history=(0,) if policy.learns else (),
        warmup=(measured.Cut(request=1),),
        measured=(measured.Cut(request=2, decode_passes=8),),
        repetitions=repetitions,
        profile=measured.ProfileUsed(
            name=profile.name, sha256=measured.profile_sha256(profile)
        ),
        machine=measured.Machine(identity="here", hardware=profile.hardware),
        software=profile.software,
        date=datetime.date(2026, 1, 1),
    )  # fmt: skip


def replay(machine, source, costs, cost, spec, **changes):
    policy, what = about(costs, spec, **changes)
    check = LosslessCheck(machine, cost, 32, 1, 0)
    run = PointRun(machine, source, policy, costs, what, check=check)
    return functools.reduce(joined, map(run.repeat, range(what.repetitions)), None)


@pytest.fixture(scope="module")
def replayed(machine, source, costs, cost):
    """Return a function that replays a policy once."""

    @functools.cache
    def replay_once(spec):
        cache = {"no-cache": 0, "full": cost.experts}.get(spec, CACHE)
        return replay(machine, source, costs, cost, spec, cache=cache)

    return replay_once


DEMAND_ONLY = (
    "lru", "lfu", "oled", "oled:priority", "fiddler", "hybrimoe", "ktransformers", "no-cache",
)  # fmt: skip


@pytest.mark.parametrize("spec", DEMAND_ONLY)
def test_decisions_are_the_simulators_event_by_event(replayed, source, costs, spec):
    point = replayed(spec)
    expected = predict(point.about, Basis(source, costs), policy_of(point.about))
    for name in set(EVENT_COUNTS) - set(TRUE_TO_TIME):
        assert point.events[name].to_pylist() == expected.events[name].to_pylist(), name


@pytest.mark.parametrize("spec", [*DEMAND_ONLY, "moe-infinity", "finemoe", "full"])
def test_outputs_are_those_of_full_residency(replayed, spec):
    found = replayed(spec).about.lossless
    assert found.events_checked == 2 * 9  # prefill and eight decode passes
    assert found.worst_relative_error <= found.tolerance == 1e-5


def test_one_pool_for_all_layers(machine, source, costs, cost):
    point = replay(machine, source, costs, cost, "lru", scope="global")
    expected = predict(point.about, Basis(source, costs), policy_of(point.about))
    for name in ("hits", "demand", "kept"):
        assert point.events[name].to_pylist() == expected.events[name].to_pylist()
    assert point.about.lossless.worst_relative_error <= 1e-5


def test_one_staging_slot_is_enough(machine, source, costs, cost):
    point = replay(machine, source, costs, cost, "lru", staging=1)
    assert max(point.events["staging_peak"].to_pylist()) == 1
    assert point.about.lossless.worst_relative_error <= 1e-5


def test_prefetches_arrive_and_what_they_bring_is_right(replayed):
    point = replayed("moe-infinity")
    passes = point.passes.to_pandas()
    assert passes["prefetched"].sum() > 0
    events = point.events.to_pandas()
    hits = events["hits"] + events["late"] + events["demand"] + events["cpu_misses"]
    assert (hits == events["activated"]).all()
    assert point.about.lossless.worst_relative_error <= 1e-5


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_decisions_follow_from_the_recorded_order(machine, source, costs, cost, scope):
    point = replay(machine, source, costs, cost, "moe-infinity", scope=scope, repetitions=2)
    policy = policy_of(point.about)
    free = predict(point.about, Basis(source, costs), policy)
    prepared = prepare(point.about, source, policy, costs)
    found = compare_decisions(point, free, decide_in_order(prepared, point.order, 2, "it"))
    assert point.about.arrivals_recorded
    assert found.first_out_of_order == "" and found.in_order


def test_a_damaged_order_is_refused(replayed, source, costs):
    point = replayed("moe-infinity")
    prepared = prepare(point.about, source, policy_of(point.about), costs)
    shorter, order = point.order.slice(0, len(point.order) - 1), point.order
    with pytest.raises(MeasurementError, match="ends too early"):
        decide_in_order(prepared, shorter, 1, "it")
    swapped = order.set_column(4, "expert", pa.array(np.roll(order["expert"].to_numpy(), 1)))
    with pytest.raises(MeasurementError, match="the recorded order of it"):
        decide_in_order(prepared, swapped, 1, "it")


def test_what_copies_on_demand_only_has_no_order(replayed):
    point = replayed("lru")
    assert point.order is None and not point.about.arrivals_recorded


def test_repetitions_start_from_the_same_state(machine, source, costs, cost):
    events = replay(machine, source, costs, cost, "oled", repetitions=2).events.to_pandas()
    first, second = (events[events["repetition"] == r] for r in (0, 1))
    for name in ("hits", "demand", "cpu_misses", "kept", "capacity"):
        assert first[name].tolist() == second[name].tolist()


def test_times_follow_one_another(replayed):
    point = replayed("fiddler")
    events, passes = point.events.to_pandas(), point.passes.to_pandas()
    assert (events["start_us"] <= events["gate_us"]).all()
    assert (events["gate_us"] <= events["lanes_end_us"]).all()
    assert (events["lanes_end_us"] <= events["end_us"]).all()
    inside = (events["end_us"] - events["start_us"]).groupby(events["pass_index"]).sum()
    assert (inside.to_numpy() <= passes["pass_us"].to_numpy() + 1e-6).all()
    assert (passes["decide_us"] > 0).all()
    assert events["h2d_busy_us"].where(events["demand"] > 0).dropna().gt(0).all()


def test_a_clairvoyant_is_refused(machine, source, costs):
    policy, what = about(costs, "belady")
    with pytest.raises(UsageError, match="looks into the future"):
        PointRun(machine, source, policy, costs, what)


def test_slots_are_those_of_the_cache_and_of_staging(costs):
    _, what = about(costs, "lru", cache=5, staging=3)
    assert slots_for(what, layers=4, experts=16) == 4 * 5 + 3
    assert slots_for(msgspec.structs.replace(what, cache=99), layers=4, experts=16) == 4 * 16 + 3
