"""A run of a policy that learns: history first, then the run, on paper."""

import numpy as np

from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import Simulation
from oled_sim.testing.by_hand import costs_by_hand


class Learned:
    """A simulation after its history; without any, a simulation before its first request."""

    def __init__(self, policy, geometry, history, cache, *, costs=None, **rules):
        self.costs = costs or costs_by_hand()
        self.geometry = geometry
        self.simulation = Simulation(
            policy, geometry, self.costs, Budget(cache=cache), Rules(**rules)
        )
        for trace in history:
            self.run(trace, "history")
        if history:
            self.simulation.end_history()

    def run(self, trace, split="counted"):
        batch = make_batch([trace], self.geometry, self.costs)
        return self.simulation.run_group(Group(split, (trace.request,)), batch)

    def residents(self):
        """Residents of every layer, ascending."""
        return [np.flatnonzero(row).tolist() for row in self.simulation.state.pools.resident]
