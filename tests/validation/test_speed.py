"""What a report makes of a machine that is faster or slower than its profile."""

import msgspec
import pytest
from measured_points import basis_of, simulated_point

from oled_sim.policy_spec import parse_policy
from oled_sim.validation.measured import Speed, read_point, write_point
from oled_sim.validation.report import compare_all, point_row
from oled_sim.validation.speed import host_speed
from oled_sim.validation.text import markdown


def with_speeds(point, costs, *factors, launch=1.0):
    """Return a point whose host took ``factors`` as long as in the profile, by repetition."""
    then_us, synchronize_us = costs.cpu_experts_us(4, 8), costs.profile.synchronize.median
    speeds = tuple(
        Speed(
            cpu_experts=4, cpu_tokens_per_expert=2, cpu_us=f * then_us,
            synchronize_us=launch * synchronize_us,
        )
        for f in factors
    )  # fmt: skip
    return point._replace(about=msgspec.structs.replace(point.about, speeds=speeds))


@pytest.fixture
def point(trace):
    return simulated_point(trace, "lru", 4, factors=(1.0, 1.0, 1.0))


@pytest.fixture
def costs(trace):
    return basis_of(trace, parse_policy("lru")).costs


@pytest.mark.parametrize(
    ("factors", "state"),
    [
        ((1.0, 1.04, 0.96), "CPU as profiled"),
        ((1.2, 1.2, 1.1), "CPU slower"),
        ((0.7, 0.8, 1.0), "CPU faster"),
        ((1.0, 1.0, 1.3), "CPU changing"),
    ],
)
def test_state_goes_by_the_profiled_job(point, costs, factors, state):
    assert host_speed(with_speeds(point, costs, *factors).about, costs).state == state


def test_figures_are_relative_to_the_profile(point, costs):
    found = host_speed(with_speeds(point, costs, 1.5, 1.25, 1.0, launch=0.5).about, costs)
    assert found.cpu_job == pytest.approx(0.25) and found.worst_cpu_job == pytest.approx(0.5)
    assert found.launch == pytest.approx(-0.5)


def test_a_report_tells_steady_points_from_others(trace, point, costs):
    other = simulated_point(trace, "lfu", 4, factors=(1.3,))
    points = [with_speeds(point, costs, 1.0, 1.0, 1.0), with_speeds(other, costs, 1.3)]
    report = compare_all(points, lambda _, policy: basis_of(trace, policy))
    assert report.by_state["CPU as profiled"].worst_abs == pytest.approx(0, abs=1e-9)
    assert report.by_state["CPU slower"].worst == "lfu-c4-" + point.about.trace_name + "-r1"
    rows = {r["policy"]: r for r in map(point_row, report.comparisons)}
    assert rows["lfu"]["cpu_job_drift"] == pytest.approx(0.3)
    assert "Errors by state of the machine" in markdown(report)


def test_older_points_say_nothing(trace, point):
    report = compare_all([point], lambda _, policy: basis_of(trace, policy))
    assert set(report.by_state) == {"not measured"}
    assert "state of the machine" not in markdown(report)


def test_speeds_survive_the_disk(tmp_path, point, costs):
    known = with_speeds(point, costs, 1.0, 1.1, 1.2)
    write_point(tmp_path / "p", known)
    assert read_point(tmp_path / "p").about.speeds == known.about.speeds
