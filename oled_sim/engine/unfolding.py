"""A request that comes about while it runs, in the arrays that decisions read.

A :class:`~oled_sim.engine.batch.Batch` is made from a whole trace. Where a model decides what is
routed where, the same columns are filled pass by pass and gate by gate: compiled policies read
them by the number of the event, so they are laid out for the longest course the request can take.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.batch import Batch
from oled_sim.engine.merge import frozen, own
from oled_sim.engine.routes import activated_sets, gate_masses
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES, Course
from oled_sim.errors import UsageError
from oled_sim.geometry import RoutingGeometry
from oled_sim.policy import PassEnd
from oled_sim.trace.builder import sort_slots
from oled_sim.trace.manifest import expert_dtype
from oled_sim.trace.schema import Kind


class Room(NamedTuple):
    """The longest course of a request.

    ``passes``: at most. ``first``, ``later``: tokens of the first pass, and of every other at most.
    ``positions``: of prompt and output together.
    """

    passes: int
    first: int
    later: int
    positions: int


@dataclass(frozen=True)
class PassStart:
    """What is known when a pass begins. T tokens.

    Attributes:
        kind: a :class:`~oled_sim.trace.schema.Kind`, as far as it is known: a pass without masks
            counts as commit, though rule 2.1 may still edit a token in it.
        block: index of the block. position: int32 [T]. state: uint8 [T] a ``TokenState`` each.
        embedding: float16 [d], mean input embedding, or None.
    """

    kind: int
    block: int
    position: NDArray[np.int32]
    state: NDArray[np.uint8]
    embedding: NDArray[np.float16] | None = None


class Unfolding:
    """One request while it runs; attributes as of :class:`~oled_sim.engine.batch.Batch`.

    Gates and confidence are taken in the dtypes of a trace (float16), and routes in the one order
    of the format, so that a trace of the run leads to the same decisions.

    Args:
        request: its number.
        geometry: what it routes over; every pass has an event in every layer.
        room: the longest course it can take.
        confidence: ``previous`` or ``end``.
        signals: optional ones to hold: ``full_gate``, ``embedding``.
        width: of an embedding.

    Raises:
        UsageError: a confidence that is not known while a pass runs.
    """

    def __init__(
        self, request: int, geometry: RoutingGeometry, room: Room, confidence: str = "previous",
        *, signals: Collection[str] = (), width: int = 0,
    ) -> None:  # fmt: skip
        if confidence == "current":
            raise UsageError(
                "the confidence of a pass is known only after it: use --confidence previous or end"
            )
        layers, passes = len(geometry.layers), room.passes
        events = passes * layers
        rows = layers * (room.first + (passes - 1) * room.later)
        most = layers * sum(
            n * min(geometry.experts, t * geometry.top_k)
            for n, t in ((1, room.first), (passes - 1, room.later))
        )
        self.request, self.geometry, self.mode = request, geometry, confidence
        self.kind = np.zeros(passes, np.uint8)
        self.block = np.zeros(passes, np.int32)
        self.rows = np.zeros(events + 1, np.int64)
        self.own_pass = np.repeat(np.arange(passes), layers)
        self.owner = np.full(rows, request, np.int32)
        self._routes = np.zeros((rows, geometry.top_k), expert_dtype(geometry.experts))
        self._gates = np.zeros((rows, geometry.top_k), np.float32)
        self._confidence, self._confidence_after = np.ones(rows), np.ones(rows)
        self.position = np.zeros(rows, np.int32)
        self.state = np.zeros(rows, np.uint8)
        self.gate_mass = np.full(most, np.nan)
        self.course = _empty_course(layers, passes, most)
        # Read-only views: what kernels are compiled for does not depend on who made a batch.
        self.routes: NDArray[Any] = frozen(self._routes)
        self.gates: NDArray[np.float32] | None = frozen(self._gates)
        self.confidence: NDArray[np.float64] = frozen(self._confidence)
        self.confidence_after: NDArray[np.float64] = frozen(self._confidence_after)
        self.experts: NDArray[np.uint16] = frozen(self.course.experts)
        self.tokens: NDArray[np.int32] = frozen(self.course.tokens)
        self.full_gate = self._room_for("full_gate" in signals, events, geometry.experts)
        self.embedding = self._room_for("embedding" in signals, passes, width)
        self._known = np.ones(room.positions)
        self._end: PassEnd | None = None
        self.passes = 0

    @staticmethod
    def _room_for(wanted: bool, rows: int, columns: int) -> NDArray[np.float32] | None:
        return np.zeros((rows, columns), np.float32) if wanted else None

    def begin_pass(self, start: PassStart) -> None:
        """Take in what is known as a pass begins."""
        p, layers, tokens = self.passes, len(self.geometry.layers), len(start.position)
        if p == len(self.kind):
            raise RuntimeError(f"request {self.request} takes more than {p} passes")
        self.kind[p], self.block[p] = start.kind, start.block
        first = p * layers
        begin = self.rows[first]
        self.rows[first + 1 : first + layers + 1] = begin + tokens * np.arange(1, layers + 1)
        self.course.rows[first : first + layers] = tokens
        span = slice(begin, begin + tokens * layers)
        self.position[span] = np.tile(start.position, layers)
        self.state[span] = np.tile(start.state, layers)
        self._confidence[span] = np.tile(self._known[start.position], layers)
        if self.embedding is not None and start.embedding is not None:
            self.embedding[p] = start.embedding
        self.course.decode[p] = start.kind != Kind.PREFILL
        self.passes += 1

    def at_gate(
        self,
        v: int,
        experts: NDArray[np.integer],
        gates: NDArray[np.float16],
        full_gate: NDArray[np.float16] | None = None,
    ) -> None:
        """Take in the routes of event ``v``.

        Args:
            v: number of the event; the one before has been taken in.
            experts: [T, k]. gates: float16 [T, k], renormalised, before the scaling factor.
            full_gate: float16 [E], mean over the tokens, or None.
        """
        course, span = self.course, slice(self.rows[v], self.rows[v + 1])
        ids, sorted_gates = sort_slots(experts.astype(self._routes.dtype), gates)
        self._routes[span], self._gates[span] = ids, sorted_gates
        whole = np.array([0, len(ids)])
        offset, active, tokens = activated_sets(whole, self.routes[span], self.geometry.experts)
        mine = slice(course.offset[v], course.offset[v] + len(active))
        course.offset[v + 1] = mine.stop
        course.experts[mine], course.tokens[mine] = active, tokens
        assert self.gates is not None
        self.gate_mass[mine] = gate_masses(
            whole, self.routes[span], self.gates[span], offset, active, self.geometry.experts
        )
        if self.full_gate is not None and full_gate is not None:
            self.full_gate[v] = full_gate

    def finish_pass(
        self,
        kind: int,
        confidence: NDArray[np.float32],
        accepted: NDArray[np.bool_],
        edited: NDArray[np.bool_],
    ) -> None:
        """Take in what a pass did; arrays [T], confidence NaN where unknown."""
        p, layers = self.passes - 1, len(self.geometry.layers)
        begin, end = self.rows[p * layers], self.rows[p * layers + 1]
        position = self.position[begin:end]
        self.kind[p] = kind
        rounded = in_trace(confidence)
        after = np.nan_to_num(rounded.astype(np.float64), nan=1.0)
        self._confidence_after[begin : self.rows[(p + 1) * layers]] = np.tile(after, layers)
        known = ~np.isnan(rounded)
        self._known[position[known]] = rounded[known]
        self._end = PassEnd(
            request=self.request,
            pass_index=p,
            kind=kind,
            position=own(position),
            state=own(self.state[begin:end]),
            confidence=own(rounded),
            accepted=own(accepted),
            edited=own(edited),
        )

    def leader(self, p: int) -> tuple[int, int]:
        """Return number and own pass of the request."""
        return self.request, p

    def ends(self, p: int) -> Iterator[PassEnd]:
        """Yield what became known at the end of pass ``p``, the last one."""
        assert self._end is not None and self._end.pass_index == p
        yield self._end

    def measured(self, batch: Batch) -> Course:
        """Return the course of the finished request, as ``batch`` has it, with what was measured.

        Raises:
            RuntimeError: decisions saw another course than the batch.
        """
        whole, mine = batch.course, self.course
        events, passes = len(whole.event_layer), batch.passes
        seen = mine.experts[: mine.offset[events]]
        if passes != self.passes or not np.array_equal(seen, whole.experts):
            raise RuntimeError(f"request {self.request}: decisions saw other routes than its trace")
        return whole._replace(
            counts=mine.counts[:events],
            times=mine.times[:events],
            pass_counts=mine.pass_counts[:passes],
            pass_times=mine.pass_times[:passes],
        )


AnyBatch = Batch | Unfolding
"""Requests as decisions see them."""


def in_trace(confidence: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return confidence as a trace keeps it: float16."""
    return confidence.astype(np.float16).astype(np.float32)


def _empty_course(layers: int, passes: int, most: int) -> Course:
    events = layers * passes
    return Course(
        event_layer=np.tile(np.arange(layers), passes),
        event_pass=np.repeat(np.arange(passes), layers),
        pass_event=np.arange(passes + 1) * layers,
        rows=np.zeros(events, np.int64),
        offset=np.zeros(events + 1, np.int64),
        experts=np.zeros(most, np.uint16),
        tokens=np.zeros(most, np.int32),
        dense_us=np.zeros(events),
        shared_us=np.zeros(events),
        merge_us=np.zeros(events),
        start_us=np.zeros(passes),
        head_us=np.zeros(passes),
        counts=np.zeros((events, len(EVENT_COUNTS)), np.int64),
        times=np.zeros((events, len(EVENT_TIMES))),
        pass_counts=np.zeros((passes, len(PASS_COUNTS)), np.int64),
        pass_times=np.zeros((passes, len(PASS_TIMES))),
        decode=np.zeros(passes, np.bool_),
    )
