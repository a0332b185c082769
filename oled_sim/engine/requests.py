"""What a policy hears of requests: when one begins, and what came of it when it ends."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.batch import Batch
from oled_sim.engine.hooks import Hooks
from oled_sim.engine.members import Member
from oled_sim.engine.rules import Group
from oled_sim.engine.state import N_ACTIVATED, N_HITS, Course
from oled_sim.engine.state_machine import StateMachine
from oled_sim.policy import RequestInfo, RequestSummary
from oled_sim.trace.schema import Kind


class Requests:
    """The requests that have begun and not ended, with the sums that their end tells."""

    def __init__(self, machine: StateMachine, hooks: Hooks) -> None:
        self._machine, self._hooks = machine, hooks
        self._decoded: dict[int, NDArray[np.int64]] = {}

    def forget(self) -> None:
        """Forget all that have begun."""
        self._decoded = {}

    def begin(self, group: Group) -> None:
        """Tell of the requests that begin with a group, and take the prefetches asked for."""
        hooks, counted, history = self._hooks, group.split == "counted", group.split == "history"
        hooks.pass_index = hooks.layer = -1
        for request in group.begins:
            self._decoded[request] = np.zeros(3, np.int64)
            hooks.request = request
            answer = hooks.call("begin_request", RequestInfo(request, counted, history))
            wanted = hooks.prefetches("begin_request", answer)
            self._machine.ask_prefetches(wanted, replace=hooks.policy.replaces_queue)

    def end(self, group: Group, batch: Batch, course: Course) -> None:
        """Add up what a group did, and tell of the requests that end with it."""
        hooks = self._hooks
        hooks.pass_index = hooks.layer = -1
        for member in batch.members:
            decoded = self._decoded[member.whole.request]
            decoded += [member.trace.passes, *_hits_and_activations(member, course)]
        for request in group.ends:
            hooks.request = request
            summary = RequestSummary(request, *self._decoded.pop(request).tolist())
            hooks.call("end_request", summary)


def _hits_and_activations(member: Member, course: Course) -> tuple[int, int]:
    """Return Σ |R ∩ A| and Σ |A| of the batch's events in the decode passes of a request."""
    decode = np.zeros(len(course.decode), np.bool_)
    decode[member.at[member.trace.kind != Kind.PREFILL]] = True
    mine = decode[course.event_pass]
    return int(course.counts[mine, N_HITS].sum()), int(course.counts[mine, N_ACTIVATED].sum())
