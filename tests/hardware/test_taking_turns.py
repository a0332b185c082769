"""Points of one replay take turns: a repetition of each, then the next."""

from __future__ import annotations

import numpy as np
import pytest

from oled_sim.contenders import contenders
from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.synthetic import Affine, affine_profile
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Rules
from oled_sim.geometry import RoutingGeometry
from oled_sim.hardware.replay_job import Job, run_tasks, tasks_of
from oled_sim.policy_spec import parse_policies
from oled_sim.testing.traces import random_request, write_trace
from oled_sim.trace import open_trace


@pytest.fixture
def job(cost, cpu, tmp_path):
    geometry = RoutingGeometry((1, 2), cost.experts, cost.top_k)
    rng = np.random.default_rng(3)
    requests = [
        random_request(rng, geometry, request=n, passes=4, tokens=4, prompt=6) for n in range(2)
    ]
    write_trace(tmp_path / "trace", requests, geometry)
    return Job(
        traces={"trace": open_trace(tmp_path / "trace")},
        contenders=contenders(parse_policies(["lru", "oled"]), [Budget(cache=5)], geometry.experts),
        costs=LaneCosts(affine_profile(cost, Affine(workers=1)), extrapolate=True),
        rules=Rules(),
        requests=1,
        passes=2,
        layers=None,
        repetitions=2,
        place=cpu,
        workers=1,
        seed=0,
        checkpoint=None,
        verify_every=1,
        patience_s=0.0,
        command="",
    )


def run(job, tasks):
    """Return policy and repetitions of every point in the order in which they come."""
    return [(p.about.policy.label, p.about.repetitions, p) for p in run_tasks(job, tasks)]


def test_every_point_runs_once_before_any_runs_again(job):
    found = run(job, tasks_of(job))
    assert [what for *what, _ in found] == [["lru", 1], ["oled", 1], ["lru", 2], ["oled", 2]]
    first, second = found[0][2], found[2][2]
    assert second.passes["repetition"].to_pylist() == [0, 0, 0, 1, 1, 1]
    assert second.events.slice(0, len(first.events)).equals(first.events)
    assert second.about.lossless.events_checked == 2 * first.about.lossless.events_checked == 12


def test_a_point_goes_on_where_it_stopped(job):
    lru, oled = tasks_of(job)
    before = next(iter(run_tasks(job, [lru])))
    found = run(job, [lru._replace(done=before), oled])
    assert [what for *what, _ in found] == [["oled", 1], ["lru", 2], ["oled", 2]]
    point = found[1][2]
    assert point.events.slice(0, len(before.events)).equals(before.events)
    hits = point.events["hits"].to_numpy().reshape(2, -1)
    assert np.array_equal(hits[0], hits[1])
