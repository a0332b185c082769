"""Fiddler: popular experts on the GPU; a miss goes where it is done sooner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.policy import Compiled, Event, Lane, Policy, RequestInfo, Setting, param

from ._kernels import decide_fiddler
from ._placement import Popularity, best_of_all, best_of_each_layer


@dataclass
class Fiddler(Policy):
    """Fiddler (ICLR 2025) as released in efeslab/fiddler 227715b (``src/fiddler/mixtral.py``).

    The most popular experts are resident and stay so. A miss is computed on the CPU, or its
    weights are copied to a placeholder on the GPU, used once and forgotten. Chosen here:

    - *Popularity* is tokens per expert in the history split (the code holds a list for Mixtral).
      The budget is filled from the top over all layers (``placement=layer``: in every layer by
      itself). Ties go to the lower layer, then the lower id; without history every layer holds its
      lowest ids.
    - *The rule*. The code's comment says that the larger of the CPU's and the GPU's sums is
      minimised, but the code minimises the sum of both, so that every expert is decided by itself:
      the CPU if it is faster there (``cost=sum``). ``cost=max`` does what the comment says. Both
      are exact here, for any number of experts; the code tries all 2⁸ choices. In a tie the GPU.
    - *Costs*. On the CPU, n tokens of one expert take what the profile says of one expert alone,
      or n · ``cpu_us``; on the GPU every miss takes one copy and one expert of one token by
      itself, or ``gpu_us``. ``fiddler:released`` has the code's constants, 7 per token and 70
      (milliseconds here; the code names no unit): up to 9 tokens go to the CPU.
    - The code runs GPU and CPU experts one after the other; the engine overlaps them, as for every
      policy, so ``sum`` is not what it minimises here.
    """

    learns: ClassVar[bool] = True
    moves_slots: ClassVar[bool] = True
    variants: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {"cpu_us": 7000.0, "gpu_us": 70000.0}
    }

    placement: Literal["all", "layer"] = param("all", "whether layers compete for slots")
    cost: Literal["sum", "max"] = param("sum", "what is minimised over CPU and GPU")
    cpu_us: float = param(0.0, "µs per token of an expert on the CPU; 0 takes the profile's times")
    gpu_us: float = param(0.0, "µs to copy and compute a miss on the GPU; 0 takes the profile's")
    _popularity: Popularity = field(default_factory=Popularity, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse impossible costs."""
        if not (self.cpu_us >= 0 and self.gpu_us >= 0):
            raise UsageError("fiddler: cpu_us and gpu_us cannot be negative")

    def place(self, setting: Setting) -> NDArray[np.bool_]:
        """Return the most popular experts, and note what a miss costs."""
        costs = setting.costs
        self._costs = costs
        self._cpu_table = np.zeros(1)
        copy_us = [costs.h2d_us(float(size)) for size in setting.expert_bytes]
        measured = np.array(copy_us) + costs.gpu_experts_us(1, 1)
        self._gpu_costs = np.full(len(copy_us), self.gpu_us) if self.gpu_us else measured
        counts = self._popularity.open(setting)
        if self.placement == "all" and self._popularity.known:
            return best_of_all(counts, setting)
        return best_of_each_layer(counts, setting)

    def begin_request(self, info: RequestInfo) -> tuple[()]:
        """Count tokens during history."""
        self._popularity.begin(info)
        return ()

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Send every miss to the lane that the rule gives it."""
        self._popularity.note(event)
        lanes = event.missed.astype(np.int64)  # Lane.TRANSFER or Lane.GPU
        missed = np.flatnonzero(lanes)
        cpu_us = self._cpu_costs(event.tokens[missed])
        rule = _cheaper_on_cpu if self.cost == "sum" else _balanced
        lanes[missed[rule(cpu_us, float(self._gpu_costs[event.layer]))]] = Lane.CPU
        return lanes

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Keep the residents and no arrival."""
        if event is None:
            return np.zeros(self.experts)
        return np.where(event.resident, 0.0, -np.inf)

    def compiled(self) -> Compiled | None:
        """Offer the same as a kernel, but for the comparison of sums."""
        if self.cost == "max":
            return None
        popularity = self._popularity
        own = self._costs.tables, float(self.cpu_us), self._gpu_costs, popularity.counts
        return Compiled(decide_fiddler, (*own, popularity.learning))

    def _cpu_costs(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return µs of experts that are computed one by one on the CPU, by their tokens."""
        if self.cpu_us:
            return tokens.astype(np.float64) * self.cpu_us
        known, most = len(self._cpu_table), int(tokens.max(initial=0))
        if most >= known:
            more = [self._costs.cpu_experts_us(1, n) for n in range(known, most + 1)]
            self._cpu_table = np.append(self._cpu_table, more)
        return self._cpu_table[tokens]

    def notes(self) -> tuple[str, ...]:
        """Say so where there was nothing to learn from."""
        return self._popularity.notes()


def _cheaper_on_cpu(cpu_us: NDArray[np.float64], gpu_us: float) -> NDArray[np.bool_]:
    """Return which experts to compute on the CPU so that the sum of all costs is least."""
    return cpu_us < gpu_us


def _balanced(cpu_us: NDArray[np.float64], gpu_us: float) -> NDArray[np.bool_]:
    """Return which experts to compute on the CPU so that the larger sum of both is least.

    On the GPU all cost the same, so for every number of them the costliest for the CPU go there,
    and trying all numbers is exact. Of equal ones the most on the GPU.
    """
    order = np.argsort(-cpu_us, kind="stable")
    left = np.append(np.cumsum(cpu_us[order][::-1])[::-1], 0.0)  # CPU's sum without the first g
    larger = np.maximum(np.arange(len(left)) * gpu_us, left)
    on_gpu = len(left) - 1 - int(np.argmin(larger[::-1]))
    chosen = np.zeros(len(cpu_us), np.bool_)
    chosen[order[on_gpu:]] = True
    return chosen
