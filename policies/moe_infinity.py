"""MoE-Infinity: prefetching by the expert activation matrices of earlier requests."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.policy import (
    Compiled,
    Event,
    PassInfo,
    Policy,
    Prefetches,
    RequestInfo,
    RequestSummary,
    Setting,
    param,
)
from oled_sim.trace import Kind

from ._candidates import UNLISTED, Candidates, Protect, by_class, ranked, scores_at_arrival
from ._eam import (
    EAMCollection,
    Match,
    RunningEAM,
    collect_eams,
    counts_by_request,
    load_eams,
    requests_of,
    save_eams,
)
from ._eam_gate import (
    LIKELY,
    MATCH,
    Infinity,
    arrive_infinity,
    ask_infinity,
    decide_infinity,
)
from ._eam_values import paper_values, priority_values

__all__ = ["MoEInfinity", "collect_eams", "load_eams", "save_eams"]


class Prediction(NamedTuple):
    """What predicts the rest of a request: an EAM float64 [L, E], and its experts by count."""

    eam: NDArray[np.float64]
    order: NDArray[np.int32]


@dataclass
class MoEInfinity(Policy):
    """MoE-Infinity (Xue et al. 2024), after the code at revision d617801 of 2026-03-03.

    Every request has an expert activation matrix (EAM): how many tokens each expert of each layer
    has served so far. After every gate the most similar EAM of an earlier request predicts the
    later layers, and their experts are prefetched, the likeliest and nearest first. Misses are
    transferred; the least visited residents leave.

    Where code, paper and the OLED-MoE paper's description differ:

    - *When* (``predict``). ``gate`` is what the code does; it has the call commented out for all
      models but two, which ``none`` is (demand only). ``request`` is how OLED-MoE describes the
      system: fill each layer at a request's start with the likeliest C experts and change nothing
      until the next request, so what is not among them is transferred, used and dropped.
      ``prompt`` does so after the prefill, whose EAM can then be matched. The default is the
      code's, since the paper of MoE-Infinity describes it too.
    - *Match* (``match``). The code flattens the layers up to l in all stored EAMs, so only those
      above l decide, as observed in earlier passes (``released``). The paper compares what has
      been observed (``observed``). Where nothing that is compared has been observed, all tie and
      the first row wins; ``unseen=sum`` takes the sum of all rows, as FineMoE's port does at its
      first layer. Only rows that hold an EAM are searched (in the code a missing one is 0/0).
    - *List*. Experts of layers l and up by (count + 1e-8) · (1 − (x − l) / (L + 1)), all of them
      (``most`` caps the list); it replaces the one before. Experts that the event uses come on
      demand. In a batch the last request's list wins.
    - *Whom a list protects from prefetches* (``protect``). In the code all on it, and it serves
      one pool: a prefetch to layer x takes the slot of an expert of a layer before l, or fails.
      With a pool per layer that would admit prefetches to free slots only. So ``pool``, the
      default, lists and protects no more than a pool can hold, the first C; ``list`` is literal.
      A prefetch without a victim is not sent.
    - *Eviction* (``evict``). Experts of the running event are locked: they leave last. ``visits``:
      the fewest visits leave first, counted since the start of the run and not reset, a tie to
      the lowest expert id, then the lowest layer. ``prefetch-bug``: as the code does it, on demand
      by ``visits``, but for a prefetch the *most* visited leave first. ``paper``: the least
      (share of the running EAM + ``epsilon``) · (1 − layer / L). ``priority``: the unused Python
      class: layer factor × share × visits, each normalised, with the current and later layers
      of the list protected; the encoder it expects has no layers here.

    What the engine's contract leaves out: the code counts a prefetch as a visit, and evicts one
    expert per miss while experts of the event that are done already may leave; here an event's
    experts are one set.

    Collections persist as files (docs/prefetching-policies.md); their rows are never replaced.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    learns: ClassVar[bool] = True
    replaces_queue: ClassVar[bool] = True
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "request": {"predict": "request", "unseen": "sum"},
        "demand": {"predict": "none"},
    }

    predict: Literal["gate", "request", "prompt", "none"] = param(
        "gate", "when experts are predicted and prefetched"
    )
    match_on: Match = param("released", "layers that are compared", name="match")
    unseen: Literal["first", "sum"] = param(
        "first", "the prediction while nothing that is compared was observed"
    )
    evict: Literal["visits", "prefetch-bug", "paper", "priority"] = param(
        "visits", "who leaves first"
    )
    protect: Protect = param("pool", "whom a list protects from prefetches")
    most: int = param(0, "entries of a list, 0 for all")
    count: Literal["tokens", "event"] = param("tokens", "what an activation adds to an EAM")
    eam: Literal["request", "block"] = param("request", "what an EAM spans")
    capacity: int = param(1000, "EAMs of the collection")
    collection: str = param("", "file with EAMs to start from")
    epsilon: float = param(1e-6, "added to shares by evict=paper")

    def __post_init__(self) -> None:
        """Refuse impossible constants."""
        for name, wrong in (
            ("most", self.most < 0),
            ("capacity", self.capacity < 1),
            ("epsilon", not self.epsilon >= 0),
        ):
            if wrong:
                raise UsageError(f"moe-infinity: {name}={getattr(self, name)} is out of range")
        if self._populates and self.protect == "list":
            raise UsageError(
                f"moe-infinity: predict={self.predict} fills pools with what they can hold, which"
                " protect=list contradicts: leave protect out"
            )
        self._learned: EAMCollection | None = None

    @property
    def _populates(self) -> bool:
        return self.predict in ("request", "prompt")

    def place(self, setting: Setting) -> None:
        """Start with the collection learned so far, or with the one of the file."""
        layers = len(setting.routing.layers)
        if self._learned is None:
            rows = np.zeros((0, layers, self.experts))
            if self.collection:
                rows = load_eams(Path(self.collection), layers, self.experts)
            if len(rows) > self.capacity:
                raise UsageError(
                    f"{self.collection} holds {len(rows)} EAMs, but the collection {self.capacity}:"
                    f" give capacity={len(rows)} or more"
                )
            self._learned = EAMCollection(layers, self.experts, self.capacity, rows)
        self._setting = setting
        self._shape = layers, self.experts
        # Of equal visits the lowest expert id leaves first, then the lowest layer.
        order = np.arange(self.experts) * layers + np.arange(layers)[:, None]
        self._tie = order / (layers * self.experts)
        self.clear()

    def clear(self) -> None:
        """Forget visits and requests; of the collection keep what history and file gave it."""
        assert self._learned is not None, "place() makes it"
        self._rows = copy.deepcopy(self._learned)
        self._visits = np.zeros(self._shape)
        self._candidates = Candidates(self._setting, self.protect, self.most)
        self._executing = np.zeros(self._shape, np.bool_)
        self._running: dict[int, RunningEAM] = {}
        self._of_history: set[int] = set()
        self._populated: set[int] = set()
        self._layer = self._block = 0
        self._arriving = False

    def begin_request(self, info: RequestInfo) -> Prefetches:
        """Start an EAM; fill the pools for the request, if that is when they are filled."""
        self._running[info.request] = RunningEAM(*self._shape)
        self._executing[:] = False
        if info.history:
            self._of_history.add(info.request)
        if self.predict == "request":
            return self._list(self._prediction(self._running[info.request], 0), 0)
        return ()

    def begin_iteration(self, info: PassInfo) -> Prefetches:
        """After the prefill fill the pools for the request, if that is when they are filled."""
        seen = [request for request, running in self._running.items() if running.counts.any()]
        new = [request for request in seen if request not in self._populated]
        if self.predict != "prompt" or info.kind == Kind.PREFILL or not new:
            return ()
        self._populated.update(new)
        self._executing[:] = False
        return self._list(self._prediction(self._running[new[-1]], 0), 0)

    def end_request(self, summary: RequestSummary) -> None:
        """Add the EAM to the collection; what history teaches survives."""
        self._finish(summary.request)
        del self._running[summary.request]

    def _finish(self, request: int) -> None:
        eam = self._running[request].counts
        self._rows.insert(eam)
        if request in self._of_history:
            self._learned = copy.deepcopy(self._rows)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Count the event; return the scores of its layer, or those that an arrival meets."""
        self._arriving = event is None
        if event is not None:
            self._observe(event)
        if self._setting.scope == "global":
            return np.zeros(self.experts)  # `rescore` says it
        return self._scores(slice(layer, layer + 1))[0]

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the scores of all layers: who executes changes with every event."""
        return self._scores(slice(None))

    def prefetch(self, event: Event) -> Prefetches:
        """Predict the layers from this one on, for each request; the last one's list stands."""
        wanted: Prefetches = ()
        for request in requests_of(event) if self.predict == "gate" else ():
            found = self._prediction(self._running[request], event.layer)
            wanted = self._list(found, event.layer)
        return wanted

    def compiled(self) -> Compiled | None:
        """Offer the same as kernels for a single request, but for the rarer rules."""
        plain = self.eam == "request" and self.evict in ("visits", "prefetch-bug")
        predicts = self.predict == "gate"
        if not plain or not self._candidates.by_pool or len(self._running) != 1:
            return None
        if predicts and self.unseen == "sum":
            return None
        (running,) = self._running.values()
        self._rows.open(running)
        units, counts, orders = self._rows.arrays
        own = Infinity(
            visits=self._visits,
            tie=self._tie,
            values=self._visits + self._tie,
            executing=self._executing,
            at=np.array([self._executing.any(axis=1).argmax()]),
            protected=self._candidates.protected,
            slots=self._candidates.slots,
            counts=running.counts,
            stale=running.stale,
            products=running.products,
            units=units,
            ranked=counts,
            orders=orders,
            access=self._rows.access,
            likeness=np.empty(self._rows.size),
            unit=np.empty(self.experts),
            match=MATCH[self.match_on],
            predicts=predicts,
            populates=self._populates,
            by_tokens=self.count == "tokens",
            most_first=self.evict == "prefetch-bug",
        )
        return Compiled(decide_infinity, own, prefetch=ask_infinity, arrive=arrive_infinity)

    def _observe(self, event: Event) -> None:
        """Add the event to visits and EAMs."""
        self._candidates.note_slots(event)
        self._layer = event.layer
        self._executing[:] = False
        self._executing[event.layer, event.experts] = True
        self._visits[event.layer, event.experts] += 1.0
        if self.eam == "block" and event.block != self._block:
            for request in requests_of(event):
                self._finish(request)
                self._running[request] = RunningEAM(*self._shape)
        self._block = event.block
        for request, counts in counts_by_request(event, self.experts):
            added = counts if self.count == "tokens" else (counts > 0).astype(np.float64)
            self._running[request].add(event.layer, added)

    def _prediction(self, running: RunningEAM, layer: int) -> Prediction | None:
        """Return what predicts the rest of a request, if there is anything."""
        rows = self._rows
        if rows.size == 0:
            return None
        row = rows.match(running, layer, self.match_on)
        if row is None and self.unseen == "sum":
            eam = rows.counts.sum(axis=0)
            return Prediction(eam, ranked(eam))
        row = row or 0
        rows.note_access(row)
        return Prediction(rows.counts[row], rows.order(row))

    def _list(self, found: Prediction | None, layer: int) -> NDArray[np.float64]:
        """Make the list that a prediction gives, from ``layer`` on."""
        if found is None:
            return np.zeros((0, 3))
        eam, layers = found.eam, len(found.eam)
        if self._candidates.by_pool:
            # Within a layer priorities are in the order of the counts, which are whole numbers.
            listed = self._candidates.replace_ordered(found.order[layer:], layer, self._executing)
            x, expert = listed[:, 0], listed[:, 1]
            worth = (eam[x, expert] + LIKELY) * (1.0 - (x - layer) / (layers + 1))
            return np.column_stack([x, expert, worth]).astype(np.float64)
        ahead = np.arange(layers)[:, None] - layer
        priority = np.where(ahead < 0, UNLISTED, (eam + LIKELY) * (1.0 - ahead / (layers + 1)))
        return self._candidates.replace(priority, self._executing)

    def _scores(self, rows: slice) -> NDArray[np.float64]:
        """Return the scores of some layers at this moment, float64 [n, E]."""
        protected, executing = self._candidates.protected, self._executing[rows]
        if self._populates and protected.any():
            return np.where(protected[rows], self._visits[rows], -np.inf)
        resident = self._setting.residents()
        values = self._values(rows, resident)
        if self._arriving:
            return scores_at_arrival(resident[rows], protected[rows], values)
        if self.evict == "priority":
            spared = protected.copy()
            spared[self._layer] = True
            ranks = np.where(executing, 2, spared[rows])
        else:
            ranks = executing.astype(np.int64)
        return by_class(ranks, values)

    def _values(self, rows: slice, resident: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return what experts of the same class in some layers are compared by, float64 [n, E]."""
        if self.evict == "paper":
            return paper_values(self._eam_of_all(), self.epsilon)[rows]
        if self.evict == "priority":
            visits = self._visits * resident
            return priority_values(self._eam_of_all(), visits, self._layer)[rows]
        if self.evict == "prefetch-bug" and self._arriving:
            return -self._visits[rows]
        return self._visits[rows] + self._tie[rows]

    def _eam_of_all(self) -> NDArray[np.float64]:
        """Return the sum of the running EAMs, which is that of the request unless in a batch."""
        total = np.zeros(self._shape)  # between requests prefetches still arrive
        for running in self._running.values():
            total += running.counts
        return total
