"""Time that another keeps: hardware at work in place of the simulated lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from oled_sim.engine.state import Course

if TYPE_CHECKING:
    from oled_sim.engine.batch import Batch
    from oled_sim.engine.simulation import Simulation


class Pace(Protocol):
    """Lets time pass between decisions, in place of the simulated lanes: hardware at work.

    Whoever decides, what is decided, who stays resident and what is counted remain the engine's;
    a pace keeps the entries of ``Lanes.work`` that decisions read (jobs of the copy engine, staging
    slots, phase, pass and event) and the rows of the course that hold times.
    """

    def enter(self, simulation: Simulation, batch: Batch, course: Course) -> None:
        """Start a group: ``course`` is where its times go."""
        ...

    def run_on(self) -> int:
        """Work to the next decision. Return DECIDE, ARRIVED or PASS_ENDED."""
        ...
