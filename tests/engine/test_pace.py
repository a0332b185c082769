"""A run whose time is another's: if that is the simulated lanes again, nothing changes."""

import numpy as np
import pytest

from oled_sim.engine import events
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request

GEOMETRY = RoutingGeometry((1, 2, 3), 12, 3)
COSTS = costs_by_hand(slowdown=1.37, gpu_per_token_us=0.3, cpu_per_token_us=7.1, h2d_gb_s=17.3)
POLICIES = ["lru", "lfu", "oled", "oled:priority+adapt,allocate_every=2", "fiddler", "moe-infinity"]


class SameLanes:
    """Lets time pass on the simulated lanes."""

    def enter(self, simulation, batch, course):
        self.simulation, self.course = simulation, course

    def run_on(self):
        simulation = self.simulation
        nothing = np.empty(0, np.int64), np.empty(0)
        return events.proceed(
            simulation.state, self.course, simulation.costs.tables, events.RUN_ON, *nothing
        )


def run(spec, *, paced, scope="layer"):
    rng = np.random.default_rng(3)
    traces = [random_request(rng, GEOMETRY, request=n, passes=12) for n in range(2)]
    policy = parse_policy(spec)
    simulation = Simulation(policy, GEOMETRY, COSTS, Budget(cache=4), Rules(scope=scope, staging=3))
    if paced:
        simulation.pace = SameLanes()
    course = None
    for n, trace in enumerate(traces):
        group = Group("counted", (n,))
        course = simulation.run_group(group, make_batch([trace], GEOMETRY, COSTS)).course
    measured = course.counts, course.times, course.pass_counts, course.pass_times
    return [array.tobytes() for array in (*measured, *simulation.state.pools)]


@pytest.mark.parametrize("spec", POLICIES)
def test_same_bytes(spec):
    assert run(spec, paced=True) == run(spec, paced=False)


def test_same_bytes_with_one_pool():
    assert run("lru", paced=True, scope="global") == run("lru", paced=False, scope="global")


@pytest.mark.parametrize("spec", POLICIES)
def test_a_snapshot_leads_back(spec):
    rng = np.random.default_rng(4)
    before, after = (random_request(rng, GEOMETRY, request=n, passes=10) for n in range(2))
    simulation = Simulation(parse_policy(spec), GEOMETRY, COSTS, Budget(cache=4), Rules(staging=3))
    simulation.run_group(Group("counted", (0,)), make_batch([before], GEOMETRY, COSTS))
    moment = simulation.snapshot()
    found = []
    for _ in range(3):
        simulation.restore(moment)
        batch = make_batch([after], GEOMETRY, COSTS)
        record = simulation.run_group(Group("counted", (1,)), batch)
        found.append([record.course.counts.tobytes(), record.course.times.tobytes()])
    assert found[0] == found[1] == found[2]
