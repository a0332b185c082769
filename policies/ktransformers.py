"""KTransformers: a fixed set of experts on the GPU, all others on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.policy import Event, Lane, Policy, RequestInfo, Setting, param

from ._placement import Popularity, best_of_all, best_of_each_layer


@dataclass
class KTransformers(Policy):
    """KTransformers (SOSP 2025) as released in kvcache-ai/ktransformers 95009ea (kt-kernel).

    The experts of a static mask are resident; every other activated expert is computed by the
    CPU. Nothing is transferred and nothing evicted. The mask holds N = C · L experts:

    - ``uniform``, the default of the code: the same number in every layer, lowest ids first.
    - ``frequency``: those with the most tokens in the history split, over all layers at once.
      That can leave a layer with none (pull request 2064); ``frequency-layer`` gives every layer
      its share, as that request's balanced placement with equal bounds. Ties, left open by the
      code, go to the lower layer, then the lower id. Without history it is ``uniform`` (the code
      then takes all frequencies as equal and leaves the choice to topk).
    - ``front-loading``: whole layers from the first on. ``random``: a seeded draw over all layers
      (numpy's generator, not torch's: other experts than the original for the same seed).

    A mask over all layers gives them different numbers of slots, under either scope.

    *Prefill.* The code can compute passes of at least ``gpu_prefill_tokens`` tokens on the GPU,
    layer by layer (documentation: 400 to 4096; off by default); with ``dynamic`` the residents of
    a layer then become its experts with the most tokens of that pass, as many as before. The code
    copies whole layers; here only activated experts are.

    *Deferral* (``max_deferred_experts_per_token``) is left out: the deferred experts' outputs are
    added one layer later, which changes what the model computes, and their CPU work runs on into
    the next layer, where the lane model has ended the layer.
    """

    learns: ClassVar[bool] = True
    moves_slots: ClassVar[bool] = True

    placement: Literal["uniform", "frequency", "frequency-layer", "front-loading", "random"] = (
        param("uniform", "which experts are resident")
    )
    seed: int = param(42, "of the random placement")
    gpu_prefill_tokens: int = param(
        0, "passes with at least so many tokens run on the GPU; 0 none does"
    )
    dynamic: bool = param(False, "whether such a pass replaces the residents by its own heaviest")
    _popularity: Popularity = field(default_factory=Popularity, init=False, repr=False)

    def __post_init__(self) -> None:
        """Refuse what means nothing."""
        if self.gpu_prefill_tokens < 0:
            raise UsageError(f"ktransformers: gpu_prefill_tokens={self.gpu_prefill_tokens} < 0")
        if self.dynamic and not self.gpu_prefill_tokens:
            raise UsageError("ktransformers: dynamic=true does nothing without gpu_prefill_tokens")

    def place(self, setting: Setting) -> NDArray[np.bool_]:
        """Return the mask."""
        value = self._value(setting)
        if self._spans_layers:
            return best_of_all(value, setting)
        return best_of_each_layer(value, setting)

    @property
    def _spans_layers(self) -> bool:
        """Whether layers compete for slots."""
        if self.placement == "frequency":
            return self._popularity.known
        return self.placement in ("front-loading", "random")

    def _value(self, setting: Setting) -> NDArray[np.float64]:
        """Return what an expert is worth, float64 [L, E]; of equals the first are taken."""
        counts = self._popularity.open(setting)
        if self.placement.startswith("frequency"):
            return counts
        if self.placement == "random":
            return np.random.default_rng(self.seed).random(counts.shape)
        return np.zeros_like(counts)

    def begin_request(self, info: RequestInfo) -> tuple[()]:
        """Count tokens during history."""
        self._popularity.begin(info)
        return ()

    def dispatch(self, event: Event) -> NDArray[np.integer[Any]]:
        """Send every miss to the CPU, or in a large pass to the GPU."""
        self._popularity.note(event)
        return np.where(event.missed, Lane.TRANSFER if self._on_gpu(event) else Lane.CPU, Lane.GPU)

    def score(self, layer: int, event: Event | None) -> NDArray[np.float64]:
        """Keep the residents, or those that a large pass puts in their place."""
        if event is None or not self._on_gpu(event):
            return np.zeros(self.experts)  # nothing arrives
        keep = event.resident
        if self.dynamic:
            tokens = np.where(event.resident, 0, -1)
            tokens[event.experts] = event.tokens
            keep = np.zeros(self.experts, np.bool_)
            keep[np.argsort(-tokens, kind="stable")[: event.resident.sum()]] = True
        return np.where(keep, 0.0, -np.inf)

    def notes(self) -> tuple[str, ...]:
        """Say so where there was nothing to learn from."""
        return self._popularity.notes() if self.placement.startswith("frequency") else ()

    def _on_gpu(self, event: Event) -> bool:
        return 0 < self.gpu_prefill_tokens <= len(event.routes)
