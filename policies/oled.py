"""OLED-MoE: inter-iteration expert retention for diffusion language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.policy import Compiled, Event, LayerHistory, Policy, Setting, param

from ._cooperative import priorities, room_for_misses, split_cooperatively
from ._exact_dispatch import split_exactly
from ._exact_split import gpu_floor_us, least_slowdowns
from ._kernels import PSI as PSI_NUMBER
from ._kernels import STALE, decide_oled, shares, smooth, split_data
from ._load_split import split_by_load

PSI = {"linear": np.positive, "square": np.square, "sqrt": np.sqrt, "one": np.ones_like}
"""ψ(c); ``one`` ignores confidence. All are exact to the last bit on every machine, unlike pow."""


@dataclass
class OLED(Policy):
    """OLED-MoE, section 4 of the paper, from its text alone (no code was at hand).

    **Retention** (4.3). The priority of an expert is Σ gate · ψ(confidence) over the tokens routed
    to it, normalised over the layer; residents that the event does not activate have priority 0.
    Every fifth pass the budget is shared anew, C_l ∝ a_l · u_l with smoothed activation ratio
    a_l and utilization u_l. **Compensation** (4.4). A fraction ρ = t / (t + T_H2D) of the misses,
    those of highest priority, is transferred; bounded swaps follow that lower
    J = T_comp − λ Σ p over the transferred.

    What the paper leaves open, and what is chosen here:

    - *Confidence* of pass i exists only after its LM head; the run's ``confidence`` rule decides
      what a gate sees (the last known one by default). No rule can hold a slot until then.
    - *Gates* are the renormalised top-k weights of the trace; a common factor cancels.
    - *Order among residents of priority 0*: ``stale``, the most recently used first.
    - *Smoothing*: new = ``smoothing`` · window + (1 − ``smoothing``) · old, windows of
      ``allocate_every`` denoise and commit passes; the first window stands alone. A layer
      without an event keeps its values. The engine clips to [min(k, C), E] and rounds.
    - *t* is the makespan of |M| experts at n̄ tokens, divided by |M|; n̄ is the event's own mean
      over its misses, or ``mean_tokens`` if given (the paper profiles one number offline).
    - *About ρ|M|*: rounded half up; swaps keep the number within ``slack`` of ρ|M|.
    - *T_comp* is the engine's own time from the gate to the end of all lanes, with a free slot for
      every arrival. *λ* = ``reuse_weight`` · T_H2D · |A|: an average activated expert, whose
      priority is 1/|A|, is worth one transfer.
    - *A swap* exchanges the transferred expert of lowest priority for the CPU expert of highest
      load, or moves one expert over: the lowest priority to the CPU, the highest priority to the
      transfers. The best of the three is made if it lowers J, at most ``swaps`` times.

    ``dispatch=exact`` is no part of the paper, and tells what its two stages lose: of all splits,
    near ρ|M| or not, the one with the least J (``policies/_exact_dispatch.py`` says how exactly).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"ids", "gates", "confidence"})
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "priority": {"allocate": "uniform", "dispatch": "transfer"},
        "priority+adapt": {"dispatch": "transfer"},
        "priority+adapt+coop": {},
        "exact": {"dispatch": "exact"},
    }

    psi: Literal["linear", "square", "sqrt", "one"] = param("linear", "ψ, how confidence weighs")
    stale: Literal["recency", "last_priority", "id"] = param(
        "recency", "order among residents of priority 0"
    )
    allocate_by: Literal["adapt", "uniform"] = param(
        "adapt", "how the budget is shared between layers", name="allocate"
    )
    allocate_every: int = param(5, "denoise and commit passes between allocations")
    smoothing: float = param(0.5, "weight of the newest window in a_l and u_l, above 0 to 1")
    dispatch_by: Literal["coop", "load", "transfer", "exact"] = param(
        "coop", "what becomes of misses", name="dispatch"
    )
    mean_tokens: float = param(0.0, "n̄, tokens per missed expert; 0 takes the event's own mean")
    reuse_weight: float = param(1.0, "λ in units of T_H2D · |A|")
    swaps: int = param(8, "most swaps of an event")
    slack: float = param(0.1, "how far swaps may leave ρ|M|, as a fraction of it")

    def __post_init__(self) -> None:
        """Refuse impossible constants."""
        for name, wrong in (
            ("allocate_every", self.allocate_every < 1),
            ("smoothing", not 0 < self.smoothing <= 1),
            ("mean_tokens", not self.mean_tokens >= 0),
            ("reuse_weight", not self.reuse_weight >= 0),
            ("swaps", self.swaps < 0),
            ("slack", not self.slack >= 0),
        ):
            if wrong:
                raise UsageError(f"oled: {name}={getattr(self, name)} is out of range")

    def place(self, setting: Setting) -> None:
        """Start with no priorities and no statistics."""
        self._setting = setting
        self._misses = room_for_misses(self.experts)
        self._floors = least_slowdowns(setting.costs), gpu_floor_us(setting.costs)
        self.clear()

    def clear(self) -> None:
        """Forget priorities and smoothed statistics."""
        layers = len(self._setting.routing.layers)
        self._last = np.zeros((layers, self.experts))
        self._ratio = np.full(layers, np.nan)
        self._utilization = np.full(layers, np.nan)

    @property
    def allocation_period(self) -> int:
        """Every fifth pass, unless the budget stays uniform."""
        return self.allocate_every if self.allocate_by == "adapt" else 0

    @property
    def stack(self) -> bool:
        """Whether priority alone decides: all misses are transferred, and no budget moves."""
        return self.dispatch_by == "transfer" and self.allocate_by == "uniform"

    def allocate(self, history: LayerHistory) -> NDArray[np.float64] | None:
        """Share the budget by w_l = a_l · u_l; keep it where no layer has any weight."""
        self._ratio = smooth(self._ratio, history.activation_ratio, self.smoothing)
        self._utilization = smooth(self._utilization, history.utilization, self.smoothing)
        wanted = shares(self._ratio, self._utilization, history.budget)
        return wanted if wanted.any() else None

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Work out the event's priorities, then decide about its misses."""
        self._priority = self._priorities(event)
        if self.dispatch_by == "load":
            return split_by_load(event, self._setting)
        if self.dispatch_by == "transfer":
            return super().dispatch(event)
        lanes = event.missed.astype(np.int64)  # Lane.TRANSFER or Lane.GPU
        timer = self._setting.timer
        split_cooperatively(
            timer.lanes,
            timer.queue,
            timer.tables,
            event.layer,
            len(event.routes),
            event.tokens,
            self._priority[event.experts],
            lanes,
            self._misses,
            self.mean_tokens,
            self.reuse_weight,
            self.swaps,
            self.slack,
        )
        if self.dispatch_by == "exact":
            self._improve(event, lanes)
        return lanes

    def _improve(self, event: Event, lanes: NDArray[np.int64]) -> None:
        """Replace a decision by the one with the least J, in place."""
        timer = self._setting.timer
        split_exactly(
            timer.lanes,
            timer.queue,
            timer.tables,
            *self._floors,
            event.layer,
            len(event.routes),
            event.tokens,
            self._priority[event.experts],
            lanes,
            self.reuse_weight,
        )

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Return the priorities; those of residents that are not activated rank below, by rule."""
        if event is None:
            return self._last[layer]
        return self._ranked(layer, event, self._priority)

    def compiled(self) -> Compiled | None:
        """Offer dispatch and score as a kernel, but for the exact dispatch."""
        if self.dispatch_by == "exact":
            return None
        timer = self._setting.timer
        own = (
            split_data(self._setting, self.dispatch_by),
            PSI_NUMBER[self.psi],
            STALE[self.stale],
            timer.lanes,
            timer.queue,
            timer.tables,
            self._misses,
            (float(self.mean_tokens), float(self.reuse_weight), self.swaps, float(self.slack)),
            self._last,
            np.empty(self.experts),
        )
        return Compiled(decide_oled, own)

    def revise(self, layer: int, event: Event) -> NDArray[np.float64]:
        """Return the priorities under the confidence of the pass itself."""
        return self._ranked(layer, event, self._priorities(event))

    def _priorities(self, event: Event) -> NDArray[np.float64]:
        assert event.gates is not None and event.confidence is not None, "they are declared"
        weight = PSI[self.psi](event.confidence)
        return priorities(event.routes, event.gates, weight, self.experts)

    def _ranked(
        self, layer: int, event: Event, priority: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """Remember the priorities of activated experts; rank the others below zero or at it."""
        self._last[layer, event.experts] = priority[event.experts]
        if self.stale == "recency":
            return priority
        below = np.array(self._last[layer] - 2.0, np.float64)
        if self.stale == "id":
            below = -1.0 - np.arange(self.experts, dtype=np.float64)
        below[event.experts] = priority[event.experts]
        return below
