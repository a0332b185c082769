"""Kernels are compiled before the tests: a command that has to compile says so on stderr."""

import numpy as np
import pytest

from oled_sim.engine.events import proceed
from oled_sim.engine.jit import is_compiled
from oled_sim.engine.runner import simulate
from oled_sim.geometry import RoutingGeometry
from oled_sim.testing.traces import random_request, write_trace


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels(tmp_path_factory):
    from oled_sim.cli.simulating import costs_for, source_for
    from oled_sim.policy_spec import parse_policy

    if is_compiled(proceed):
        return
    geometry = RoutingGeometry((1, 2), 8, 2)
    requests = [random_request(np.random.default_rng(0), geometry, passes=3)]
    trace = write_trace(tmp_path_factory.mktemp("kernels") / "t", requests, geometry)
    policy = parse_policy("ideal")  # asked in Python, so that the engine's own loop is compiled
    simulate(source_for(trace, [policy]), policy, costs_for(trace, None, None, False), 2)
