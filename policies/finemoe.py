"""FineMoE: prefetching by the expert maps of earlier iterations."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import lean
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

from ._candidates import UNLISTED, Candidates, Protect, by_class, ranked, scores_at_arrival
from ._expert_maps import ExpertMapStore, Found, Trajectory
from ._gate_rows import TokenMaps, block_row
from ._map_gate import (
    EMBEDDING,
    FULL_GATE,
    GATES,
    UNSELECTED,
    Maps,
    arrive_finemoe,
    ask_finemoe,
    decide_finemoe,
    renew_layer,
    selected,
)

# ruff: noqa: ANN001, ANN202


@dataclass
class FineMoE(Policy):
    """FineMoE (Yu et al. 2026), after the code at revision 5c58468 of 2025-09-25.

    Every iteration leaves an expert map: the gate probabilities of all experts in all layers,
    stored with the iteration's input embedding. Before the first layer the most similar embedding
    predicts layers 0..d−1; after the gate of layer l the most similar map, by the layers observed
    so far, predicts layers l+1+d and up. (Layer d belongs to neither, in the code as here.) With a
    similarity s the experts of each layer are selected by falling probability while their sum is
    at most 1 − s, and no fewer than the model's top-k; the others follow them in the queue.
    Misses are transferred; who leaves first has the least probability × visits.

    What a block of tokens changes, where code and paper differ, and what was chosen:

    - *The map of an iteration* (``aggregate``). The code has one per token, and as each token's
      list replaces the one before, the last token's stands. ``block`` takes the mean over the
      tokens. ``token`` keeps the code's: a map of each is stored, the last one is searched for.
      ``union`` searches for all: an expert is selected if it is for any token, with its highest
      probability, as a later revision (80717e9) unites the requests of a batch. All tokens share
      the block's mean embedding, the only one that traces hold. Requests of a batch are one block.
    - *Probabilities*. LLaDA2's gate is a sigmoid: rows are normalised to sum 1. Without the signal
      ``full_gate``, and for tokens, rows are made of the top-k gates, the others being 0;
      without ``gates`` of token counts. Without ``embedding`` nothing predicts the first layers.
      Results say what was missing.
    - *d* is 6 of 24 layers in the code: a quarter of the depth here (``distance``).
    - *Selection* (``select``). The code keeps the experts whose sum does not pass 1 − s
      (``released``), the paper (and the later revision) the first that reach it (``paper``).
    - *Queue*. All experts of the predicted layers, by probability · (1 − (x − start) / (end + 1))
      if selected, + 1e-6 for all. The code leaves the order of equal priorities open: nearer
      layers, then higher probabilities.
    - *Whom a list protects from prefetches* (``protect``): see ``moe-infinity``; the code is
      ``list`` with one pool. Here the code protects against demand too, and computes a miss that
      finds no victim beside the pool; instead the list then gives way.
    - *Eviction* (``evict``). Probabilities are those predicted last, visits since the expert came;
      both are 0 once it left. ``product`` is the rule; the code truncates it to a whole number
      (``truncated``), so that most tie. Ties fall to the engine's order; experts of the running
      event leave last.
    - *Store*. 1000 rows; a new one then replaces the most redundant, by w · cos(embeddings) +
      (1 − w) · cos(maps), w = d / L. ``online`` learns from every request, ``offline`` from the
      history split alone.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids"})
    wants: ClassVar[frozenset[str]] = frozenset({"gates", "full_gate", "embedding"})
    learns: ClassVar[bool] = True
    replaces_queue: ClassVar[bool] = True

    aggregate: Literal["block", "token", "union"] = param("block", "what has a map of its own")
    distance: int = param(0, "d, layers between a gate and what it predicts; 0: a quarter of all")
    select: Literal["released", "paper"] = param("released", "how the sum of probabilities ends")
    least: int = param(0, "fewest selected experts of a layer; 0: the model's top-k")
    evict: Literal["product", "truncated"] = param("product", "what is compared")
    protect: Protect = param("pool", "whom a list protects from prefetches")
    most: int = param(0, "entries of a list, 0 for all")
    store: Literal["online", "offline"] = param("online", "which requests it learns from")
    capacity: int = param(1000, "maps of the store")

    def __post_init__(self) -> None:
        """Refuse impossible constants."""
        for name in ("distance", "least", "most"):
            if getattr(self, name) < 0:
                raise UsageError(f"finemoe: {name}={getattr(self, name)} is out of range")
        if self.capacity < 1:
            raise UsageError(f"finemoe: capacity={self.capacity} is out of range")
        self._learned: ExpertMapStore | None = None
        self._lacks = np.zeros(3, np.bool_)

    def place(self, setting: Setting) -> None:
        """Start with the store learned so far."""
        self._setting = setting
        self._shape = layers, experts = len(setting.routing.layers), self.experts
        # A quarter of the depth, half up: 5 of 19 layers.
        self._d = self.distance or max(1, (layers + 2) // 4)
        self._least = min(self.least or setting.routing.top_k, experts)
        if self._learned is None:
            weight = min(1.0, self._d / layers)
            self._learned = ExpertMapStore(layers, experts, self.capacity, weight)
        self.clear()

    def clear(self) -> None:
        """Forget visits, predictions, and what was stored since history."""
        assert self._learned is not None, "place() makes it"
        self._maps = copy.deepcopy(self._learned)
        self._candidates = Candidates(self._setting, self.protect, self.most)
        self._visits = np.zeros(self._shape)
        self._probability = np.zeros(self._shape)
        self._executing = np.zeros(self._shape, np.bool_)
        self._arriving = self._history = False
        self._start_pass(None)

    def begin_request(self, info: RequestInfo) -> tuple[()]:
        """Remember what the request is for."""
        self._history = info.history
        return ()

    def begin_iteration(self, info: PassInfo) -> Prefetches:
        """Store the last pass, and predict the first layers by the embedding of this one."""
        self._finish_pass()
        self._start_pass(info.embedding)
        self._executing[:] = False
        if info.embedding is None:
            self._lacks[EMBEDDING] = True
        found = self._maps.nearest_embedding(info.embedding)
        return self._list([found], 0, min(self._d, self._shape[0]))

    def end_request(self, summary: RequestSummary) -> None:
        """Store the last pass; what history teaches survives."""
        self._finish_pass()
        self._start_pass(None)
        if self._history:
            self._learned = copy.deepcopy(self._maps)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Count the event; return the scores of its layer, or those that an arrival meets."""
        self._arriving = event is None
        resident = self._setting.residents()
        if event is not None:
            self._count(event, resident)
        if self._setting.scope == "global":
            return np.zeros(self.experts)  # `rescore` says it
        return self._scores(resident, slice(layer, layer + 1))[0]

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the scores of all layers: who executes and is protected changes all the time."""
        return self._scores(resident, slice(None))

    def prefetch(self, event: Event) -> Prefetches:
        """Add the layer to the trajectory, and predict the layers from d beyond the next on."""
        self._observe(event)
        start = event.layer + 1 + self._d
        if start >= self._shape[0]:
            return ()
        searched = [self._trajectory]
        if self.aggregate != "block":
            searched = self._tokens.trajectories[0 if self.aggregate == "union" else -1 :]
        found = [self._maps.nearest_trajectory(trajectory) for trajectory in searched]
        return self._list(found, start, self._shape[0])

    def compiled(self) -> Compiled | None:
        """Offer the same as kernels for maps of blocks, with a pool per layer."""
        if self.aggregate != "block" or not self._candidates.by_pool:
            return None
        trajectory, size = self._trajectory, self._visits.size
        self._maps.open(trajectory)
        maps, columns, square, orders = self._maps.arrays
        own = Maps(
            visits=self._visits,
            probability=self._probability,
            executing=self._executing,
            protected=self._candidates.protected,
            slots=self._candidates.slots,
            lacks=self._lacks,
            map=trajectory.map,
            reached=trajectory.reached,
            products=trajectory.products,
            maps=maps,
            columns=columns,
            square=square,
            orders=orders,
            row=np.empty(self.experts),
            ranks=np.empty(self.experts, np.int64),
            flat=np.empty(size),
            number=np.empty(self._shape[0], np.int64),
            found=np.empty((size, 3), np.int64),
            size=self._maps.size,
            distance=self._d,
            least=self._least,
            released=self.select == "released",
            truncated=self.evict == "truncated",
        )
        return Compiled(decide_finemoe, own, prefetch=ask_finemoe, arrive=arrive_finemoe)

    def notes(self) -> list[str]:
        """Say what the trace lacked."""
        notes = []
        if self._lacks[GATES]:
            notes.append("without gate scores, expert maps are made of token counts.")
        elif self._lacks[FULL_GATE]:
            notes.append("expert maps are made of top-k gates; probabilities of others count as 0.")
        if self._lacks[EMBEDDING]:
            notes.append(
                f"without input embeddings the first {self._d + 1} layers are never predicted."
            )
        return notes

    def _start_pass(self, embedding: NDArray[np.float32] | None) -> None:
        self._trajectory = Trajectory(*self._shape)
        self._tokens = TokenMaps(*self._shape)
        self._embedding = embedding

    def _finish_pass(self) -> None:
        """Store what the pass has shown."""
        if self.store == "offline" and not self._history:
            return
        maps = [self._trajectory] if self.aggregate == "block" else self._tokens.trajectories
        for trajectory in maps:
            self._maps.insert(trajectory, self._embedding)

    def _observe(self, event: Event) -> None:
        """Add the gate probabilities of an event to the maps of the pass."""
        full_gate = event.full_gate if self.aggregate == "block" else None
        if full_gate is None:
            self._lacks[GATES if event.gates is None else FULL_GATE] = True
        if self.aggregate == "block":
            self._trajectory.observe(event.layer, block_row(event, self.experts))
        else:
            self._tokens.add(event)

    def _count(self, event: Event, resident: NDArray[np.bool_]) -> None:
        """Forget who left since the last event, and count the visits of this one.

        Whoever is resident without a visit was prefetched, and its copy counts as one.
        """
        _renew(self._visits, self._probability, resident)
        self._candidates.note_slots(event)
        self._executing[:] = False
        self._executing[event.layer, event.experts] = True
        self._visits[event.layer, event.experts] += 1.0

    def _list(self, found: Sequence[Found | None], start: int, end: int) -> NDArray[np.float64]:
        """Make the list that stored maps give for the layers from ``start`` to before ``end``."""
        # Of equal rows the least similar one selects all that the others do.
        scores: dict[int, float] = {}
        for each in found:
            if each is not None:
                scores[each.row] = min(each.score, scores.get(each.row, np.inf))
        if not scores:
            return np.zeros((0, 3))
        if len(scores) == 1 and self._candidates.by_pool:
            ((row, score),) = scores.items()
            return self._list_one(row, score, start, end)
        bands = [self._maps.map(row)[start:end] for row in scores]
        chosen = [
            selection(band, score, self._least, self.select)
            for band, score in zip(bands, scores.values(), strict=True)
        ]
        band, selected = np.max(bands, axis=0), np.any(chosen, axis=0)
        decay = 1.0 - np.arange(end - start)[:, None] / (end + 1)
        priority, tie = np.full(self._shape, UNLISTED), np.zeros(self._shape)
        priority[start:end] = np.where(selected, band * decay, 0.0) + UNSELECTED
        tie[start:end] = self._probability[start:end] = band
        return self._candidates.replace(priority, self._executing, tie)

    def _list_one(self, row: int, score: float, start: int, end: int) -> NDArray[np.float64]:
        """Make the list of a single stored map: priorities fall as its probabilities do."""
        probability, order = self._maps.stored(row)
        band, order = probability[start:end], order[start:end]
        number = np.empty(end - start, np.int64)
        _count_selected(
            band, order, _threshold(score), self._least, self.select == "released", number
        )
        self._probability[start:end] = band
        listed = self._candidates.replace_ordered(order, start, self._executing)
        x, expert, place = listed[:, 0] - start, listed[:, 1], listed[:, 2]
        worth = band[x, expert] * (1.0 - x / (end + 1))
        priority = np.where(place < number[x], worth, 0.0) + UNSELECTED
        return np.column_stack([listed[:, :2], priority]).astype(np.float64)

    def _scores(self, resident: NDArray[np.bool_], rows: slice) -> NDArray[np.float64]:
        """Return the scores of some layers at this moment, float64 [n, E]."""
        protected = self._candidates.protected[rows]
        values = self._probability[rows] * np.maximum(self._visits[rows], 1.0)
        values = np.floor(values) if self.evict == "truncated" else values
        if self._arriving:
            return scores_at_arrival(resident[rows], protected, values)
        return by_class(np.where(self._executing[rows], 2, protected), values)


def selection(
    probability: NDArray[np.float64], score: float, least: int, rule: Literal["released", "paper"]
) -> NDArray[np.bool_]:
    """Select experts of each layer by falling probability, bool [n, E].

    ``released``: as many as have a sum of at most clip(1 − score, 0, 1); ``paper``: one more. No
    fewer than ``least``, and none of a layer without any probability. Equal ones: lowest id first.
    """
    probability = np.ascontiguousarray(probability)
    order, number = ranked(probability), np.empty(len(probability), np.int64)
    _count_selected(probability, order, _threshold(score), least, rule == "released", number)
    chosen = np.zeros(probability.shape, np.bool_)
    np.put_along_axis(chosen, order, np.arange(order.shape[1]) < number[:, None], axis=1)
    return chosen


def _threshold(score: float) -> float:
    return min(1.0, max(0.0, 1.0 - score))


@lean
def _count_selected(probability, order, threshold, least, released, number):
    """Write how many of the likeliest experts of each layer are selected to int64 [n]."""
    for x in range(len(number)):
        number[x] = selected(probability[x], order[x], threshold, least, released)


@lean
def _renew(visits, probability, resident):
    """Forget experts that left; those that came without a visit have one now. All [L, E]."""
    for x in range(len(visits)):
        renew_layer(visits[x], probability[x], resident[x])
