"""Whole batches in one compiled call, for policies that decide in a kernel of their own.

A policy that offers :meth:`oled_sim.policy.Policy.compiled` is asked once per batch instead of
at every gate: the loop of this file is compiled together with its kernel and returns to Python
only where a hook must be called (the end of a pass, where the policy has a say then; a prefetch
that arrived) or where something is wrong. Everybody else's gates go through Python. Both ways
give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import numpy as np

from oled_sim.engine.events import advance, settle
from oled_sim.engine.jit import specialised
from oled_sim.engine.state import DECIDE, EVENT, PASS, PASS_ENDED
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.policy import Gate, Policy

# ruff: noqa: ANN001, ANN202

NO_GATES = np.full((1, 1), np.nan, np.float32)
NO_CONFIDENCE = np.full(1, np.nan)
NO_GATES.flags.writeable = NO_CONFIDENCE.flags.writeable = False
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


def gate_of(batch: AnyBatch, needs: Collection[str]) -> Gate:
    """Return what a kernel may read of a batch: gates and confidence only for those who need them.

    They are worked out on first use, which costs more than running a policy without them.
    """
    return Gate(
        rows=batch.rows,
        routes=batch.routes,
        gates=NO_GATES if "gates" not in needs or batch.gates is None else batch.gates,
        confidence=batch.confidence if "confidence" in needs else NO_CONFIDENCE,
        offset=batch.course.offset,
        experts=batch.experts,
        tokens=batch.tokens,
    )


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


@cache
def step_for(decide: Callable[..., Any]) -> Callable[..., int]:
    """Return what asks ``decide`` at one gate and settles it, for runs whose time is not ours.

    The step takes state, course, gate, the policy's own data, and scratch as :func:`loop_for`
    does. It returns 0 or a negative number as :func:`settle`.
    """

    def step(state, course, gate, own, decided, scores):
        v = state.lanes.work[EVENT]
        layer = course.event_layer[v]
        lanes = decided[: course.offset[v + 1] - course.offset[v]]
        decide(own, gate, v, layer, state.pools.resident[layer], lanes, scores)
        return settle(state, course, lanes, scores)

    return specialised(step, decide)
