"""The policy contract (spec §5): what a policy sees, and what it may decide.

The unit is the *event*: one pass of one MoE layer, with the whole set A of experts that its
tokens activate. A policy never counts its own hits and never touches the cache: it answers
questions, and the engine checks every answer and keeps every figure.

A policy is a dataclass that derives from :class:`Policy`. Its fields are its parameters::

    @dataclass
    class MostTokens(Policy):
        \"\"\"Keep the experts that served the most tokens, halving old counts each pass.\"\"\"

        half_life_passes: float = param(4.0, "passes after which a count has halved")

        def score(self, layer, event):
            ...

Parameters are given as ``--policy ./mine.py:half_life_passes=8``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import CostGeometry, RoutingGeometry

if TYPE_CHECKING:
    from oled_sim.costs.lanes import LaneCosts

__all__ = [
    "Event",
    "Lane",
    "LayerHistory",
    "PassEnd",
    "Policy",
    "Prefetch",
    "RequestInfo",
    "RequestSummary",
    "Setting",
    "param",
]


class Lane(IntEnum):
    """Where an activated expert of an event is computed."""

    GPU = 0
    """Resident at the gate, computed on the GPU."""
    TRANSFER = 1
    """Copied to the GPU on demand, computed there on arrival; may be retained."""
    CPU = 2
    """Computed by the CPU workers; its weights do not move."""


class Setting(NamedTuple):
    """What stays fixed during a run; handed to :meth:`Policy.place`.

    ``capacity``: int64 [L] slots per layer at the start. ``expert_bytes``: int64 [L].
    """

    routing: RoutingGeometry
    cost: CostGeometry
    capacity: NDArray[np.int64]
    budget: int
    expert_bytes: NDArray[np.int64]
    costs: LaneCosts
    scope: str


class RequestInfo(NamedTuple):
    """A request that starts. ``counted`` is false for warm-up and history requests."""

    request: int
    counted: bool


class RequestSummary(NamedTuple):
    """A request that ended, with the engine's own figures of it."""

    request: int
    passes: int
    hits: int
    activations: int


class PassEnd(NamedTuple):
    """A pass after its LM head: only now are confidence and acceptance known.

    Arrays are per token of the pass, in position order: ``position`` int32 [T], ``state`` uint8
    [T] (a ``TokenState`` at the start of the pass), ``confidence`` float32 [T] (NaN unknown),
    ``accepted`` bool [T], ``edited`` bool [T].
    """

    request: int
    pass_index: int
    kind: int
    position: NDArray[np.int32]
    state: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    accepted: NDArray[np.bool_]
    edited: NDArray[np.bool_]


class LayerHistory(NamedTuple):
    """Statistics since the last allocation, for :meth:`Policy.allocate`; float64 [L] each.

    ``activation_ratio``: mean |A| / E. ``utilization``: mean |R ∩ A| / C at the gate (NaN for a
    layer with no event or no slot). ``capacity``: int64 [L], slots in force.
    """

    activation_ratio: NDArray[np.float64]
    utilization: NDArray[np.float64]
    capacity: NDArray[np.int64]
    budget: int


@dataclass(slots=True)
class Event:
    """One MoE layer of one pass, as known at its gate.

    A activated experts, T tokens, k experts per token.

    Attributes:
        layer: index into ``routing.layers``.
        pass_index: number of the pass in the request. kind: a ``Kind``. block: block index.
        experts: int64 [A], activated experts in recency order (least recently routed first).
        tokens: int64 [A], tokens routed to each (n_e).
        gate_mass: float64 [A], sum of gate scores, NaN without the signal ``gates``.
        routes: uint8/uint16 [T, k]; gates: float32 [T, k] or None.
        confidence: float64 [T], by the run's confidence mode (spec §5), 1 where none is known.
        position: int32 [T]; state: uint8 [T].
        full_gate: float32 [E] or None; embedding: float32 [d] or None.
        resident: bool [E], every byte arrived at the gate (read-only).
        capacity: slots of the layer now (of the whole pool under global scope).
        last_use: int64 [E], event counter of the last activation before this event, -1 never.
    """

    request: int
    pass_index: int
    kind: int
    block: int
    layer: int
    experts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    gate_mass: NDArray[np.float64]
    routes: NDArray[Any]
    gates: NDArray[np.float32] | None
    confidence: NDArray[np.float64]
    position: NDArray[np.int32]
    state: NDArray[np.uint8]
    full_gate: NDArray[np.float32] | None
    embedding: NDArray[np.float32] | None
    resident: NDArray[np.bool_]
    capacity: int
    last_use: NDArray[np.int64]

    @property
    def missed(self) -> NDArray[np.bool_]:
        """bool [A], the activated experts that are not resident (M = A minus R)."""
        return ~self.resident[self.experts]


class Prefetch(NamedTuple):
    """A request to copy an expert before its gate; higher ``priority`` goes first."""

    layer: int
    expert: int
    priority: float


def param(default: Any, help: str) -> Any:
    """Declare a policy parameter with its default and one line of help."""
    return field(default=default, metadata={"help": help})


@dataclass
class Policy:
    """Base class: keeps the most recently used, transfers every miss, prefetches nothing."""

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    """Signals the trace must hold; ``"future"`` grants :meth:`reside`."""

    def place(self, setting: Setting) -> NDArray[np.bool_] | None:
        """Before the first request: initial residents, bool [L, E], loaded free; None for none."""
        return None

    def begin_request(self, info: RequestInfo) -> Sequence[Prefetch]:
        """At a request's start; may return prefetches."""
        return ()

    def end_request(self, summary: RequestSummary) -> None:
        """At a request's end."""

    def allocate(self, history: LayerHistory) -> NDArray[np.float64] | None:
        """Every ``allocate_every`` denoise or commit passes: capacity per layer, float64 [L].

        Must be non-negative and sum to the budget; the engine clips to [min(k, C), E], re-shares
        the excess by weight and rounds by largest remainder. None leaves capacities unchanged.
        """
        return None

    @property
    def allocation_period(self) -> int:
        """Passes between calls of :meth:`allocate`; 0 never."""
        return 0

    def prefetch(self, event: Event) -> Sequence[Prefetch]:
        """After a gate: what to copy for later layers."""
        return ()

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """At the gate: a :class:`Lane` per activated expert, [A]. Default: transfer every miss."""
        return np.where(event.missed, Lane.TRANSFER, Lane.GPU)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Right after dispatch: value per expert of ``layer``, float64 [E].

        The engine keeps the top C of residents and transferred; -inf is never kept; equal values
        fall back to the most recent use, then the lowest id. ``event`` is None when a prefetched
        expert arrives at another layer's pool. Default: all equal, which is LRU.
        """
        return np.zeros(self.experts, dtype=np.float64)

    def end_iteration(self, end: PassEnd) -> None:
        """After the LM head of a pass, with its confidence and acceptance."""

    def reside(self, event: Event) -> NDArray[np.int64] | None:
        """Clairvoyant bounds only (needs ``"future"``): set the residents before the gate, free.

        Returns expert ids, at most ``event.capacity``; None leaves the pool as it is.
        """
        return None

    # Set by the engine before `place`; a policy may read it.
    experts: int = field(default=0, init=False, repr=False)

    def describe(self) -> Mapping[str, Any]:
        """Parameters as given, for results and manifests."""
        from dataclasses import fields

        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}
