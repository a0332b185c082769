"""Grids of figures: what they promise about sizes, traces and points in common."""

import pytest

from oled_sim.experiment import RunPoint, SyntheticTrace, experiment_names, load_experiment
from oled_sim.policy_spec import parse_policy
from oled_sim.trace import bundled_traces

NAMES = experiment_names()


def grid(name, size):
    return load_experiment(name).grid(size)


@pytest.mark.parametrize("name", NAMES)
def test_quick_takes_bundled_traces_or_short_ones(name):
    for trace in {p.trace for p in grid(name, "quick")} - set(bundled_traces()):
        assert isinstance(trace, SyntheticTrace)
        assert trace.requests * trace.output_tokens <= 1000


@pytest.mark.parametrize("name", NAMES)
def test_the_name_is_the_registered_one(name):
    assert load_experiment(name).name == name


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", ["quick", "full"])
def test_every_policy_is_known(name, size):
    for spec in {p.policy for p in grid(name, size) if isinstance(p, RunPoint)}:
        parse_policy(spec)


def test_systems_are_measured_once_for_three_figures():
    systems = set(grid("fig12", "full"))
    assert set(grid("fig05", "full")) <= systems
    assert {p for p in grid("fig06", "full") if p.policy != "full"} <= systems


def test_full_covers_both_models_under_both_machines():
    points = grid("fig12", "full")
    synthetic = {(p.trace.model, p.profile) for p in points if isinstance(p.trace, SyntheticTrace)}
    assert synthetic == {
        (model, f"{machine}-{model}")
        for model in ("llada2.0-mini", "llada2.0-flash")
        for machine in ("h200", "paper-testbed")
    }
