"""Recording a native LLaDA2 model (:mod:`oled_sim.model`) while it generates.

Routing comes from hooks on the gates, token state and confidence from the generator's own pass
records. Generated tokens are those of an unrecorded run: hooks only read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import ClassVar

import numpy as np
from torch import Tensor

from oled_sim.collection import PromptRequest
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import Generation, PassRecord, generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.trace.schema import TokenState

from .reduction import Reducer, Stacked, checked_signals, stack
from .taps import EmbeddingTap, GateTap, HostCopy


class NativeCollector:
    """Records routing and confidence of a native model.

    Args:
        model: in evaluation mode, on any device.
        signals: of :data:`~oled_sim.collectors.reduction.OPTIONAL_SIGNALS`. ``full_gate`` and
            ``embedding`` are means over the tokens of the request in the pass; ``cosines``
            compare the mean gate input of its block with that of its previous passes.
        redact: write -1 for the token ids of prompts.

    Raises:
        UsageError: an unknown signal.
    """

    SIGNALS: ClassVar = ("ids", "gates", "confidence", "token_state")
    """Signals that are always recorded."""

    def __init__(
        self, model: LLaDA2MoeModelLM, *, signals: Sequence[str] = (), redact: bool = False
    ) -> None:
        self.signals = checked_signals(signals)
        self.model = model
        self.redact = redact

    def record(
        self,
        requests: Sequence[PromptRequest],
        settings: DecodeSettings,
        on_pass: Callable[[PassRecord], None] | None = None,
    ) -> list[Generation]:
        """Generate for ``requests`` as one batch and finish each of their open requests.

        Raises:
            UsageError: see :func:`oled_sim.model.generate.generate`.
            TraceError: the gates are bypassed, or a recorded request breaks the trace format.
        """
        recording = _Recording(self, requests, settings.block_length)
        with recording:
            done = generate(
                self.model,
                [r.tokens for r in requests],
                settings,
                _both(recording.add, on_pass),
                streams=[r.target.request for r in requests],
            )
        for request, generation in zip(requests, done, strict=True):
            request.target.finish(
                prompt_tokens=len(request.tokens),
                output_tokens=len(generation.tokens),
                finish_reason="eos" if generation.ended else "length",
            )
        return done


class _Recording:
    """One batch being recorded: pass records on their way from the device to the trace."""

    def __init__(
        self, collector: NativeCollector, requests: Sequence[PromptRequest], block_length: int
    ) -> None:
        signals = collector.signals
        model = collector.model
        self._gates = GateTap(model, logits="full_gate" in signals, inputs="cosines" in signals)
        words = model.model.word_embeddings
        self._embeddings = EmbeddingTap(words) if "embedding" in signals else None
        self._redact = collector.redact
        self._block_length = block_length
        self._targets = [r.target for r in requests]
        config = model.config
        scaling = config.routed_scaling_factor
        self._reducers = [Reducer(config.num_experts, scaling=scaling) for _ in requests]
        self._forward = -1
        self._outputs: tuple[Stacked, Tensor | None] | None = None
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        self._hooks.enter_context(self._gates)
        if self._embeddings:
            self._hooks.enter_context(self._embeddings)

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def add(self, record: PassRecord) -> None:
        """Take one request's part of a forward pass."""
        if record.forward != self._forward:
            self._forward = record.forward
            embedding = self._embeddings.take() if self._embeddings else None
            self._outputs = stack(self._gates.routing()), embedding
        assert self._outputs is not None  # set by the first record of every forward pass
        routing, embedding = self._outputs
        rows = slice(record.first, record.last)
        part = self._reducers[record.row](
            routing.rows(rows),
            None if embedding is None else embedding[rows],
            self._block_length,
        )
        hidden = self._redact & (record.state == TokenState.PROMPT)
        self._targets[record.row].add_late(
            HostCopy(part).wait,
            kind=record.kind,
            block=record.block,
            context=record.context,
            token_id=np.where(hidden, -1, record.token_ids),
            position=record.positions,
            state=record.state,
            confidence=record.confidence,
            accepted=record.accepted,
            edited=record.edited,
            time_us=record.time_us,
        )


def _both(
    first: Callable[[PassRecord], None], second: Callable[[PassRecord], None] | None
) -> Callable[[PassRecord], None]:
    if second is None:
        return first

    def call(record: PassRecord) -> None:
        first(record)
        second(record)

    return call
