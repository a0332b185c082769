"""What went wrong in a run, in words: a decision, the policy's kernel, a cost that is unknown."""

from __future__ import annotations

from oled_sim.costs.lanes import BEYOND, LaneCosts
from oled_sim.engine.hooks import Hooks
from oled_sim.engine.state import (
    CPU_EXPERTS,
    CPU_TOKENS,
    EVENT,
    GPU,
    JOB_EXPERTS,
    JOB_TOKENS,
    OUTSIDE_PROFILE,
    PROBLEM,
    TOKENS,
    Course,
)
from oled_sim.engine.state_machine import StateMachine
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.errors import PolicyError, ProfileError


class Faults:
    """Words the errors of one run."""

    def __init__(self, machine: StateMachine, hooks: Hooks, costs: LaneCosts) -> None:
        self._machine, self._hooks, self._costs = machine, hooks, costs

    def check(self, stop: int) -> None:
        """Raise what is wrong, if that is why a kernel returned.

        Raises:
            PolicyError: a decision breaks the contract.
            ProfileError: the profile has no time for a job.
        """
        if stop == OUTSIDE_PROFILE:
            self._outside_profile()
        elif stop < 0:
            raise self._hooks.explain(stop, int(self._machine.work[PROBLEM]))

    def check_at(self, stop: int, batch: AnyBatch, course: Course) -> None:
        """Raise what is wrong, as :meth:`check`, where hooks do not know which event runs."""
        if stop == OUTSIDE_PROFILE or stop < 0:
            self.locate(batch, course)
            self.check(stop)

    def locate(self, batch: AnyBatch, course: Course) -> None:
        """Tell the hooks which event runs, for what they say when something is wrong."""
        last = len(course.event_pass) - 1  # the LM head is beyond it
        v = min(max(0, int(self._machine.work[EVENT])), last)
        self._hooks.pass_index = int(batch.own_pass[v])
        self._hooks.layer = int(course.event_layer[v])
        self._hooks.request = int(batch.owner[batch.rows[v]])

    def in_kernel(self, error: Exception) -> PolicyError:
        """Return what to raise for an exception in the policy's kernel."""
        return self._hooks.raised("the kernel of compiled()", error)

    def _outside_profile(self) -> None:
        """Raise the sentence that says which cost the profile lacks."""
        work, costs = self._machine.work, self._costs
        costs.gpu_experts_us(int(work[JOB_EXPERTS + GPU]), int(work[JOB_TOKENS + GPU]))
        costs.cpu_link_us(int(work[TOKENS]))
        costs.cpu_experts_us(int(work[CPU_EXPERTS]), int(work[CPU_TOKENS]))
        raise ProfileError(
            f"profile {costs.profile.name!r} has no time for a job at {self._hooks.where}: {BEYOND}"
        )
