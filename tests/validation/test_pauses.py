"""Runs whose copies go on while a policy decides."""

import msgspec
import numpy as np
import pytest
from measured_points import GEOMETRY, basis_of, edited, simulated_point

from oled_sim.policy_spec import parse_policy
from oled_sim.validation.measured import Cut, read_point, write_point
from oled_sim.validation.pauses import pause_us_of, predict_point
from oled_sim.validation.predicted import predict

LAYERS = len(GEOMETRY.layers)
MEASURED = (Cut(request=1, decode_passes=6), Cut(request=2, decode_passes=6))


def paused(trace, spec, pause_us):
    """Return a point whose gates all kept the lanes waiting for so long, and its basis."""
    point = simulated_point(trace, spec, 4, measured=MEASURED)
    passes = edited(point.passes, paused_us=lambda old: np.full_like(old, LAYERS * pause_us))
    about = msgspec.structs.replace(point.about, arrivals_recorded=True)
    policy = parse_policy(spec)
    return point._replace(about=about, passes=passes), basis_of(trace, policy), policy


def test_a_pause_is_the_mean_over_events(trace):
    point, *_ = paused(trace, "moe-infinity", 70.0)
    assert pause_us_of(point) == pytest.approx(70.0)


def test_what_copies_on_demand_has_none(trace):
    point, *_ = paused(trace, "lru", 70.0)
    about = msgspec.structs.replace(point.about, arrivals_recorded=False)
    assert pause_us_of(point._replace(about=about)) == 0.0


def test_points_of_before_it_was_measured_have_none(tmp_path, trace):
    point, *_ = paused(trace, "moe-infinity", 70.0)
    old = edited(point.passes, paused_us=lambda old: np.full_like(old, np.nan))
    about = msgspec.structs.replace(point.about, arrivals_recorded=False)
    write_point(tmp_path / "p", point._replace(passes=old, about=about))
    assert np.isnan(read_point(tmp_path / "p").passes["paused_us"].to_numpy()).all()
    assert pause_us_of(point._replace(passes=old)) == 0.0


@pytest.mark.parametrize("spec", ["lru", "moe-infinity"])
def test_no_time_to_speak_of_changes_nothing(trace, spec):
    point, basis, policy = paused(trace, spec, 1e-9)
    found, expected = predict_point(point, basis, policy), predict(point.about, basis, policy)
    assert found.tokens == expected.tokens and found.prefetched
    for name in ("hits", "demand", "late", "kept", "reused"):
        assert found.events[name].equals(expected.events[name])
    for name in ("pass_us", "gpu_busy_us", "h2d_critical_us"):
        assert np.allclose(found.passes[name], expected.passes[name], atol=1e-3)


def test_what_copies_on_demand_takes_as_long_as_without(trace):
    point, basis, policy = paused(trace, "lru", 500.0)
    found, expected = predict_point(point, basis, policy), predict(point.about, basis, policy)
    for name in ("pass_us", "gpu_busy_us", "gpu_critical_us", "h2d_busy_us", "copied_bytes"):
        assert np.allclose(found.passes[name], expected.passes[name])


def test_prefetches_go_on_meanwhile(trace):
    point, basis, policy = paused(trace, "moe-infinity", 500.0)
    found, expected = predict_point(point, basis, policy), predict(point.about, basis, policy)
    prefetched = [p.passes["prefetched"].to_numpy().sum() for p in (found, expected)]
    assert prefetched[0] > prefetched[1]
    late = [p.events["late"].to_numpy().sum() for p in (found, expected)]
    assert late[0] <= late[1]
