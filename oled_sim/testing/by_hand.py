"""Requests and costs small enough to follow on paper, for tests of engine and policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oled_sim.costs.lanes import LaneCosts
from oled_sim.costs.synthetic import Affine, affine_profile
from oled_sim.engine.batch import make_batch
from oled_sim.engine.budget import Budget
from oled_sim.engine.rules import Group, Rules
from oled_sim.engine.simulation import GroupRecord, Simulation
from oled_sim.engine.state import EVENT_COUNTS
from oled_sim.engine.unfolding import AnyBatch
from oled_sim.geometry import RoutingGeometry, find_geometry
from oled_sim.policy import Policy
from oled_sim.trace.builder import LayerRoutes, RequestBuilder
from oled_sim.trace.schema import Kind, RequestTrace, TokenState

Rows = Sequence[Sequence[int]]
"""Routing rows of one event: one sequence of k expert ids per token."""


def request_by_hand(
    geometry: RoutingGeometry,
    passes: Sequence[Sequence[Rows | None]],
    *,
    request: int = 0,
    kinds: Sequence[Kind] | None = None,
    gates: Any = None,
    confidence: Sequence[Sequence[float]] | None = None,
    context: Sequence[int] | None = None,
    accepted: Sequence[Sequence[bool]] | None = None,
    blocks: Sequence[int] | None = None,
) -> RequestTrace:
    """Return a request with given routes, rows and slots in the order given.

    Args:
        geometry: what it routes over.
        passes: per pass and layer the routing rows; None where the layer does not run.
        request: its number.
        kinds: per pass; a prefill and then denoise passes by default.
        gates: as ``passes``, gate scores; equal ones by default.
        confidence: per pass and token; unknown by default.
        context: per pass; 0 by default.
        accepted: per pass and token; the first token of every denoise pass by default.
        blocks: per pass; 0 by default.
    """
    kinds = kinds or [Kind.PREFILL] + [Kind.DENOISE] * (len(passes) - 1)
    builder = RequestBuilder(geometry, request, source_order=True)
    for p, layers in enumerate(passes):
        tokens = max(len(rows) for rows in layers if rows is not None)
        first = [kinds[p] == Kind.DENOISE] + [False] * (tokens - 1)
        builder.add_pass(
            kinds[p],
            0 if blocks is None else blocks[p],
            0 if context is None else context[p],
            np.arange(tokens),
            np.arange(tokens),
            np.full(tokens, TokenState.MASKED),
            np.full(tokens, np.nan) if confidence is None else confidence[p],
            first if accepted is None else accepted[p],
            np.zeros(tokens, np.bool_),
            [
                LayerRoutes(
                    layer,
                    range(len(rows)),
                    rows,
                    np.full(np.shape(rows), 1.0 / geometry.top_k)
                    if gates is None
                    else gates[p][layer],
                )
                for layer, rows in enumerate(layers)
                if rows is not None
            ],
        )
    return builder.build()


def costs_by_hand(**coefficients: Any) -> LaneCosts:
    """Return affine costs of LLaDA2.0-mini's geometry; a 6 MiB expert is copied in 150 µs.

    ``coefficients`` are those of :class:`~oled_sim.costs.synthetic.Affine`.
    """
    return LaneCosts(affine_profile(find_geometry("llada2.0-mini"), Affine(**coefficients)))


class _Watched(Simulation):
    """A simulation that notes who is resident after each pass."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seen: list[list[list[int]]] = []
        super().__init__(*args, **options)

    def end_pass(self, batch: AnyBatch, p: int) -> None:
        super().end_pass(batch, p)
        resident = self.state.pools.resident
        self.seen.append([np.flatnonzero(layer).tolist() for layer in resident])


class Run:
    """One request, or several in lock step, run by one policy; with every job of every lane.

    Attributes:
        simulation: the simulation, for its state. record: what was measured.
        seen: residents of every layer after each pass, [passes][layers][ids].
    """

    def __init__(
        self,
        policy: Policy,
        geometry: RoutingGeometry,
        traces: RequestTrace | Sequence[RequestTrace],
        cache: int,
        *,
        costs: LaneCosts | None = None,
        **rules: Any,
    ) -> None:
        costs = costs or costs_by_hand()
        self.geometry, self.costs = geometry, costs
        settings = Rules(**rules)
        self.simulation = _Watched(
            policy, geometry, costs, Budget(cache=cache), settings, keep_log=True
        )
        self.seen = self.simulation.seen
        self.record: GroupRecord = self.again(traces)

    def again(self, traces: RequestTrace | Sequence[RequestTrace]) -> GroupRecord:
        """Run more requests on the same simulation."""
        given = [traces] if isinstance(traces, RequestTrace) else list(traces)
        group = Group("counted", tuple(t.request for t in given))
        confidence = self.simulation.rules.confidence
        batch = make_batch(given, self.geometry, self.costs, confidence)
        self.record = self.simulation.run_group(group, batch)
        return self.record

    def count(self, name: str) -> list[int]:
        """Return one column of ``EVENT_COUNTS`` over the events."""
        return self.record.course.counts[:, EVENT_COUNTS.index(name)].tolist()

    def residents(self, layer: int = 0) -> list[int]:
        """Return who is resident now, ascending."""
        return np.flatnonzero(self.simulation.state.pools.resident[layer]).tolist()

    def jobs(self, *kinds: str) -> list[tuple[str, float, float]]:
        """Return (kind, begin, end) in µs of the jobs that ran, in the order of their begin."""
        from oled_sim.engine.state import JOBS

        assert self.record.log is not None
        found = [(JOBS[int(row[1])], row[6], row[7]) for row in self.record.log]
        return sorted((j for j in found if not kinds or j[0] in kinds), key=lambda j: j[1:])
