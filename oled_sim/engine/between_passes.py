"""What a policy is asked before a pass and after it."""

from __future__ import annotations

from oled_sim.engine.hooks import Hooks
from oled_sim.engine.residency import Residency
from oled_sim.engine.state import Course
from oled_sim.engine.state_machine import StateMachine
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.engine.view import View
from oled_sim.policy import PassInfo


class BetweenPasses:
    """The hooks of one run that belong to passes rather than to events.

    Args:
        machine, view, residency, hooks: of the run.
        revises: whether scores are revised after a pass (``confidence=end``).

    Attributes:
        passes_since: decode passes since the budget was last shared.
    """

    def __init__(
        self,
        machine: StateMachine,
        view: View,
        residency: Residency,
        hooks: Hooks,
        *,
        revises: bool,
    ) -> None:
        self._machine, self._view, self._residency = machine, view, residency
        self._hooks = hooks
        self._revises = revises and hooks.overrides["revise"]
        self.passes_since = 0

    def before(self, batch: AnyBatch, p: int) -> None:
        """Before pass ``p``: a clairvoyant shares the budget, others may prefetch."""
        self._hooks.pass_index = p
        if self._hooks.overrides["foresee"]:
            self._foresee(batch, p)
        if self._hooks.overrides["begin_iteration"]:
            self._begin(batch, p)

    def _foresee(self, batch: AnyBatch, p: int) -> None:
        course, allotment = batch.course, self._residency.allotment
        ahead = (
            self._view.event(batch, v, batch.confidence)
            for v in range(course.pass_event[p], course.pass_event[p + 1])
        )
        slots = self._hooks.foresee(ahead, allotment.expert_bytes, allotment.total_bytes)
        self._residency.set_slots(slots)

    def _begin(self, batch: AnyBatch, p: int) -> None:
        hooks = self._hooks
        hooks.request, number = batch.leader(p)
        info = PassInfo(
            request=hooks.request,
            pass_index=number,
            kind=int(batch.kind[p]),
            block=int(batch.block[p]),
            embedding=self._view.embedding(batch, p),
        )
        wanted = hooks.begin_iteration(info)
        self._machine.ask_prefetches(wanted, replace=hooks.policy.replaces_queue)

    def after(self, batch: AnyBatch, p: int) -> None:
        """After pass ``p``: revised scores, what became known, new capacities."""
        hooks = self._hooks
        hooks.layer = -1
        if self._revises:
            self._revise(batch, p)
        if hooks.overrides["end_iteration"]:
            for end in batch.ends(p):
                hooks.request = end.request
                hooks.end_iteration(end)
        if batch.course.decode[p]:
            self.passes_since += 1
            period = hooks.allocation_period
            if period > 0 and self.passes_since >= period:
                self.passes_since = 0
                self._residency.allocate()

    def _revise(self, batch: AnyBatch, p: int) -> None:
        course, hooks = batch.course, self._hooks
        for v in range(course.pass_event[p], course.pass_event[p + 1]):
            hooks.layer = int(course.event_layer[v])
            event = self._view.event(batch, v, batch.confidence_after)
            scores = hooks.revise(hooks.layer, event)
            if scores is not None:
                self._machine.state.pools.score[hooks.layer] = scores
        hooks.layer = -1

    def next_say(self, course: Course, first: int) -> int:
        """Return the first pass from ``first`` on after which the policy has a say.

        At the latest the last one: what follows it is the end of the requests.
        """
        overrides, last = self._hooks.overrides, len(course.decode) - 1
        if overrides["end_iteration"] or self._revises:
            return first
        period = self._hooks.allocation_period
        if period == 0:
            return last
        left = max(1, period - self.passes_since)
        for p in range(first, last):
            left -= int(course.decode[p])
            if left == 0:
                return p
        return last

    def skip(self, course: Course, first: int, until: int) -> None:
        """Count the passes from ``first`` to before ``until``, after which nobody has a say."""
        self.passes_since += int(course.decode[first:until].sum())
