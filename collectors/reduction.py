"""What of a pass leaves the device: routes of the tokens that count, and their optional signals.

All of it is launched without waiting for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.nn import functional

from oled_sim.errors import TraceError, UsageError
from oled_sim.trace.schema import COSINE_GAPS

from .taps import Routing, to_uint

OPTIONAL_SIGNALS = ("full_gate", "embedding", "cosines")
"""Signals that are recorded on request."""

Score = Callable[[Tensor], Tensor]
"""Gate logits [..., E] to the scores that ``full_gate`` averages."""


def checked_signals(signals: Collection[str]) -> frozenset[str]:
    """Return ``signals`` as a set.

    Raises:
        UsageError: one is not of :data:`OPTIONAL_SIGNALS`, or ``signals`` is no list of names.
    """
    if isinstance(signals, str) or not all(isinstance(name, str) for name in signals):
        raise UsageError(f"signals={signals!r}: give a list of names, as in ['full_gate']")
    if unknown := sorted(set(signals) - set(OPTIONAL_SIGNALS)):
        raise UsageError(f"no signal {unknown[0]!r}: known are {', '.join(OPTIONAL_SIGNALS)}")
    return frozenset(signals)


class Stacked(NamedTuple):
    """The routing of a pass of N tokens, all L layers in one tensor each, on the device.

    ``experts`` integer [L, N, k]; ``weights`` float [L, N, k]; ``logits`` float [L, N, E] or None;
    ``inputs`` L tensors [N, H] or None (large, so they stay apart).
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor | None
    inputs: list[Tensor] | None

    def rows(self, rows: slice) -> Stacked:
        """Return the tokens that belong to one request, or to its window."""
        return Stacked(
            self.experts[:, rows],
            self.weights[:, rows],
            None if self.logits is None else self.logits[:, rows],
            self.inputs and [layer[rows] for layer in self.inputs],
        )


def stack(routing: Routing) -> Stacked:
    """Stack the layers of a pass: one launch a signal, whatever is cut out of it later."""
    return Stacked(
        _together(routing.experts),
        _together(routing.weights),
        None if routing.logits is None else _together(routing.logits),
        routing.inputs,
    )


def _together(layers: list[Tensor]) -> Tensor:
    """Stack what layers returned, on the device of the last: a model may lie on several."""
    device = layers[-1].device
    return torch.stack([layer.to(device, non_blocking=True) for layer in layers])


class Reducer:
    """Reduces the passes of one request.

    Args:
        experts: experts per layer.
        scaling: factor that the gate's weights carry beyond a sum of 1.
        score: of the full gate.
    """

    def __init__(self, experts: int, *, scaling: float = 1.0, score: Score = torch.sigmoid) -> None:
        self._experts = experts
        self._scaling = scaling
        self._score = score
        self._history: deque[Tensor] = deque(maxlen=COSINE_GAPS)

    def __call__(
        self, routing: Stacked, embedding: Tensor | None = None, block: int | None = None
    ) -> dict[str, Tensor]:
        """Reduce one pass of N tokens.

        Args:
            routing: of the request's own rows; its logits and inputs are there if wanted.
            embedding: [N, H], or None if it is not wanted.
            block: tokens at the end that ``cosines`` are about; all of them by default.

        Returns:
            ``experts`` [L, N, k], ``gates`` fp16 [L, N, k]; where wanted, fp16 ``full_gate``
            [L, E], ``embedding`` [H], and fp32 ``cosines`` [L, 8].
        """
        weights = routing.weights
        part = {
            "experts": to_uint(routing.experts, self._experts),
            "gates": (weights / self._scaling if self._scaling != 1.0 else weights).half(),
        }
        if routing.logits is not None:
            part["full_gate"] = self._score(routing.logits.float()).mean(1).half()
        if embedding is not None:
            part["embedding"] = embedding.float().mean(0).half()
        if routing.inputs is not None:
            kept = [x[-block:] if block else x for x in routing.inputs]
            part["cosines"] = self._cosines(_together([x.float().mean(0) for x in kept]))
        return part

    def _cosines(self, mean: Tensor) -> Tensor:
        """Compare ``mean`` [L, H] with that of the previous passes; fp32 [L, 8]."""
        cosines = mean.new_full((len(mean), COSINE_GAPS), torch.nan)
        if self._history:  # all of them in one launch
            earlier = torch.stack(tuple(self._history), dim=1)
            found = functional.cosine_similarity(mean.unsqueeze(1), earlier, dim=-1)
            cosines[:, : len(self._history)] = found
        self._history.appendleft(mean)
        return cosines


def check_confidence(sure: ArrayLike) -> None:
    """Refuse confidences of a pass, float [N], that are those of broken logits.

    Raises:
        TraceError: one is NaN.
    """
    if np.isnan(sure).any():
        raise TraceError(
            "the model's logits are NaN or infinite, so no token has a probability: check its"
            " weights and its dtype (float16 overflows where bfloat16 does not)"
        )


def confidence(logits: Tensor, held: Tensor, mask_id: int) -> Tensor:
    """Return how sure a pass was of each position.

    Args:
        logits: [N, V]. held: int [N], tokens at the start of the pass. mask_id: the mask.

    Returns:
        fp32 [N]: probability of the most likely token at masked positions, of the held token at
        others, both of softmax(logits) over the whole vocabulary.
    """
    logits, held = logits.float(), held.to(logits.device, non_blocking=True)
    of_held = logits.gather(-1, held.unsqueeze(-1)).squeeze(-1)
    chosen = torch.where(held == mask_id, logits.amax(-1), of_held)
    return (chosen - logits.logsumexp(-1)).exp()
