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

Parameters are given as ``--policy ./mine.py:half_life_passes=8``. docs/writing-a-policy.md goes
through the hooks with a complete example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import Field, dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.geometry import CostGeometry, RoutingGeometry

if TYPE_CHECKING:
    from oled_sim.costs.lanes import LaneCosts
    from oled_sim.engine.whatif import LayerTimer

__all__ = [
    "NEVER",
    "Compiled",
    "Event",
    "Future",
    "Gate",
    "Lane",
    "LayerHistory",
    "PassEnd",
    "PassInfo",
    "Policy",
    "Prefetch",
    "Prefetches",
    "RequestInfo",
    "RequestSummary",
    "Setting",
    "param",
    "parameters",
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

    ``capacity``: int64 [L] slots per layer at the start (under global scope an equal share of the
    pool). ``budget``: slots in all. ``expert_bytes``: int64 [L]. ``scope``: ``layer`` or
    ``global``. ``timer`` tells what the engine would charge for a decision. ``residents()`` returns
    who is resident at the moment of the call, in every layer: bool [L, E], a copy.
    """

    routing: RoutingGeometry
    cost: CostGeometry
    capacity: NDArray[np.int64]
    budget: int
    expert_bytes: NDArray[np.int64]
    costs: LaneCosts
    timer: LayerTimer
    scope: str
    residents: Callable[[], NDArray[np.bool_]]


class RequestInfo(NamedTuple):
    """A request that starts.

    ``counted``: its figures are reported. ``history``: it belongs to the split that policies may
    learn from; warm-up requests are neither.
    """

    request: int
    counted: bool
    history: bool = False


class RequestSummary(NamedTuple):
    """A request that ended, with the engine's own figures of its decode passes.

    ``hits``: Σ |R ∩ A|. ``activations``: Σ |A|; in a batch those of the batch's events.
    """

    request: int
    passes: int
    hits: int
    activations: int


class PassInfo(NamedTuple):
    """A pass that starts: what is known before its first layer, and nothing about its routes.

    Of a batch: ``request`` and ``block`` are those of the first request present, ``kind`` is as in
    :class:`Event`. ``embedding``: float32 [d], mean input embedding of the tokens, or None.
    """

    request: int
    pass_index: int
    kind: int
    block: int
    embedding: NDArray[np.float32] | None


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


NEVER = 2**62
"""Number of an event that does not come: later than all others, and exact as a float64."""


class Future:
    """What comes after a gate, as far as it is told: next uses, for policies that need ``future``.

    A cursor: it answers for the present event, from its gate on until the last hook of that gate
    has returned, and for nobody at any other time. It knows the whole run in trace order, up to
    the point where the cache is emptied: at the next request under ``--cold``, at the end of the
    history split.
    """

    def next_use(self, layer: int) -> NDArray[np.int64]:
        """Return the next event that activates each expert of a layer, int64 [E].

        Events are numbered through the run, over all layers (as in ``Event.last_use // E``); the
        present one does not count. ``NEVER`` where there is none. Numbers do not age: they are
        right until the layer's next event.

        Raises:
            PolicyError: the policy does not declare ``"future"`` in ``needs``, or no gate is open.
        """
        raise NotImplementedError


@dataclass(slots=True)
class Event:
    """One MoE layer of one pass, as known at its gate.

    A activated experts, T tokens, k experts per token. Arrays are read-only copies that belong to
    the event: they stay as they are, and lead nowhere else.

    A signal that the policy declares neither in ``needs`` nor in ``wants`` is None.

    Attributes:
        request: of the first token; ``owner`` says it per token. block: likewise.
        layer: index into ``routing.layers``.
        pass_index: number of the pass in that request. kind: a ``Kind``; of a batch ``DENOISE`` if
            any request denoises, else ``COMMIT`` if any commits.
        experts: int64 [A], activated experts in recency order (least recently routed first).
        tokens: int64 [A], tokens routed to each (n_e).
        gate_mass: float64 [A], sum of gate scores, NaN unless ``gates`` is declared.
        routes: uint8/uint16 [T, k]; gates: float32 [T, k] or None.
        confidence: float64 [T], by the run's confidence mode (spec §5), 1 where none is known.
        position: int32 [T]; state: uint8 [T]; owner: int32 [T], request of each token.
        full_gate: float32 [E] or None; embedding: float32 [d] or None.
        resident: bool [E], every byte arrived at the gate.
        capacity: slots of the layer now (of the whole pool under global scope).
        last_use: int64 [E], recency stamp before this event: larger is more recent, -1 never
            used; ``last_use // E`` is the number of the event in the run.
        future: next uses, only for policies that need ``"future"``.
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
    confidence: NDArray[np.float64] | None
    position: NDArray[np.int32]
    state: NDArray[np.uint8] | None
    full_gate: NDArray[np.float32] | None
    embedding: NDArray[np.float32] | None
    resident: NDArray[np.bool_]
    capacity: int
    last_use: NDArray[np.int64]
    owner: NDArray[np.int32]
    future: Future

    @property
    def missed(self) -> NDArray[np.bool_]:
        """bool [A], the activated experts that are not resident (M = A minus R)."""
        return ~self.resident[self.experts]


class Prefetch(NamedTuple):
    """A request to copy an expert before its gate; higher ``priority`` goes first."""

    layer: int
    expert: int
    priority: float


Prefetches = Sequence[Prefetch] | NDArray[np.float64]
"""Entries one by one, or as an array [n, 3] of layer, expert and priority."""


class Gate(NamedTuple):
    """What a kernel of :meth:`Policy.compiled` may read: the events of a batch, whole arrays.

    V events, N routing rows; event v has the rows ``rows[v]:rows[v + 1]`` and the activated experts
    ``offset[v]:offset[v + 1]``. Reading another event than v is reading the future.

    Attributes:
        rows: int64 [V + 1]. routes: uint8/uint16 [N, k].
        gates: float32 [N, k]; NaN [1, 1] unless ``needs`` or ``wants`` names ``gates``.
        confidence: float64 [N]; NaN [1] unless ``needs`` or ``wants`` names ``confidence``.
        offset: int64 [V + 1]. experts: uint16 [ΣA]. tokens: int32 [ΣA].
        full_gate: float32 [V, E]; [0, 0] if the trace lacks it, or neither ``needs`` nor ``wants``
            names it.
        event_pass: int64 [V], the pass of each event. kind: uint8 [P], see :class:`Event`.
    """

    rows: NDArray[np.int64]
    routes: NDArray[Any]
    gates: NDArray[np.float32]
    confidence: NDArray[np.float64]
    offset: NDArray[np.int64]
    experts: NDArray[np.uint16]
    tokens: NDArray[np.int32]
    full_gate: NDArray[np.float32]
    event_pass: NDArray[np.int64]
    kind: NDArray[np.uint8]


def asks_for_none(own: Any, gate: Gate, v: int, layer: int, resident: Any, wanted: Any) -> int:
    """Stand for a ``prefetch`` that asks for nothing as the policy is set."""
    return 0


class Compiled(NamedTuple):
    """A policy's decision as kernels, see :meth:`Policy.compiled`.

    All are compiled by :func:`oled_sim.engine.jit.lean`. L layers, E experts.

    Attributes:
        decide: ``decide(own, gate, v, layer, resident, lanes, scores)`` fills ``lanes`` int64 [A]
            and ``scores`` float64 [E] for event ``v``; ``resident``: bool [E], of the layer.
        own: a tuple of arrays and numbers, handed on as it is.
        scores: whether ``decide`` fills them; without, all experts are equal, as if ``score`` were
            not overridden.
        prefetch: ``prefetch(own, gate, v, layer, resident, wanted)`` comes after ``decide``, fills
            the first n rows of ``wanted`` float64 [L·E, 3] with layer, expert and priority, and
            returns n; ``resident``: bool [L, E]. ``asks_for_none`` is known to ask for none.
            Without one a policy that overrides ``prefetch`` is asked through its hooks.
        arrive: ``arrive(own, layer, resident, scores)`` stands for ``score(layer, None)`` when a
            prefetch arrives; ``resident``: bool [L, E]. Without one ``score`` is called.
    """

    decide: Callable[..., None]
    own: tuple[Any, ...]
    scores: bool = True
    prefetch: Callable[..., int] | None = None
    arrive: Callable[..., None] | None = None


def param(default: Any, help: str, *, name: str | None = None) -> Any:
    """Declare a policy parameter with its default and one line of help.

    ``name``: what users call it, where the field cannot have that name because a hook has it.
    """
    metadata = {"help": help, "name": name}
    if isinstance(default, list | dict | set):  # every policy gets one of its own
        return field(default_factory=lambda: copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def parameters(policy: Policy | type[Policy]) -> dict[str, Field[Any]]:
    """Return the parameters of a policy: what users call each, and its dataclass field."""
    return {f.metadata.get("name") or f.name: f for f in fields(policy) if f.init}


@dataclass
class Policy:
    """Base class: keeps the most recently used, transfers every miss, prefetches nothing.

    Hooks of one event are called in the order ``reside``, ``dispatch``, ``score``, ``rescore``,
    ``prefetch``, each once.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    """Signals the trace must hold; ``"future"`` grants :meth:`reside`, :meth:`foresee` and
    ``event.future``."""

    residency: ClassVar[Literal["budget", "none", "all"]] = "budget"
    """What ``oled-sim run`` lets it hold: the budget asked for, nothing, or every expert.

    For references that mean something with one budget only; they are then run once, and their
    results say with which. In Python whoever runs a policy gives the budget.
    """

    bound: ClassVar[Literal["no", "residency", "hits"]] = "no"
    """What no other policy can do better, for `oled-sim bounds`.

    ``residency``: residents are chosen anew before every gate, free of charge, so none that does
    not prefetch hits more or takes less time. ``hits``: none that does not prefetch hits more,
    given the same capacities, scope and initial residents; it may be slower.
    """

    moves_slots: ClassVar[bool] = False
    """Whether :meth:`place` may fill more than the equal share of a layer.

    As long as all fits the budget, every layer then has the slots that it fills, down to none, and
    what is left over is shared by those numbers.
    """

    wants: ClassVar[frozenset[str]] = frozenset()
    """Further signals that it uses where the trace holds them; None or NaN where it does not."""

    learns: ClassVar[bool] = False
    """Whether the requests of the split ``history`` are simulated first, for it to learn from.

    They start from an empty cache; afterwards the cache is emptied and :meth:`place` called again.
    """

    replaces_queue: ClassVar[bool] = False
    """Whether a list from :meth:`prefetch` first cancels what is still queued."""

    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Names for sets of parameters: ``--policy name:variant``."""

    def place(self, setting: Setting) -> NDArray[np.bool_] | None:
        """Before the first request: initial residents, bool [L, E], loaded free; None for none.

        The place to allocate state. With C ≥ E everything is resident whatever is returned.
        """
        return None

    def clear(self) -> None:
        """Forget counters, but not learned history; called before each request of a cold run."""

    def begin_request(self, info: RequestInfo) -> Prefetches:
        """At a request's start; may return prefetches."""
        return ()

    def begin_iteration(self, info: PassInfo) -> Prefetches:
        """At the start of every pass, before its first layer; may return prefetches."""
        return ()

    def end_request(self, summary: RequestSummary) -> None:
        """At a request's end."""

    def allocate(self, history: LayerHistory) -> NDArray[np.float64] | None:
        """Every ``allocation_period`` denoise or commit passes: slots per layer, float64 [L].

        Must be non-negative and sum to the budget; the engine clips to [min(k, C), E], re-shares
        the excess by weight and rounds by largest remainder. None leaves capacities unchanged.
        Not called under global scope, nor when nothing or everything fits.
        """
        return None

    @property
    def allocation_period(self) -> int:
        """Passes between calls of :meth:`allocate`; 0 never."""
        return 0

    @property
    def stack(self) -> bool:
        """Whether a larger cache always holds what a smaller one holds, with these parameters.

        So it is if it transfers every miss, scores every expert with a finite number that depends
        neither on who is resident nor on capacities, and places, prefetches and allocates nothing.
        ``oled-sim curve`` then finds its hits with every cache size in one pass.
        """
        return False

    def prefetch(self, event: Event) -> Prefetches:
        """After a gate: what to copy for later layers. An entry queued again takes a new turn."""
        return ()

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """At the gate: a :class:`Lane` per activated expert, [A]. Default: transfer every miss.

        Demand transfers start in the order of ``event.experts``. An expert whose prefetch is in
        flight is waited for, whatever lane a miss is given.
        """
        return event.missed.astype(np.int64)  # Lane.TRANSFER or Lane.GPU

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Right after dispatch: value per expert of ``layer``, float64 [E].

        The engine keeps the top C of residents and transferred; -inf is never kept; equal values
        fall back to the most recent use, then the lowest id. ``event`` is None when a prefetched
        expert arrives at another layer's pool. Default: all equal, which is LRU.
        """
        return np.zeros(self.experts, dtype=np.float64)

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64] | None:
        """Under global scope, after every ``score``: values of all layers, float64 [L, E].

        For a policy whose scores age; it replaces what ``score`` returned. None keeps the value
        that each layer's last event gave. ``resident``: bool [L, E].
        """
        return None

    def revise(self, layer: int, event: Event) -> NDArray[np.float64] | None:
        """Under ``confidence=end``: new values after the LM head, float64 [E]; None keeps the old.

        Called for every event of the pass, in order, with the confidence of that very pass in
        ``event.confidence``. Who is resident was fixed at the gate, since no slot can be held
        until the LM head; the new values decide whenever scores are compared before the layer's
        next event: when a layer shrinks, a prefetch arrives, or layers share one pool.
        """
        return None

    def end_iteration(self, end: PassEnd) -> None:
        """After the LM head of a pass, with its confidence and acceptance."""

    def foresee(self, events: Iterable[Event]) -> NDArray[np.int64] | None:
        """Clairvoyant bounds only (needs ``"future"``): before a pass, all of its events, once.

        Returns the slots of each layer for this pass, int64 [L], which must fit the budget; None
        leaves capacities as they are. Under global scope one pool serves all layers, and what is
        returned changes nothing. The events show residents and capacities from before the pass.
        """
        return None

    def reside(self, event: Event) -> NDArray[np.int64] | None:
        """Clairvoyant bounds only (needs ``"future"``): set the residents before the gate, free.

        Returns expert ids, at most ``event.capacity``; None leaves the pool as it is.
        """
        return None

    def compiled(self) -> Compiled | None:
        """After ``begin_iteration``: kernels that stand for hooks, bit for bit the same; or None.

        One stands for ``dispatch`` and ``score``; the engine then calls neither, and runs whole
        batches in one call unless something is prefetched or ``begin_iteration`` has a say. Not for
        policies with ``reside`` or ``foresee``, for those with ``prefetch`` only if a kernel stands
        for it, with ``rescore`` only while every layer has a pool of its own; other hooks are
        called as ever, ``score`` among them where there is no event and no kernel for it. Not
        inherited: a subclass must offer its own.
        """
        return None

    def notes(self) -> Sequence[str]:
        """After a run: what readers of its results should know, a sentence each.

        Such as what it could not do because the trace lacks a signal that it ``wants``.
        """
        return ()

    # Set by the engine before `place`; a policy may read it.
    experts: int = field(default=0, init=False, repr=False)

    def describe(self) -> Mapping[str, Any]:
        """Parameters as given, for results and manifests."""
        return {name: getattr(self, f.name) for name, f in parameters(self).items()}
