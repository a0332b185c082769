"""One policy with one budget over groups of requests: who does what, and in which order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import LaneCosts
from oled_sim.engine import compiled
from oled_sim.engine.allotment import Allotment
from oled_sim.engine.batch import Batch
from oled_sim.engine.between_passes import BetweenPasses
from oled_sim.engine.budget import Budget
from oled_sim.engine.faults import Faults
from oled_sim.engine.future import Beyond
from oled_sim.engine.handover import Stretches
from oled_sim.engine.hook_decider import HookDecider
from oled_sim.engine.hooks import Hooks, own_copy
from oled_sim.engine.job_log import JobLog
from oled_sim.engine.kernel_decider import KernelDecider
from oled_sim.engine.merge import own
from oled_sim.engine.pace import Pace
from oled_sim.engine.requests import Requests
from oled_sim.engine.residency import Residency
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.state import PASS, Course, State
from oled_sim.engine.state_machine import StateMachine
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.engine.view import View
from oled_sim.engine.whatif import LayerTimer
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import Compiled, Policy, Setting


@dataclass(frozen=True)
class GroupRecord:
    """What was measured while one group of requests ran. ``course`` holds the rows.

    ``log`` and ``gauges`` are those of :class:`~oled_sim.engine.job_log.Jobs`, if the run keeps a
    log.
    """

    group: Group
    batch: Batch
    course: Course
    log: NDArray[np.float64] | None = None
    gauges: NDArray[np.int64] | None = None


class Snapshot(NamedTuple):
    """A simulation between two groups. ``arrays``: all of its state, in the order of ``State``."""

    arrays: tuple[NDArray[Any], ...]
    policy: Policy
    passes_since: int


class Simulation:
    """One policy with one budget, from the first request to the last.

    It composes what the work is divided between: the state and its kernels (``StateMachine``), who
    is resident by the policy's word (``Residency``), what the policy sees (``View``), who decides
    at gates and arrivals (``HookDecider`` or ``KernelDecider``), and what a policy is asked and
    told between passes (``BetweenPasses``) and requests (``Requests``).

    Args:
        policy: the policy; it is copied.
        geometry: routing geometry of the trace.
        costs: lane costs of the cost geometry.
        budget: how much may be resident.
        rules: how requests are run.
        expert_bytes: int64 [L], bytes of one expert per layer; by default the cost geometry's.
        name: what errors call the policy.
        keep_log: record every job of every lane, in all groups or in those it is true of. Such
            groups run gate by gate, never compiled as a whole; the results are the same.

    Attributes:
        hooks: of the copy of the policy that runs here.
        pace: what lets time pass, None for the simulated lanes; may be changed between groups.
        leftover_prefetches: prefetched experts that nothing had used by the end of the last group.

    Raises:
        PolicyError: the policy breaks the contract.
    """

    def __init__(
        self,
        policy: Policy,
        geometry: RoutingGeometry,
        costs: LaneCosts,
        budget: Budget,
        rules: Rules | None = None,
        *,
        expert_bytes: NDArray[np.int64] | None = None,
        name: str | None = None,
        keep_log: bool | Callable[[Group], bool] = False,
    ) -> None:
        self.rules = rules or Rules()
        self.geometry = geometry
        self.costs = costs
        layers = len(geometry.layers)
        if expert_bytes is None:
            expert_bytes = np.full(layers, costs.geometry.expert_bytes, np.int64)
        self.expert_bytes = expert_bytes
        self.keep_log = keep_log
        self.pace: Pace | None = None
        self.leftover_prefetches = 0
        name = name or type(policy).__name__
        self.hooks = Hooks(own_copy(policy, name), name, geometry.layers, geometry.experts)
        self._allotment = Allotment(
            budget,
            expert_bytes,
            geometry.experts,
            geometry.top_k,
            per_layer=self.rules.scope == "layer",
        )
        self._compose()
        self._residency.place(self._setting())

    def _compose(self) -> None:
        """Make those that the work is divided between."""
        hooks, rules, scored = self.hooks, self.rules, ("score", "rescore", "revise")
        self._machine = machine = StateMachine(
            self._allotment,
            self.costs,
            rules.staging,
            equal=not any(hooks.overrides[hook] for hook in scored),
            logs=bool(self.keep_log),
        )
        self._view = view = View(machine, hooks)
        self._residency = residency = Residency(machine, self._allotment, hooks)
        self._requests = Requests(machine, hooks)
        self._stretches = Stretches()
        self._between_passes = BetweenPasses(
            machine, view, residency, hooks, revises=rules.confidence == "end"
        )
        faults = Faults(machine, hooks, self.costs)
        self._by_hooks = HookDecider(machine, view, residency, hooks, faults)
        self._by_kernels = KernelDecider(machine, view, hooks, faults, self._by_hooks)
        self._decider: HookDecider | KernelDecider = self._by_hooks

    def _setting(self) -> Setting:
        """Return what the policy learns of the run before it starts."""
        shares, experts = self._allotment.shares, self.geometry.experts
        machine, staging = self._machine, self.rules.staging
        copy_us = machine.state.lanes.copy_us.copy()
        return Setting(
            routing=self.geometry,
            cost=self.costs.geometry,
            capacity=shares,
            budget=int(shares.sum()),
            expert_bytes=own(self.expert_bytes),
            costs=self.costs,
            timer=LayerTimer(experts, copy_us, self.expert_bytes.copy(), staging, self.costs),
            scope=self.rules.scope,
            residents=lambda: machine.state.pools.resident.copy(),
        )

    @property
    def policy(self) -> Policy:
        """The policy, whose state changes as the run goes on."""
        return self.hooks.policy

    @property
    def state(self) -> State:
        """All that changes in the engine; another object after each cold start."""
        return self._machine.state

    @property
    def work(self) -> NDArray[np.int64]:
        """``Lanes.work``."""
        return self._machine.work

    @property
    def decided(self) -> NDArray[np.int64]:
        """The lanes that the policy chose at the last gate, int64 [A], if there is a pace."""
        return self._decider.decided

    @property
    def total_bytes(self) -> int:
        """The whole budget."""
        return self._allotment.total_bytes

    @property
    def slots(self) -> int:
        """Slots of all layers together."""
        return self._residency.slots

    @property
    def initial_residents(self) -> int:
        """Experts that were loaded free before the first request."""
        return self._residency.initial_residents

    def _reset(self) -> None:
        """Go to the state before the first request, with empty pools."""
        self._machine.reset()
        self._requests.forget()
        self._between_passes.passes_since = 0
        self._stretches.forget()

    def end_history(self) -> None:
        """Go from the history split to the run: empty caches, and let the policy place anew."""
        self._reset()
        self._residency.place(self._setting())

    def snapshot(self) -> Snapshot:
        """Return what :meth:`restore` needs to go back to this moment, between two groups."""
        passes_since = self._between_passes.passes_since
        return Snapshot(self._machine.copies(), copy.deepcopy(self.policy), passes_since)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a moment of this simulation; the snapshot can be used again."""
        self._machine.restore(snapshot.arrays)
        self.hooks.policy = copy.deepcopy(snapshot.policy)
        self._between_passes.passes_since = snapshot.passes_since
        self._stretches.forget()
        self._view.forget()
        self._by_kernels.forget()
        self._decider = self._by_hooks

    def forget_copies(self) -> None:
        """Drop the prefetch in flight and those that are queued, which hardware has not begun."""
        self._machine.forget_copies()

    def run_group(self, group: Group, batch: Batch, beyond: Beyond | None = None) -> GroupRecord:
        """Run one group of requests, to their end or the end of their stretch.

        Args:
            group: which requests, and what they are for.
            batch: the same requests made ready. Of stretches, whether their last transfers are
                used again is known once the next one has run; the record is completed then.
            beyond: says which experts are used after the group, for clairvoyant policies; by
                default none.
        """
        course = self.open_group(group, batch.fresh_course(), beyond)
        log = JobLog(self.state) if self._keeps_log(group) else None
        if self.pace is not None:
            self.pace.enter(self, batch, course)
        while self.work[PASS] < batch.passes:
            self._run_passes(batch, course, log)
        record = self.close_group(group, batch, course)
        return record if log is None else replace(record, **log.finish()._asdict())

    def _keeps_log(self, group: Group) -> bool:
        return self.keep_log(group) if callable(self.keep_log) else self.keep_log

    def _run_passes(self, batch: Batch, course: Course, log: JobLog | None) -> None:
        """Run the next pass, or all to the next that the policy has a say after."""
        p = last = int(self.work[PASS])
        between, pace = self._between_passes, self.pace
        between.before(batch, p)
        offered = self._compiled() if log is None else None
        if offered is None:
            self._decider = self._by_hooks
            self._by_hooks.run_pass(batch, course, pace, log)
        elif pace is not None or self._asks_early(offered):
            self._decider = self._by_kernels
            self._by_kernels.open(batch, course, offered)
            self._by_kernels.run_pass(batch, course, pace)
        else:
            last = between.next_say(course, p)
            self._by_kernels.run_passes(batch, course, offered, last)
            between.skip(course, p, last)
        self.end_pass(batch, last)

    def _compiled(self) -> Compiled | None:
        """Return the policy's kernels if they can take the place of the hooks in this run."""
        overrides, per_layer = self.hooks.overrides, self._allotment.per_layer
        alone = ("foresee", "reside", *(() if per_layer else ("rescore",)))
        if not compiled.offers(self.policy) or any(overrides[hook] for hook in alone):
            return None
        offered = self.hooks.compiled()
        if offered is not None and overrides["prefetch"] and offered.prefetch is None:
            return None
        return offered

    def _asks_early(self, offered: Compiled) -> bool:
        """Whether anything may be prefetched, at a gate or before a pass."""
        return compiled.prefetch_of(offered) is not None or self.hooks.overrides["begin_iteration"]

    def open_group(self, group: Group, course: Course, beyond: Beyond | None = None) -> Course:
        """Begin a group whose passes are then stepped through.

        Whoever has the model, or hardware, decide when things happen calls :meth:`open_pass`,
        :meth:`decide` at every gate, :meth:`admit` for every prefetch that arrived, and
        :meth:`end_pass`, in this order for every pass, and :meth:`close_group` in the end. Between
        these calls it keeps ``Lanes.work`` as a :class:`~oled_sim.engine.pace.Pace` does.

        Args:
            group, beyond: as for :meth:`run_group`.
            course: with empty rows for what is measured.

        Returns:
            The course that goes with the calls that follow.
        """
        if self.rules.cold:
            self._reset()
            self._residency.load_initial()
            self.hooks.call("clear")
        course = self._course = self._stretches.begin(group, course, self.state.pools)
        self._view.enter(course, beyond)
        self.work[PASS] = 0
        self._requests.begin(group)
        return course

    def close_group(self, group: Group, batch: Batch, course: Course) -> GroupRecord:
        """End a group; ``batch`` holds all of it, ``course`` what was measured."""
        course = self._stretches.end(group, course, self.state.pools)
        self._requests.end(group, batch, course)
        self.leftover_prefetches = self._residency.unused_prefetches
        return GroupRecord(group, batch, course)

    def open_pass(self, batch: AnyBatch, p: int) -> None:
        """Begin pass ``p``: let the policy prefetch, and offer kernels for what follows."""
        self._between_passes.before(batch, p)
        offered = self._compiled()
        if offered is None:
            self._decider = self._by_hooks
        else:
            self._decider = self._by_kernels
            self._by_kernels.open(batch, self._course, offered)

    def decide(self, batch: AnyBatch, course: Course) -> NDArray[np.int64]:
        """Let the policy decide at the gate of event ``work[EVENT]``, and settle it.

        Returns:
            int64 [A], the lane of each activated expert; valid until the next decision.

        Raises:
            PolicyError: the decision breaks the contract.
        """
        return self._decider.decide(batch, course)

    def admit(self) -> None:
        """Let the prefetch in ``queue.arrived`` into its pool, or drop it.

        Raises:
            PolicyError: a score is no number.
        """
        self._decider.admit()

    def end_pass(self, batch: AnyBatch, p: int) -> None:
        """What follows pass ``p``: revised scores, what became known, new capacities."""
        self._between_passes.after(batch, p)
