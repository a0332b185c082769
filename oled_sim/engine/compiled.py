"""Whole batches in one compiled call, for policies that decide in a kernel of their own.

A policy that offers :meth:`oled_sim.policy.Policy.compiled` is asked once per batch instead of
at every gate: the loop of this file is compiled together with its kernel and returns to Python
only where a hook must be called (the end of a pass, where the policy has a say then; a prefetch
that arrived) or where something is wrong. Everybody else's gates go through Python. Both ways
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.admission import admit
from oled_sim.engine.events import advance
from oled_sim.engine.gate import settle
from oled_sim.engine.jit import compiled_for, inlined, merged, specialised
from oled_sim.engine.packing import Packed, Packer, unpacked
from oled_sim.engine.prefetch_queue import ask_prefetches
from oled_sim.engine.state import (
    DECIDE,
    EVENT,
    NO_PREFETCH,
    PASS,
    PASS_ENDED,
    PROBLEM,
    Course,
    State,
)
from oled_sim.policy import Compiled, Gate, Policy, asks_for_none

# ruff: noqa: ANN001, ANN202

HOOKS = (
    "begin_request", "dispatch", "prefetch", "rescore", "reside", "score", "compiled",
)  # fmt: skip


def offers(policy: Policy) -> bool:
    """Whether a policy's ``compiled`` is to be asked: it speaks for the policy's very class.

    A subclass that changes a hook inherits a kernel that knows nothing of the change; so only the
    class that defines ``compiled`` itself is taken at its word, and no object whose hooks were
    replaced.
    """
    return "compiled" in vars(type(policy)) and not any(hook in vars(policy) for hook in HOOKS)


@cache
def loop_for(decide: Callable[..., Any]) -> Callable[..., int]:
    """Return the loop that asks ``decide`` at every gate.

    The loop takes state, course, tables, gate, the policy's own data, scratch for lanes int64 [E]
    and scores float64 [E], and the number of a pass; it runs until that pass has been reached.
    It returns a decision point of :func:`advance`, or a negative number as :func:`settle`.
    """

    def run(state, course, tables, gate, own, decided, scores, until):
        work, pools = state.lanes.work, state.pools
        while True:
            stop = advance(state, course, tables)
            if stop == PASS_ENDED and work[PASS] < until:
                continue
            if stop != DECIDE:
                return stop
            v = work[EVENT]
            layer = course.event_layer[v]
            lanes = decided[: course.offset[v + 1] - course.offset[v]]
            decide(own, gate, v, layer, pools.resident[layer], lanes, scores)
            problem = settle(state, course, lanes, scores)
            if problem != 0:
                return problem

    return specialised(run, decide)


class Asked(NamedTuple):
    """What the decisions of a pass read and write where time is not ours, all of it.

    Attributes:
        state, course: of the simulation.
        gate, own: what the policy's kernels may read, and their own.
        decided: int64 [E], scores: float64 [E], wanted: float64 [L·E, 3], scratch for what they
            decide. replace: whether ``wanted`` replaces what is queued.
    """

    state: State
    course: Course
    gate: Gate
    own: tuple[Any, ...]
    decided: NDArray[np.int64]
    scores: NDArray[np.float64]
    wanted: NDArray[np.float64]
    replace: bool


@cache
def step_for(decide: Callable[..., Any]) -> Callable[..., int]:
    """Return what asks ``decide`` at one gate and settles it, for runs whose time is not ours.

    The step takes a packed :class:`Asked`. It returns 0 or a negative number as :func:`settle`.
    """

    def step(asked):
        state, course, gate, own, decided, scores, _, _ = unpacked(asked)
        v = state.lanes.work[EVENT]
        layer = course.event_layer[v]
        lanes = decided[: course.offset[v + 1] - course.offset[v]]
        decide(own, gate, v, layer, state.pools.resident[layer], lanes, scores)
        return settle(state, course, lanes, scores)

    return specialised(step, decide)


@merged
def first_impossible(asked, resident) -> int:
    """Return the first row of float64 [n, 3] that is no (layer, expert, priority), -1 for none."""
    impossible = 0
    for i in range(len(asked)):  # to the end, several at a time: the loop has no way out
        impossible += int(not _possible(asked[i], resident))
    if impossible > 0:
        for i in range(len(asked)):
            if not _possible(asked[i], resident):
                return i
    return -1


@inlined
def _possible(row, resident):
    layers, experts = resident.shape
    layer, expert, priority = row[0], row[1], row[2]
    good = (layer >= 0) & (layer < layers) & (layer == np.floor(layer))
    good &= (expert >= 0) & (expert < experts) & (expert == np.floor(expert))
    return good & (priority == priority)


@cache
def asking_step_for(decide: Callable[..., Any], prefetch: Callable[..., int]) -> Callable[..., int]:
    """Return a step that also asks ``prefetch``: after ``decide``, before anything is settled."""

    def asking_step(asked):
        state, course, gate, own, decided, scores, wanted, replace = unpacked(asked)
        v = state.lanes.work[EVENT]
        layer = course.event_layer[v]
        lanes = decided[: course.offset[v + 1] - course.offset[v]]
        decide(own, gate, v, layer, state.pools.resident[layer], lanes, scores)
        listed = wanted[: prefetch(own, gate, v, layer, state.pools.resident, wanted)]
        wrong = first_impossible(listed, state.pools.resident)
        if wrong >= 0:
            state.lanes.work[PROBLEM] = wrong
            return NO_PREFETCH
        problem = settle(state, course, lanes, scores)
        if problem == 0 and len(listed) > 0:
            ask_prefetches(state, listed, replace)
        return problem

    return specialised(asking_step, decide, prefetch)


@cache
def admission_for(arrive: Callable[..., Any]) -> Callable[..., int]:
    """Return what asks ``arrive`` about the prefetch in ``queue.arrived`` and admits or drops it.

    It takes a packed :class:`Asked`, and returns 0 or a negative number as :func:`admit`.
    """

    def admission(asked):
        state, _, _, own, _, scores, _, _ = unpacked(asked)
        arrive(own, state.queue.arrived[0], state.pools.resident, scores)
        return admit(state, scores)

    return specialised(admission, arrive)


class Answers(NamedTuple):
    """A policy's kernels as they are called in a pass: machine code, and what it reads.

    ``step(asked)``: at a gate. ``admission(asked)``: when a prefetch arrives; None without a kernel
    for that.
    """

    asked: Packed
    step: Callable[[Packed], int]
    admission: Callable[[Packed], int] | None


class Answering:
    """Makes the answers of pass after pass, of one policy in one run.

    Args:
        offered: what the policy offers; later offers have the same kernels.
    """

    def __init__(self, offered: Compiled) -> None:
        self.kernels = _kernels_of(offered)
        self._packer = Packer()
        self._code: tuple[Any, Any] | None = None

    def fits(self, offered: Compiled) -> bool:
        """Whether an offer has the same kernels."""
        return self.kernels == _kernels_of(offered)

    def answers(self, asked: Asked) -> Answers:
        """Return the answers of a pass."""
        packed = self._packer.pack(asked)
        if self._code is None:
            decide, prefetch, arrive = self.kernels
            step = step_for(decide) if prefetch is None else asking_step_for(decide, prefetch)
            admission = None if arrive is None else compiled_for(admission_for(arrive), packed)
            self._code = compiled_for(step, packed), admission
        return Answers(packed, *self._code)


def _kernels_of(offered: Compiled) -> tuple[Any, Any, Any]:
    return offered.decide, prefetch_of(offered), offered.arrive


def prefetch_of(offered: Compiled) -> Callable[..., int] | None:
    """Return the kernel that asks for prefetches, None if nothing is ever asked for."""
    return None if offered.prefetch is asks_for_none else offered.prefetch
