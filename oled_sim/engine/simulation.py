"""The run loop: policy hooks around the kernels, one call of each per event."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from oled_sim.costs.lanes import BEYOND, LaneCosts
from oled_sim.engine import compiled, events
from oled_sim.engine.batch import Batch
from oled_sim.engine.budget import Budget, apportion
from oled_sim.engine.future import Beyond, Cursor, Withheld, nothing_beyond
from oled_sim.engine.handover import Handover
from oled_sim.engine.hooks import Hooks, own_copy
from oled_sim.engine.jit import direct, kernel
from oled_sim.engine.job_log import JobLog
from oled_sim.engine.members import Member
from oled_sim.engine.merge import own
from oled_sim.engine.packing import Packed
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.state import (
    ARRIVED,
    BUDGET_BYTES,
    CPU_EXPERTS,
    CPU_TOKENS,
    DECIDE,
    EQUAL,
    EVENT,
    GLOBAL,
    GPU,
    H2D,
    IDLE,
    JOB_EXPERTS,
    JOB_TOKENS,
    KIND,
    N_ACTIVATED,
    N_HITS,
    OUTSIDE_PROFILE,
    PASS,
    PASS_ENDED,
    POOL_BYTES,
    PREFETCH,
    PROBLEM,
    TOKENS,
    USED,
    USES,
    Course,
    State,
    new_lanes,
    new_pools,
    new_queue,
)
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.engine.whatif import LayerTimer
from oled_sim.errors import OledSimError, PolicyError, ProfileError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import (
    Compiled,
    Event,
    Gate,
    LayerHistory,
    PassInfo,
    Policy,
    RequestInfo,
    RequestSummary,
    Setting,
)
from oled_sim.trace.schema import Kind


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


class Simulation:
    """One policy with one budget, from the first request to the last.

    Args:
        policy: the policy; its state changes as the run goes on.
        geometry: routing geometry of the trace.
        costs: lane costs of the cost geometry.
        budget: how much may be resident.
        rules: how requests are run.
        expert_bytes: int64 [L], bytes of one expert per layer; by default the cost geometry's.
        name: what errors call the policy.
        keep_log: record every job of every lane, in all groups or in those it is true of. Such
            groups run gate by gate, never compiled as a whole; the results are the same.

    Attributes:
        pace: what lets time pass, None for the simulated lanes; may be changed between groups.
        decided: int64 [A], the lanes that the policy chose at the last gate, if there is a pace.

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
        self.budget = budget
        layers = len(geometry.layers)
        if expert_bytes is None:
            expert_bytes = np.full(layers, costs.geometry.expert_bytes, np.int64)
        self.expert_bytes = expert_bytes
        self.copy_us = np.array([costs.h2d_us(float(size)) for size in expert_bytes])
        self.total_bytes = budget.total_bytes(expert_bytes)
        self.initial_residents = 0
        self.leftover_prefetches = 0
        self.keep_log = keep_log
        name = name or type(policy).__name__
        self.policy = own_copy(policy, name)
        self._kernels = events.Kernels()
        self._sees = self.policy.needs | self.policy.wants
        self.pace: Pace | None = None
        self.decided = _NO_LANES
        self._scratch = np.empty(geometry.experts, np.int64), np.zeros(geometry.experts)
        self._loop: tuple[Callable[..., None], Callable[..., int]] | None = None
        self._gate: tuple[AnyBatch, Gate] | None = None
        self._answering: compiled.Answering | None = None
        self._answers: compiled.Answers | None = None
        self.hooks = Hooks(self.policy, name, geometry.layers, geometry.experts)
        self._cursor = Cursor(self.hooks.fail) if "future" in self.policy.needs else None
        self._future = self._cursor or Withheld(self.hooks.fail)
        self._reset()
        self._place()

    @property
    def shares(self) -> NDArray[np.int64]:
        """Slots per layer to begin with, int64 [L]."""
        return self.budget.shares(self.expert_bytes, self.geometry.experts)

    @property
    def holds_all(self) -> bool:
        """Whether every expert fits, which is full residency."""
        return self.total_bytes >= int(self.expert_bytes.sum()) * self.geometry.experts

    @property
    def slots(self) -> int:
        """Slots of all layers together."""
        return int(self.state.pools.capacity.sum()) if self._per_layer else self._pool_slots

    @property
    def _per_layer(self) -> bool:
        return self.rules.scope == "layer"

    @property
    def _pool_slots(self) -> int:
        everything = len(self.geometry.layers) * self.geometry.experts
        # As many as may be resident: if sizes differ, all of the smallest.
        return min(everything, self.total_bytes // int(self.expert_bytes.min()))

    def _reset(self) -> None:
        """Put the engine into the state before the first request: empty, at time zero."""
        layers, experts = len(self.geometry.layers), self.geometry.experts
        overrides = self.hooks.overrides
        capacity = self.shares
        if not self._per_layer:
            capacity = np.full(layers, self._pool_slots, np.int64)
        log = 4 * experts + 64 if self.keep_log else 0
        staging = self.rules.staging
        self.state = State(
            pools=new_pools(layers, experts, capacity, self.expert_bytes),
            lanes=new_lanes(
                experts,
                self.copy_us,
                self.expert_bytes,
                staging,
                on_lane_us=self.costs.tables.prefetch_on_lane_us,
                log=log,
            ),
            queue=new_queue(layers, experts, staging),
        )
        self.work = self.state.lanes.work
        self.work[GLOBAL] = int(not self._per_layer)
        self.work[BUDGET_BYTES] = self.total_bytes
        self.work[EQUAL] = int(
            not (overrides["score"] or overrides["rescore"] or overrides["revise"])
        )
        self._passes_since = 0
        self._open: Handover | None = None
        self._decoded: dict[int, NDArray[np.int64]] = {}

    def _place(self) -> None:
        """Ask for the initial residents and load them free of charge."""
        setting = Setting(
            routing=self.geometry,
            cost=self.costs.geometry,
            capacity=self.shares,
            budget=int(self.shares.sum()),
            expert_bytes=own(self.expert_bytes),
            costs=self.costs,
            timer=LayerTimer(
                self.geometry.experts,
                self.copy_us.copy(),
                self.expert_bytes.copy(),
                self.rules.staging,
                self.costs,
            ),
            scope=self.rules.scope,
            residents=lambda: self.state.pools.resident.copy(),
        )
        self.hooks.request = self.hooks.pass_index = self.hooks.layer = -1
        self._load(self.hooks.place(setting))

    def _load(self, mask: NDArray[np.bool_] | None) -> None:
        pools = self.state.pools
        if self.holds_all:
            mask = np.ones_like(pools.resident)
        self._initial = mask
        if mask is None:
            return
        count = mask.sum(axis=1)
        size = int((count * self.expert_bytes).sum())
        over = self._per_layer and bool((count > pools.capacity).any())
        if over and self.policy.moves_slots and size <= self.total_bytes:
            all_of_it = np.full(len(count), self.geometry.experts, np.int64)
            pools.capacity[:] = apportion(
                count.astype(np.float64), count, all_of_it, self.expert_bytes, self.total_bytes
            )
        elif over:
            layer = int(np.argmax(count > pools.capacity))
            raise self.hooks.fail(
                f"place() fills {count[layer]} of {pools.capacity[layer]} slots of layer"
                f" {self.geometry.layers[layer]}"
            )
        if size > self.total_bytes:
            raise self.hooks.fail(f"place() fills {size} of {self.total_bytes} bytes")
        pools.resident[:] = mask
        pools.occupied[:] = count
        for layer in np.flatnonzero(count):  # nothing has been used: the highest ids go first
            pools.order[layer, : count[layer]] = np.flatnonzero(mask[layer])[::-1]
        self.work[POOL_BYTES] = size
        self.initial_residents = int(count.sum())

    def end_history(self) -> None:
        """Go from the history split to the run: empty caches, and let the policy place anew."""
        self._reset()
        self._place()

    def snapshot(self) -> Snapshot:
        """Return what :meth:`restore` needs to go back to this moment, between two groups."""
        arrays = tuple(array.copy() for part in self.state for array in part)
        return Snapshot(arrays, copy.deepcopy(self.policy), self._passes_since)

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a moment of this simulation; the snapshot can be used again."""
        for array, saved in zip(
            (array for part in self.state for array in part), snapshot.arrays, strict=True
        ):
            array[...] = saved
        self.policy = self.hooks.policy = copy.deepcopy(snapshot.policy)
        self._passes_since = snapshot.passes_since
        self._loop = self._gate = self._open = self._answering = self._answers = None

    def forget_copies(self) -> None:
        """Drop the prefetch in flight and those that are queued, which hardware has not begun."""
        work = self.work
        if work[KIND + H2D] == PREFETCH:
            work[KIND + H2D] = IDLE
            work[USED] -= 1
        nothing = np.empty((0, 3))
        self._kernels.ask_prefetches(self.state, nothing, True)

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
            self._prepare_pass(batch, int(self.work[PASS]))
            offered = self._compiled() if log is None else None
            if offered is None or self.pace is not None or self._asks_early(offered):
                self._open_answers(batch, course, offered)
                self._run_pass(batch, course, log)
            else:
                self._run_passes(batch, course, offered)
        record = self.close_group(group, batch, course)
        return record if log is None else replace(record, **log.finish()._asdict())

    def open_group(self, group: Group, course: Course, beyond: Beyond | None = None) -> Course:
        """Begin a group whose passes are then stepped through.

        Whoever has the model, or hardware, decide when things happen calls :meth:`open_pass`,
        :meth:`decide` at every gate, :meth:`admit` for every prefetch that arrived, and
        :meth:`end_pass`, in this order for every pass, and :meth:`close_group` in the end. Between
        these calls it keeps ``Lanes.work`` as a :class:`Pace` does.

        Args:
            group, beyond: as for :meth:`run_group`.
            course: with empty rows for what is measured.

        Returns:
            The course that goes with the calls that follow.
        """
        if self.rules.cold:
            self._reset()
            self._load(self._initial)
            self.hooks.call("clear")
        course = self._course = self._take_over(group, course)
        if self._cursor is not None:
            nothing = nothing_beyond(len(self.geometry.layers), self.geometry.experts)
            self._cursor.enter(course, int(self.work[USES]), beyond or nothing)
        self.work[PASS] = 0
        self._begin_requests(group)
        return course

    def close_group(self, group: Group, batch: Batch, course: Course) -> GroupRecord:
        """End a group; ``batch`` holds all of it, ``course`` what was measured."""
        course = self._hand_over(group, course)
        self._end_requests(group, batch, course)
        self._count_leftovers()
        return GroupRecord(group, batch, course)

    def open_pass(self, batch: AnyBatch, p: int) -> None:
        """Begin pass ``p``: let the policy prefetch, and offer kernels for what follows."""
        self._prepare_pass(batch, p)
        self._open_answers(batch, self._course, self._compiled())

    def decide(self, batch: AnyBatch, course: Course) -> NDArray[np.int64]:
        """Let the policy decide at the gate of event ``work[EVENT]``, and settle it.

        Returns:
            int64 [A], the lane of each activated expert; valid until the next decision.

        Raises:
            PolicyError: the decision breaks the contract.
        """
        if self._answers is None:
            self._check(self._decide(batch, course, run_on=False))
            return self.decided
        v = int(self.work[EVENT])
        self._answer(self._answers.step, batch, course)
        self.decided = self._scratch[0][: course.offset[v + 1] - course.offset[v]]
        return self.decided

    def admit(self) -> None:
        """Let the prefetch in ``queue.arrived`` into its pool, or drop it.

        Raises:
            PolicyError: a score is no number.
        """
        answers = self._answers
        if answers is not None and answers.admission is not None:
            self._answer(answers.admission)
            return
        layer = int(self.state.queue.arrived[0])
        self._check(self._kernels.admit(self.state, self._scores(layer, None)))

    def end_pass(self, batch: AnyBatch, p: int) -> None:
        """What follows pass ``p``: revised scores, what became known, new capacities."""
        self.hooks.layer = -1
        self._end_pass(batch, p)

    def _take_over(self, group: Group, course: Course) -> Course:
        """Go on after the stretch before, or start a batch of which nothing is known."""
        pools = self.state.pools
        if self._open is not None and group.begun:
            return self._open.begin(course, pools)
        self._open = None
        pools.fresh[:] = False
        pools.fresh_event[:] = -1
        return course

    def _hand_over(self, group: Group, course: Course) -> Course:
        if self._open is not None:
            course = self._open.finish(course)
        self._open = Handover(course, self.state.pools) if group.unfinished else None
        return course

    def _keeps_log(self, group: Group) -> bool:
        return self.keep_log(group) if callable(self.keep_log) else self.keep_log

    def _compiled(self) -> Compiled | None:
        """Return the policy's kernels if they can take the place of the hooks in this run."""
        overrides = self.hooks.overrides
        alone = ("foresee", "reside", *(() if self._per_layer else ("rescore",)))
        if not compiled.offers(self.policy) or any(overrides[hook] for hook in alone):
            return None
        offered = self.hooks.compiled()
        if offered is not None and overrides["prefetch"] and offered.prefetch is None:
            return None
        return offered

    def _asks_early(self, offered: Compiled) -> bool:
        """Whether anything may be prefetched, at a gate or before a pass."""
        return compiled.prefetch_of(offered) is not None or self.hooks.overrides["begin_iteration"]

    def _run_passes(self, batch: Batch, course: Course, offered: Compiled) -> None:
        """Run compiled to the next end of a pass at which Python has something to do."""
        hooks, work = self.hooks, self.work
        first = hooks.pass_index = int(work[PASS])
        until = self._next_ask(course, first)
        loop, gate = self._loop_for(offered.decide), self._gate_of(batch)
        work[EQUAL] = int(not offered.scores)
        while True:
            try:
                stop = loop(
                    self.state, course, self.costs.tables, gate, offered.own, *self._scratch, until
                )
            except OledSimError:
                raise
            except Exception as error:
                self._locate(batch, course)
                raise hooks.raised("the kernel of compiled()", error) from error
            if stop == PASS_ENDED:
                break
            self._locate(batch, course)
            if stop == ARRIVED:
                layer = int(self.state.queue.arrived[0])
                stop = self._kernels.admit(self.state, hooks.score(layer, None))
            if stop == OUTSIDE_PROFILE:
                self._outside_profile()
            elif stop < 0:
                raise hooks.explain(stop, int(work[PROBLEM]))
        hooks.layer = -1
        self._passes_since += int(course.decode[first : until - 1].sum())
        self._end_pass(batch, until - 1)

    def _locate(self, batch: AnyBatch, course: Course) -> None:
        """Tell the hooks which event runs, for what they say when something is wrong."""
        last = len(course.event_pass) - 1  # the LM head is beyond it
        v = min(max(0, int(self.work[EVENT])), last)
        self.hooks.pass_index = int(batch.own_pass[v])
        self.hooks.layer = int(course.event_layer[v])
        self.hooks.request = int(batch.owner[batch.rows[v]])

    def _loop_for(self, decide: Callable[..., None]) -> Callable[..., int]:
        """Return the loop around the policy's kernel."""
        if self._loop is None or self._loop[0] is not decide:
            self._loop = decide, direct(compiled.loop_for(decide))
        return self._loop[1]

    def _gate_of(self, batch: AnyBatch) -> Gate:
        """Return what kernels may read of a batch."""
        if self._gate is None or self._gate[0] is not batch:
            self._gate = batch, compiled.gate_of(batch, self._sees)
        return self._gate[1]

    def _open_answers(self, batch: AnyBatch, course: Course, offered: Compiled | None) -> None:
        """Let the policy's kernels, if it offers any, answer at the gates of a pass."""
        self._answers = None
        if offered is None:
            return
        self.work[EQUAL] = int(not offered.scores)
        if self._answering is None or not self._answering.fits(offered):
            self._answering = compiled.Answering(offered)
        lanes, scores = self._scratch
        wanted = _NO_PREFETCHES if compiled.prefetch_of(offered) is None else self._wanted
        replaces = bool(self.policy.replaces_queue)
        gate = self._gate_of(batch)
        asked = compiled.Asked(
            self.state, course, gate, offered.own, lanes, scores, wanted, replaces
        )
        try:
            self._answers = self._answering.answers(asked)
        except Exception as error:  # numba cannot compile it
            raise self.hooks.raised("the kernel of compiled()", error) from error

    def _next_ask(self, course: Course, first: int) -> int:
        """Return the pass before which the policy has a say next, at the latest the last one."""
        overrides, passes = self.hooks.overrides, len(course.decode)
        if overrides["end_iteration"] or (self.rules.confidence == "end" and overrides["revise"]):
            return first + 1
        period = self.hooks.allocation_period
        if period == 0:
            return passes
        left = max(1, period - self._passes_since)
        for p in range(first, passes):
            left -= int(course.decode[p])
            if left == 0:
                return p + 1
        return passes

    def _run_pass(self, batch: Batch, course: Course, log: JobLog | None) -> None:
        """Run a pass gate by gate; with a pace, the policy's kernel may stand in for its hooks."""
        p = int(self.work[PASS])
        if self._answers is not None:
            self._run_answered(p, batch, course, self._answers)
            self.end_pass(batch, p)
            return
        stop = self._run_on(course)
        while stop != PASS_ENDED:
            if log is not None:
                log.drain(p)
            if stop == DECIDE:
                stop = self._decide(batch, course, run_on=True)
            elif stop == ARRIVED:
                self.admit()
                stop = self._run_on(course)
            self._check(stop)
        if log is not None:
            log.drain(p)
        self.end_pass(batch, p)

    def _run_answered(
        self, p: int, batch: Batch, course: Course, answers: compiled.Answers
    ) -> None:
        """Run a pass whose decisions kernels make.

        A live host finds everything cold that a decision touches, so that is little here.
        """
        (asked, step, admission), lanes = answers, self._scratch[0]
        run_on = partial(self._run_on, course) if self.pace is None else self.pace.run_on
        active = course.offset[course.pass_event[p] : course.pass_event[p + 1] + 1]
        sizes = iter(np.diff(active).tolist())
        while (stop := run_on()) != PASS_ENDED:
            problem = stop
            try:
                if stop == DECIDE:
                    problem = step(asked)
                    self.decided = lanes[: next(sizes)]
                elif stop == ARRIVED and admission is not None:
                    problem = admission(asked)
            except OledSimError:
                raise
            except Exception as error:
                raise self._kernel_raised(error, batch, course) from error
            if problem == ARRIVED:
                self.admit()
            elif problem != 0:
                self._locate(batch, course)
                self._check(problem)

    def _check(self, stop: int) -> None:
        """Raise what is wrong with a decision, or with the profile."""
        if stop == OUTSIDE_PROFILE:
            self._outside_profile()
        elif stop < 0:
            raise self.hooks.explain(stop, int(self.work[PROBLEM]))

    def _prepare_pass(self, batch: AnyBatch, p: int) -> None:
        self.hooks.pass_index = p
        if self.hooks.overrides["foresee"]:
            self._foresee(batch, p)
        if self.hooks.overrides["begin_iteration"]:
            self._begin_iteration(batch, p)

    def _foresee(self, batch: AnyBatch, p: int) -> None:
        """Let a clairvoyant share the budget over the layers of a pass."""
        course = batch.course
        ahead = (
            self.event(batch, v, batch.confidence)
            for v in range(course.pass_event[p], course.pass_event[p + 1])
        )
        slots = self.hooks.foresee(ahead, self.expert_bytes, self.total_bytes)
        if slots is not None and self._per_layer and not self.holds_all:
            self._set_capacity(slots)

    def _begin_iteration(self, batch: AnyBatch, p: int) -> None:
        request, number = batch.leader(p)
        embedding = batch.embedding if "embedding" in self._sees else None
        self.hooks.request = request
        info = PassInfo(
            request=request,
            pass_index=number,
            kind=int(batch.kind[p]),
            block=int(batch.block[p]),
            embedding=None if embedding is None else own(embedding[p]),
        )
        self._ask(self.hooks.begin_iteration(info))

    def _decide(self, batch: AnyBatch, course: Course, *, run_on: bool) -> int:
        """Let the policy decide at a gate, settle it, and perhaps run on to the next decision."""
        v = int(self.work[EVENT])
        if self._cursor is None:
            return self._decide_at(v, batch, course, run_on)
        self._cursor.open(v)
        try:
            return self._decide_at(v, batch, course, run_on)
        finally:
            self._cursor.close()

    def _decide_at(self, v: int, batch: AnyBatch, course: Course, run_on: bool) -> int:
        state, hooks, tables = self.state, self.hooks, self.costs.tables
        layer = int(course.event_layer[v])
        hooks.layer = layer
        event = self.event(batch, v, batch.confidence)
        hooks.request, hooks.pass_index = event.request, event.pass_index
        if hooks.overrides["reside"]:
            self._set_residents(event, hooks.reside(event))
        self.decided = decided = hooks.dispatch(event)
        scores = self._scores(layer, event)
        if run_on and not hooks.overrides["prefetch"] and self.pace is None:
            both = events.SETTLE + events.RUN_ON
            return self._kernels.proceed(state, course, tables, both, decided, scores)
        wanted = hooks.prefetch(event) if hooks.overrides["prefetch"] else _NO_PREFETCHES
        problem = self._kernels.proceed(state, course, tables, events.SETTLE, decided, scores)
        if problem != 0:
            return problem
        self._ask(wanted)
        return self._run_on(course) if run_on else 0

    def _scores(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return the values of a layer; under global scope those of all layers may change."""
        hooks, pools = self.hooks, self.state.pools
        scores = hooks.score(layer, event)
        if hooks.overrides["rescore"] and not self._per_layer:
            table = hooks.rescore(pools.resident.copy())
            if table is not None:
                pools.score[:] = table
                return np.ascontiguousarray(table[layer])
        return scores

    def _answer(
        self,
        kernel: Callable[[Packed], int],
        batch: AnyBatch | None = None,
        course: Course | None = None,
    ) -> None:
        """Let the policy's kernel decide, and settle that; ``batch``: at a gate of it."""
        assert self._answers is not None
        try:
            problem = kernel(self._answers.asked)
        except OledSimError:
            raise
        except Exception as error:
            raise self._kernel_raised(error, batch, course) from error
        if problem != 0:
            if batch is not None and course is not None:
                self._locate(batch, course)
            self._check(problem)

    def _kernel_raised(
        self, error: Exception, batch: AnyBatch | None, course: Course | None
    ) -> PolicyError:
        """Return what to raise for an exception in the policy's kernel."""
        if batch is not None and course is not None:
            self._locate(batch, course)
        return self.hooks.raised("the kernel of compiled()", error)

    @cached_property
    def _wanted(self) -> NDArray[np.float64]:
        """Scratch for prefetches, float64 [L·E, 3]."""
        return np.empty((len(self.geometry.layers) * self.geometry.experts, 3))

    def _run_on(self, course: Course) -> int:
        """Run to the next decision point."""
        if self.pace is not None:
            return self.pace.run_on()
        tables = self.costs.tables
        return self._kernels.proceed(
            self.state, course, tables, events.RUN_ON, _NO_LANES, _NO_SCORES
        )

    def _ask(self, wanted: NDArray[np.float64]) -> None:
        if len(wanted):
            self._kernels.ask_prefetches(self.state, wanted, self.policy.replaces_queue)

    def event(self, batch: AnyBatch, v: int, confidence: NDArray[np.float64]) -> Event:
        """Return event ``v`` of a batch as a policy sees it now."""
        course, pools = batch.course, self.state.pools
        layer, p = int(course.event_layer[v]), int(course.event_pass[v])
        rows = slice(batch.rows[v], batch.rows[v + 1])
        active = slice(course.offset[v], course.offset[v + 1])
        ids, sees = own(batch.experts[active], np.int64), self._sees
        gates = batch.gates if "gates" in sees else None
        full_gate = batch.full_gate if "full_gate" in sees else None
        embedding = batch.embedding if "embedding" in sees else None
        return Event(
            request=int(batch.owner[batch.rows[v]]),
            pass_index=int(batch.own_pass[v]),
            kind=int(batch.kind[p]),
            block=int(batch.block[p]),
            layer=layer,
            experts=ids,
            tokens=own(batch.tokens[active], np.int64),
            gate_mass=np.full(len(ids), np.nan) if gates is None else own(batch.gate_mass[active]),
            routes=own(batch.routes[rows]),
            gates=None if gates is None else own(gates[rows]),
            confidence=own(confidence[rows]) if "confidence" in sees else None,
            position=own(batch.position[rows]),
            state=own(batch.state[rows]) if "token_state" in sees else None,
            full_gate=None if full_gate is None else own(full_gate[v]),
            embedding=None if embedding is None else own(embedding[p]),
            resident=own(pools.resident[layer]),
            capacity=int(pools.capacity[layer]),
            last_use=own(pools.used[layer]),
            owner=own(batch.owner[rows]),
            future=self._future,
        )

    def _set_residents(self, event: Event, ids: NDArray[np.int64] | None) -> None:
        if ids is not None:
            if len(ids) * int(self.expert_bytes[event.layer]) > self.total_bytes:
                raise self.hooks.fail(f"reside() returned {len(ids)} experts, more than fit")
            self._kernels.set_residents(self.state, event.layer, ids)
            event.resident = own(self.state.pools.resident[event.layer])

    def _end_pass(self, batch: AnyBatch, p: int) -> None:
        """What follows a pass: revised scores, what became known, new capacities."""
        hooks = self.hooks
        if self.rules.confidence == "end" and hooks.overrides["revise"]:
            self._revise(batch, p)
        if hooks.overrides["end_iteration"]:
            for end in batch.ends(p):
                hooks.request = end.request
                hooks.end_iteration(end)
        if batch.course.decode[p]:
            self._passes_since += 1
            period = hooks.allocation_period
            if period > 0 and self._passes_since >= period:
                self._allocate()

    def _revise(self, batch: AnyBatch, p: int) -> None:
        course, hooks = batch.course, self.hooks
        for v in range(course.pass_event[p], course.pass_event[p + 1]):
            hooks.layer = int(course.event_layer[v])
            scores = hooks.revise(hooks.layer, self.event(batch, v, batch.confidence_after))
            if scores is not None:
                self.state.pools.score[hooks.layer] = scores
        hooks.layer = -1

    def _allocate(self) -> None:
        """Let the policy share the budget anew; layers that shrink drop residents first."""
        self._passes_since = 0
        pools = self.state.pools
        ratio, utilization = window_means(pools.window)
        pools.window[:] = 0.0
        if not self._shares_budget:
            return
        capacity = pools.capacity.copy()
        wanted = self.hooks.allocate(
            LayerHistory(ratio, utilization, capacity, int(capacity.sum()))
        )
        if wanted is None or wanted.sum() == 0:
            return
        lower, upper = self._bounds
        capacity = apportion(wanted, lower, upper, self.expert_bytes, self.total_bytes)
        self._set_capacity(capacity)

    def _set_capacity(self, capacity: NDArray[np.int64]) -> None:
        """Change the slots of layers; those that shrink drop their lowest-scored residents."""
        self._kernels.change_capacities(self.state.pools, self.work, capacity)

    @cached_property
    def _shares_budget(self) -> bool:
        """Whether there is a budget to share: something, but not everything, fits."""
        something = self.total_bytes >= int(self.expert_bytes.min())
        return self._per_layer and something and not self.holds_all

    @cached_property
    def _bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Fewest and most slots that a layer may be given, int64 [L] each."""
        layers, average = len(self.expert_bytes), self.budget.slots_per_layer(self.expert_bytes)
        lower = np.full(layers, min(self.geometry.top_k, average), np.int64)
        return lower, np.full(layers, self.geometry.experts, np.int64)

    def _begin_requests(self, group: Group) -> None:
        counted, history = group.split == "counted", group.split == "history"
        self.hooks.pass_index = self.hooks.layer = -1
        for request in group.begins:
            self._decoded[request] = np.zeros(3, np.int64)
            self.hooks.request = request
            wanted = self.hooks.call("begin_request", RequestInfo(request, counted, history))
            self._ask(self.hooks.prefetches("begin_request", wanted))

    def _end_requests(self, group: Group, batch: Batch, course: Course) -> None:
        self.hooks.pass_index = self.hooks.layer = -1
        for member in batch.members:
            decoded = self._decoded[member.whole.request]
            decoded += [member.trace.passes, *_hits_and_activations(member, course)]
        for request in group.ends:
            self.hooks.request = request
            summary = RequestSummary(request, *self._decoded.pop(request).tolist())
            self.hooks.call("end_request", summary)

    def _count_leftovers(self) -> None:
        """Note prefetched experts that nothing has used so far."""
        self.leftover_prefetches = int(self.state.pools.unused.sum())

    def _outside_profile(self) -> None:
        """Raise the sentence that says which cost the profile lacks."""
        work, costs = self.work, self.costs
        costs.gpu_experts_us(int(work[JOB_EXPERTS + GPU]), int(work[JOB_TOKENS + GPU]))
        costs.cpu_link_us(int(work[TOKENS]))
        costs.cpu_experts_us(int(work[CPU_EXPERTS]), int(work[CPU_TOKENS]))
        raise ProfileError(
            f"profile {costs.profile.name!r} has no time for a job at {self.hooks.where}: {BEYOND}"
        )


_NO_LANES, _NO_SCORES = np.empty(0, np.int64), np.empty(0)
_NO_PREFETCHES = np.empty((0, 3))


@kernel
def window_means(window):  # noqa: ANN001, ANN201
    """Return mean |A|/E and mean |R ∩ A|/C since the last allocation, float64 [L]; NaN unknown.

    Args:
        window: float64 [L, 4], see ``Pools``.
    """
    ratio, utilization = np.full(len(window), np.nan), np.full(len(window), np.nan)
    for layer in range(len(window)):
        if window[layer, 0] > 0:
            ratio[layer] = window[layer, 1] / window[layer, 0]
        if window[layer, 2] > 0:
            utilization[layer] = window[layer, 3] / window[layer, 2]
    return ratio, utilization


def _hits_and_activations(member: Member, course: Course) -> tuple[int, int]:
    """Return Σ |R ∩ A| and Σ |A| of the batch's events in the decode passes of a request."""
    decode = np.zeros(len(course.decode), np.bool_)
    decode[member.at[member.trace.kind != Kind.PREFILL]] = True
    mine = decode[course.event_pass]
    return int(course.counts[mine, N_HITS].sum()), int(course.counts[mine, N_ACTIVATED].sum())
