"""What an event of the model hands to the lanes, in buffers that stay where they are."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.geometry import CostGeometry
from oled_sim.hardware.place import Place


class StaticActivations:
    """Inputs and outputs of an event's experts; captured kernels know their addresses.

    The model launches its shared expert itself, before it asks for the routed ones.

    Attributes:
        x: [T, h]. out: [T·k, h].
    """

    def __init__(self, place: Place, cost: CostGeometry, most_tokens: int) -> None:
        self._k, width = cost.top_k, cost.hidden_size
        self._x = torch.zeros(most_tokens, width, device=place.device, dtype=place.dtype)
        self._out = torch.zeros(
            most_tokens * cost.top_k, width, device=place.device, dtype=place.dtype
        )
        self.x, self.out = self._x, self._out

    def take(self, x: Tensor) -> None:
        """Take the inputs of an event, [T, h]; outputs become zero."""
        self.x, self.out = self._x[: len(x)], self._out[: len(x) * self._k]
        self.x.copy_(x)
        self.out.zero_()

    def shared(self, layer: int) -> None:
        """Do nothing: the shared expert is under way."""

    def merged(self, from_cpu: Tensor | None) -> Tensor:
        """Return each token's sum [T, h]: slots in order, in fp32, then the CPU's."""
        total = self.out.view(len(self.x), self._k, -1).float().sum(1)
        if from_cpu is not None:
            total += from_cpu.float()
        return total.to(self.x.dtype)


class HostRouting:
    """What a gate chose, on its way to the host.

    Args:
        place: where the model runs. most_tokens, top_k, experts: of an event.
    """

    def __init__(self, place: Place, most_tokens: int, top_k: int, experts: int) -> None:
        self._cuda = place.cuda
        self._ids = torch.empty(most_tokens, top_k, dtype=torch.int64, pin_memory=place.cuda)
        self._weights = torch.empty(most_tokens, top_k, pin_memory=place.cuda)
        self._gate = torch.empty(experts, dtype=torch.float16, pin_memory=place.cuda)
        self._tokens = 0
        self._has_gate = False

    def send(self, ids: Tensor, weights: Tensor, full_gate: Tensor | None) -> None:
        """Queue the copies; a mark set after this says when they have arrived."""
        self._tokens, self._has_gate = len(ids), full_gate is not None
        self._ids[: len(ids)].copy_(ids, non_blocking=self._cuda)
        self._weights[: len(ids)].copy_(weights, non_blocking=self._cuda)
        if full_gate is not None:
            self._gate.copy_(full_gate, non_blocking=self._cuda)

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 [T, k], in the order of the gate."""
        return self._ids[: self._tokens].numpy()

    @property
    def weights(self) -> NDArray[np.float32]:
        """float32 [T, k], scaling included."""
        return self._weights[: self._tokens].numpy()

    @property
    def full_gate(self) -> NDArray[np.float16] | None:
        """float16 [E], or None."""
        return self._gate.numpy() if self._has_gate else None
