"""Compiled and interpreted kernels give the same bytes."""

import json
import os
import subprocess
import sys

import pytest

PROGRAM = '''
import hashlib, json
import numpy as np
from numba import config
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Policy, Prefetch
from oled_sim.policy_spec import parse_policy
from oled_sim.testing.by_hand import costs_by_hand
from oled_sim.testing.traces import random_request

class Prefetching(Policy):
    """Asks for the next layer's same experts."""
    def prefetch(self, event):
        return [Prefetch((event.layer + 1) % 3, int(e), float(e % 3)) for e in event.experts[:3]]

geometry = RoutingGeometry((1, 2, 3), 12, 3)
costs = costs_by_hand(slowdown=1.37, gpu_per_token_us=0.3, cpu_per_token_us=7.1, h2d_gb_s=17.3)
found = {}
for rules in (
    Rules(batch=2, staging=3), Rules(batch=2, scope="global", confidence="end"), Rules(staging=3),
):
    rng = np.random.default_rng(5)
    traces = [random_request(rng, geometry, request=i, passes=14, tokens=4) for i in range(2)]
    parts = [range(i, i + rules.batch) for i in range(0, 2, rules.batch)]
    batches = [make_batch([traces[i] for i in p], geometry, costs, rules.confidence) for p in parts]
    specs = ("lru", "lru:dispatch=load", "lfu", "oled", "oled:exact", "ideal", "ideal:total",
             "belady", "fiddler", "hybrimoe", "finemoe", "moe-infinity")
    policies = {s: parse_policy(s) for s in specs}
    for name, policy in (policies | {"prefetching": Prefetching()}).items():
        for log in (True, False):  # gate by gate, and whole batches in the kernel of a policy
            simulation = Simulation(policy, geometry, costs, Budget(cache=4), rules, keep_log=log)
            digest = hashlib.sha256()
            for part, batch in zip(parts, batches):
                record = simulation.run_group(Group("counted", tuple(part)), batch)
                for array in (*record.course, *simulation.state.pools[:6], *((record.log,) * log)):
                    digest.update(np.ascontiguousarray(array).tobytes())
            found[f"{rules.scope} {rules.batch} {name} {log}"] = digest.hexdigest()
print(json.dumps({"interpreted": bool(config.DISABLE_JIT), "found": found}))
'''


def run(disable):
    environment = os.environ | {"NUMBA_DISABLE_JIT": disable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_compiled_and_interpreted_runs_give_the_same_bytes():
    compiled, interpreted = run("0"), run("1")
    assert (compiled["interpreted"], interpreted["interpreted"]) == (False, True)
    assert len(set(compiled["found"].values())) > 6  # policies differ, so the digests say something
    assert compiled["found"] == interpreted["found"]
