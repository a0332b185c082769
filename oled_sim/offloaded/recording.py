"""One request through the fully resident model: what every gate and every acceptance chose.

It is what an offloaded run is compared with, and what one can be forced to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from oled_sim.model.block_decoder import BlockDecoder, Choice
from oled_sim.model.decoding import DecodeSettings, Prediction
from oled_sim.model.generate import Generation, PassRecord, generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.model.moe import LLaDA2MoeGate

OnPass = Callable[[PassRecord], None]


@dataclass(frozen=True)
class Margins:
    """By how much the choices of a pass were decided. T tokens, L layers, G groups, block B.

    Attributes:
        expert: float32 [L, T], k-th less (k + 1)-th biased gate score in the kept groups.
        group: float32 [L, T], strength of the last kept group less that of the first dropped.
        kept: bool [L, T, G], groups kept.
        logit: float32 [B], best less second-best logit of each position of the block.
        experts: E.
    """

    expert: NDArray[np.float32]
    group: NDArray[np.float32]
    kept: NDArray[np.bool_]
    logit: NDArray[np.float32]
    experts: int


class RecordedPass(NamedTuple):
    """One pass: what was done, predicted (for the block) and routed (per layer int64 [T, k])."""

    record: PassRecord
    prediction: Prediction
    routes: Sequence[NDArray[np.int64]]
    margins: Margins | None = None

    @property
    def choice(self) -> Choice:
        """Positions of the block that were accepted and edited."""
        block = len(self.prediction.candidate)
        return self.record.accepted[-block:], self.record.edited[-block:]


@dataclass(frozen=True)
class Recording:
    """A request from its first pass to its last."""

    request: int
    passes: Sequence[RecordedPass]
    generation: Generation


def record_resident(
    model: LLaDA2MoeModelLM,
    request: int,
    prompt: Sequence[int],
    settings: DecodeSettings,
    on_pass: OnPass = lambda record: None,
) -> Recording:
    """Generate with all experts resident, by the model as it is, and keep every choice.

    Args:
        model: in evaluation mode. request: its number, which seeds its random stream.
        prompt: token ids. settings: how to decode.
        on_pass: called after every pass.

    Raises:
        UsageError: see :func:`oled_sim.model.generate.generate`.
    """
    passes: list[RecordedPass] = []
    with _Watch(model, settings) as watch:

        def keep(record: PassRecord) -> None:
            passes.append(RecordedPass(record, watch.prediction, *watch.take()))
            on_pass(record)

        (done,) = generate(model, [prompt], settings, keep, streams=[request], conductor=watch)
    return Recording(request, passes, done)


class _Watch:
    """Hooks that keep what gates and the head return; they only read."""

    prediction: Prediction

    def __init__(self, model: LLaDA2MoeModelLM, settings: DecodeSettings) -> None:
        self._model = model
        config = model.config
        self._never = [config.mask_token_id, *[config.eos_token_id] * settings.ignore_eos]
        self._handles: list[Any] = []
        self._ids: list[Tensor] = []
        self._margins: list[tuple[Tensor, Tensor, Tensor]] = []
        self._logit: Tensor | None = None

    def __enter__(self) -> _Watch:
        gates = [block.gate for block in self._model.sparse_blocks().values()]
        self._handles = [gate.register_forward_hook(self._keep) for gate in gates]
        self._handles.append(self._model.register_forward_hook(self._keep_logits))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def before_pass(self, row: int, request: BlockDecoder) -> None:
        """See :class:`~oled_sim.model.generate.Conductor`."""

    def choose(self, row: int, prediction: Prediction) -> None:
        """Keep the prediction, and leave the choice to the rule."""
        self.prediction = prediction

    def _keep(self, gate: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        assert isinstance(gate, LLaDA2MoeGate)
        self._ids.append(output[0])
        self._margins.append(gate.margins(output[2]))

    def _keep_logits(self, _model: nn.Module, _args: Any, output: Tensor) -> None:
        logits = output.clone()
        logits[:, self._never] = -torch.inf
        best = logits.topk(2, dim=-1).values
        self._logit = best[:, 0] - best[:, 1]

    def take(self) -> tuple[list[NDArray[np.int64]], Margins]:
        """Return routes and margins of the pass, and forget them."""
        assert self._logit is not None
        expert, group, kept = (
            torch.stack(part).cpu().numpy() for part in zip(*self._margins, strict=True)
        )
        routes = list(torch.stack(self._ids).cpu().numpy())
        margins = Margins(
            expert, group, kept, self._logit.cpu().numpy(), self._model.config.num_experts
        )
        self._ids, self._margins = [], []
        return routes, margins
