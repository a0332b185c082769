"""A point made ready: history and warm-up simulated, what is measured still to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine.batch import Batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.cut import CutSource
from oled_sim.engine.feeding import feed
from oled_sim.engine.rules import Group, Splits, split_requests
from oled_sim.engine.simulation import Simulation, Snapshot
from oled_sim.engine.source import Source
from oled_sim.policy import Policy
from oled_sim.validation.measured import About
from oled_sim.validation.predicted import cuts_of, rules_of


@dataclass(frozen=True)
class Prepared:
    """A simulation before the first measured request.

    Attributes:
        simulation: whose state changes as requests run.
        start: the state in which every repetition starts.
        counted: the measured requests.
        cut: what runs of the trace.
    """

    simulation: Simulation
    start: Snapshot
    counted: Sequence[tuple[Group, Batch]]
    cut: CutSource

    def again(self) -> Sequence[tuple[Group, Batch]]:
        """Go back to the state in which every repetition starts; return the measured requests."""
        self.simulation.restore(self.start)
        return self.counted


def prepare(about: About, source: Source, policy: Policy, costs: LaneCosts) -> Prepared:
    """Simulate history and warm-up of a point.

    They decide what is known and what is resident, not how long anything takes.

    Raises:
        UsageError: the trace lacks a signal that the policy needs.
        As :func:`oled_sim.engine.runner.simulate`.
    """
    cut = CutSource(source, cuts_of(about), about.layers)
    cut.require(policy.needs, f"policy {about.policy.label!r}")
    rules = rules_of(about)
    simulation = Simulation(
        policy, cut.geometry, costs, Budget(cache=about.cache), rules, name=about.policy.label
    )
    splits = split_requests(cut.requests, rules)
    counted = run_up(simulation, cut, splits, costs)
    simulation.forget_copies()
    return Prepared(simulation, simulation.snapshot(), counted, cut)


def run_up(
    simulation: Simulation, source: Source, splits: Splits, costs: LaneCosts
) -> list[tuple[Group, Batch]]:
    """Simulate history and warm-up; return the counted requests, which are still to run.

    Raises:
        As :func:`oled_sim.engine.runner.simulate`.
    """
    counted, in_history = [], False
    learns = simulation.policy.learns
    for group, batch in feed(source, splits, simulation.rules, costs, learns=learns):
        if in_history and group.split != "history":
            simulation.end_history()
        in_history = group.split == "history"
        if group.split == "counted":
            counted.append((group, batch))
        else:
            simulation.run_group(group, batch)
    return counted
