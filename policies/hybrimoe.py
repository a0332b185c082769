"""HybriMoE: score-aware caching, and a schedule that shares work out between GPU and CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.policy import Compiled, Event, Policy, Prefetches, Setting, asks_for_none, param
from oled_sim.trace import Kind

from ._hybrid_gate import Hybrid, ask_hybrimoe, decide_hybrimoe
from ._hybrid_schedule import RELEASED, line, measured, schedule
from ._placement import best_of_each_layer


@dataclass
class HybriMoE(Policy):
    """HybriMoE (DAC 2025) as released in PKU-SEC-Lab/HybriMoE 508a85b (``operators/experts.py``).

    **Cache.** Every expert has a score S, moved at each gate: S := a · s + (1 − a) · S for the
    ``top`` experts of highest router score s, S := (1 − a) · S for the others. An arrival evicts
    the resident of its layer with the least S. **Schedule.** Residents and then misses, heaviest
    first, stand in a line; the GPU takes from its head, the CPU from its tail, whoever would be
    done first. So the CPU may compute a resident. **Prefetch** of the experts of highest S of the
    next layer, off as in the code. Its priority by simulated impact, which the paper describes, was
    not released and is not here.

    Written for one token per pass; what a block of tokens leaves open, and what is chosen here:

    - *s* is the block's mean full gate, divided by its sum (the model's scores are sigmoids), or
      where a trace lacks that signal the gate mass of the event's own experts, which knows nothing
      of the others. ``tokens=first`` takes the first token alone, as the code does, and then its
      top-k gates, since traces hold full gates by block.
    - *top* is twice top-k (``top=0``).
    - *A pass of several tokens* is a prefill to the code: all on the GPU, misses copied to a
      buffer and kept only where a slot is free. Here prefill alone is treated so, and blocks are
      scheduled; ``prefill=hybrid`` and ``block=gpu`` change that. The code's bulk copy of the
      whole layer after next does not fit staging slots and is left out.
    - *Evicting one by one* keeps the C − 1 highest S of residents and arrivals, and the last
      arrival whatever its S (``admit=forced``); ``admit=scored`` drops it too if its S is least.
      Equal S: the least recently used goes first (the code: the one loaded first).
    - *Constants* come from the profile, ``constants=released`` takes the code's. Equal loads stand
      in the line in the event's order.
    - *At the start* every layer holds its lowest ids, as the code loads them (``initial=none``).
    - The code waits for all prefetches before a layer starts; here a layer waits for those that it
      needs.

    One pool for all layers (``--scope global``) compares S across layers; the code never does.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "gates"})
    wants: ClassVar[frozenset[str]] = frozenset({"full_gate"})
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {"constants": "released", "tokens": "first"}
    }

    a: float = param(0.5, "weight of the newest router score in S, above 0 to 1")
    top: int = param(0, "experts per event whose score enters S; 0 is twice top-k")
    tokens: Literal["block", "first"] = param("block", "whose router scores enter S")
    admit: Literal["forced", "scored"] = param("forced", "whether the last arrival always stays")
    constants: Literal["profile", "released"] = param("profile", "costs that the schedule assumes")
    prefill: Literal["gpu", "hybrid"] = param("gpu", "who computes prefill passes")
    block: Literal["hybrid", "gpu"] = param("hybrid", "who computes denoise and commit passes")
    prefetch_count: int = param(0, "experts of the next layer to prefetch", name="prefetch")
    initial: Literal["first", "none"] = param("first", "residents at the start")

    def __post_init__(self) -> None:
        """Refuse impossible numbers."""
        for name, wrong in (
            ("a", not 0 < self.a <= 1),
            ("top", self.top < 0),
            ("prefetch_count", self.prefetch_count < 0),
        ):
            if wrong:
                raise UsageError(f"hybrimoe: {name}={getattr(self, name)} is out of range")

    def place(self, setting: Setting) -> NDArray[np.bool_] | None:
        """Work out the constants; start with no scores and the lowest ids."""
        costs, sizes = setting.costs, setting.expert_bytes
        self._setting = setting
        self._constants = [RELEASED] * len(sizes)
        if self.constants == "profile":
            self._constants = [measured(costs, costs.h2d_us(float(size))) for size in sizes]
        self._most = self.top or 2 * setting.routing.top_k
        self._no_full_gate = np.zeros(1, np.bool_)
        self.clear()
        return best_of_each_layer(self._s, setting) if self.initial == "first" else None

    def clear(self) -> None:
        """Forget all scores."""
        self._s = np.zeros((len(self._setting.routing.layers), self.experts))

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Move the scores, then give every expert a lane."""
        self._move_scores(event)
        self._last = -1
        if self._all_on_gpu(event):
            return super().dispatch(event)
        missed = event.missed
        lanes = np.empty(len(missed), np.int64)
        link_us = 0.0
        if self.constants == "profile":
            link_us = self._setting.costs.cpu_link_us(len(event.routes))
        order = line(missed, event.tokens)
        constants = self._constants[event.layer]
        last = schedule(constants, link_us, order, missed, event.tokens, lanes)
        if last >= 0:
            self._last = int(event.experts[last])
        return lanes

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return S; what a pass on the GPU copies takes free slots only."""
        value = self._s[layer].copy()
        if event is not None and self._all_on_gpu(event):
            value[event.resident] += 2.0  # S is at most 1
        elif event is not None and self.admit == "forced" and self._last >= 0:
            value[self._last] = np.inf
        self._judged = layer, value
        return value

    def rescore(self, resident: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return S of all layers, with what was said of the layer in question."""
        layer, value = self._judged
        table = self._s.copy()
        table[layer] = value
        return table

    def prefetch(self, event: Event) -> Prefetches:
        """Ask for the experts of highest S of the next layer."""
        layer = event.layer + 1
        if self.prefetch_count == 0 or layer == len(self._s) or self._all_on_gpu(event):
            return ()
        best = np.argsort(-self._s[layer], kind="stable")[: self.prefetch_count]
        return np.column_stack([np.full(len(best), layer), best, self._s[layer, best]])

    def compiled(self) -> Compiled:
        """Offer the same as kernels."""
        experts, tables = self.experts, self._setting.costs.tables
        own = Hybrid(
            s=self._s,
            constants=np.array(self._constants, np.float64),
            tables=tables,
            a=float(self.a),
            first_token=self.tokens == "first",
            forced=self.admit == "forced",
            by_profile=self.constants == "profile",
            prefill_on_gpu=self.prefill == "gpu",
            block_on_gpu=self.block == "gpu",
            lacks=self._no_full_gate,
            best=np.empty(min(self._most, experts), np.int64),
            asked=np.empty(min(self.prefetch_count, experts), np.int64),
            new=np.empty(experts),
            order=np.empty(experts, np.int64),
            missed=np.empty(experts, np.bool_),
        )
        ask = ask_hybrimoe if self.prefetch_count else asks_for_none
        return Compiled(decide_hybrimoe, own, prefetch=ask)

    def notes(self) -> tuple[str, ...]:
        """Say so where the full gate was missing."""
        return (
            ("S follows top-k gates: the trace has no full_gate",) if self._no_full_gate[0] else ()
        )

    def _all_on_gpu(self, event: Event) -> bool:
        rule = self.prefill if event.kind == Kind.PREFILL else self.block
        return rule == "gpu"

    def _move_scores(self, event: Event) -> None:
        new = self._router_scores(event)
        scores = self._s[event.layer]
        best = np.argsort(-new, kind="stable")[: self._most]
        scores *= 1.0 - self.a
        scores[best] += self.a * new[best]

    def _router_scores(self, event: Event) -> NDArray[np.float64]:
        """Return s, float64 [E], with a sum of 1."""
        assert event.gates is not None, "the engine checked that the trace holds gates"
        new = np.zeros(self.experts)
        if self.tokens == "first":
            new[event.routes[0]] = event.gates[0]
        elif event.full_gate is not None:
            new[:] = event.full_gate
        else:
            self._no_full_gate[0] = True
            new[event.experts] = event.gate_mass
        return new / max(float(new.sum()), np.finfo(np.float64).tiny)
