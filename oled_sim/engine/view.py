"""What a policy sees: events for its hooks, whole batches for its kernels, and the future or not.

Of a trace's signals it sees those that it declares; the rest is not even worked out.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.future import Beyond, Cursor, Withheld, nothing_beyond
from oled_sim.engine.hooks import Hooks
from oled_sim.engine.merge import frozen, own
from oled_sim.engine.state import USES, Course
from oled_sim.engine.state_machine import StateMachine
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.policy import Event, Gate

NO_GATES = np.full((1, 1), np.nan, np.float32)
NO_CONFIDENCE = np.full(1, np.nan)
NO_FULL_GATE = np.empty((0, 0), np.float32)
for _nothing in (NO_GATES, NO_CONFIDENCE, NO_FULL_GATE):
    _nothing.flags.writeable = False


class View:
    """What one policy sees in one run.

    Attributes:
        cursor: what hands out the future, for a policy that declares it; else None.
    """

    def __init__(self, machine: StateMachine, hooks: Hooks) -> None:
        policy = hooks.policy
        self._machine = machine
        self._sees = policy.needs | policy.wants
        self.cursor = Cursor(hooks.fail) if "future" in policy.needs else None
        self._future = self.cursor or Withheld(hooks.fail)
        self._gate: tuple[AnyBatch, Gate] | None = None

    def enter(self, course: Course, beyond: Beyond | None) -> None:
        """Start a group; ``beyond`` says which experts are used after it, by default none."""
        if self.cursor is not None:
            nothing = nothing_beyond(*self._machine.state.pools.resident.shape)
            self.cursor.enter(course, int(self._machine.work[USES]), beyond or nothing)

    def forget(self) -> None:
        """Forget the batch."""
        self._gate = None

    def event(self, batch: AnyBatch, v: int, confidence: NDArray[np.float64]) -> Event:
        """Return event ``v`` of a batch as hooks see it now."""
        course, pools = batch.course, self._machine.state.pools
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

    def embedding(self, batch: AnyBatch, p: int) -> NDArray[np.float32] | None:
        """Return the mean embedding of pass ``p``, if the policy sees it and the trace has it."""
        embedding = batch.embedding if "embedding" in self._sees else None
        return None if embedding is None else own(embedding[p])

    def gate(self, batch: AnyBatch) -> Gate:
        """Return what kernels may read of a batch."""
        if self._gate is None or self._gate[0] is not batch:
            self._gate = batch, gate_of(batch, self._sees)
        return self._gate[1]


def gate_of(batch: AnyBatch, sees: Collection[str]) -> Gate:
    """Return what a kernel may read of a batch: signals only for those who declare them.

    They are worked out on first use, which costs more than running a policy without them.
    """
    full_gate = batch.full_gate if "full_gate" in sees else None
    return Gate(
        rows=batch.rows,
        routes=batch.routes,
        gates=NO_GATES if "gates" not in sees or batch.gates is None else batch.gates,
        confidence=batch.confidence if "confidence" in sees else NO_CONFIDENCE,
        offset=batch.course.offset,
        experts=batch.experts,
        tokens=batch.tokens,
        full_gate=NO_FULL_GATE if full_gate is None else frozen(full_gate),
        event_pass=batch.course.event_pass,
        kind=frozen(batch.kind),
    )
