"""Recording a native LLaDA2 model (:mod:`oled_sim.model`) while it generates.

Routing comes from hooks on the gates, token state and confidence from the generator's own pass
records. Generated tokens are those of an unrecorded run: hooks only read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from oled_sim.collection import PromptRequest
from oled_sim.errors import UsageError
from oled_sim.model.decoding import DecodeSettings
from oled_sim.model.generate import Generation, PassRecord, generate
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.trace.schema import COSINE_GAPS, TokenState

from .taps import GateOutputs, GateTap, HostCopy, to_uint

OPTIONAL_SIGNALS = ("full_gate", "embedding", "cosines")
"""Signals that are recorded on request."""


class NativeCollector:
    """Records routing and confidence of a native model.

    Args:
        model: in evaluation mode, on any device.
        signals: of :data:`OPTIONAL_SIGNALS`. ``full_gate`` and ``embedding`` are means over the
            tokens of the request in the pass; ``cosines`` compare the mean gate input of its
            block with that of its previous passes.
        redact: write -1 for the token ids of prompts.

    Raises:
        UsageError: an unknown signal.
    """

    SIGNALS: ClassVar = ("ids", "gates", "confidence", "token_state")
    """Signals that are always recorded."""

    def __init__(
        self, model: LLaDA2MoeModelLM, *, signals: Sequence[str] = (), redact: bool = False
    ) -> None:
        if unknown := sorted(set(signals) - set(OPTIONAL_SIGNALS)):
            raise UsageError(f"no signal {unknown[0]!r}: known are {', '.join(OPTIONAL_SIGNALS)}")
        self.model = model
        self.signals = frozenset(signals)
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
    """One batch being recorded: pass records on their way from the device to the trace.

    A pass is written when the next one has run, so that its copies to the host overlap with
    that one's computation.
    """

    def __init__(
        self, collector: NativeCollector, requests: Sequence[PromptRequest], block_length: int
    ) -> None:
        signals = collector.signals
        model = collector.model
        self._gates = GateTap(model, logits="full_gate" in signals, inputs="cosines" in signals)
        self._embeddings = _EmbeddingTap(model) if "embedding" in signals else None
        self._experts = model.config.num_experts
        self._scaling = model.config.routed_scaling_factor
        self._redact = collector.redact
        self._block_length = block_length
        self._targets = [r.target for r in requests]
        self._history = [deque[Tensor](maxlen=COSINE_GAPS) for _ in requests]
        self._forward = -1
        self._outputs: _Stacked | None = None
        self._waiting: deque[tuple[PassRecord, HostCopy]] = deque()

    def __enter__(self) -> None:
        self._gates.__enter__()
        if self._embeddings:
            self._embeddings.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._gates.__exit__()
        if self._embeddings:
            self._embeddings.__exit__()
        if kind is None:
            self._write(before=None)

    def add(self, record: PassRecord) -> None:
        """Take one request's part of a forward pass."""
        if record.forward != self._forward:
            self._forward = record.forward
            embedding = self._embeddings.take() if self._embeddings else None
            self._outputs = _stack(self._gates.take(), embedding, self._experts, self._scaling)
        assert self._outputs is not None  # set by the first record of every forward pass
        self._waiting.append((record, HostCopy(self._part(record, self._outputs))))
        self._write(before=record.forward)

    def _part(self, record: PassRecord, outputs: _Stacked) -> dict[str, Tensor]:
        """Cut one request out of the flattened pass and reduce its optional signals."""
        rows = slice(record.first, record.last)
        part = {"experts": outputs.experts[:, rows], "gates": outputs.gates[:, rows]}
        if outputs.logits is not None:
            part["full_gate"] = outputs.logits[:, rows].sigmoid().mean(1).half()
        if outputs.embedding is not None:
            part["embedding"] = outputs.embedding[rows].float().mean(0).half()
        if outputs.inputs is not None:
            block = slice(record.last - self._block_length, record.last)
            part["cosines"] = self._cosines(record.row, outputs.inputs[:, block].float().mean(1))
        return part

    def _cosines(self, row: int, mean: Tensor) -> Tensor:
        """Compare ``mean`` [L, H] with the previous passes' of the request; fp32 [L, 8]."""
        history = self._history[row]
        cosines = mean.new_full((len(mean), COSINE_GAPS), torch.nan)
        for gap, earlier in enumerate(history):
            cosines[:, gap] = functional.cosine_similarity(mean, earlier, dim=-1)
        history.appendleft(mean)
        return cosines

    def _write(self, before: int | None) -> None:
        """Write the waiting passes of forward passes before ``before``; all where it is None."""
        while self._waiting and (before is None or self._waiting[0][0].forward < before):
            record, copies = self._waiting.popleft()
            self._add_pass(record, **copies.wait())

    def _add_pass(self, record: PassRecord, **arrays: np.ndarray) -> None:
        hidden = self._redact & (record.state == TokenState.PROMPT)
        self._targets[record.row].add_pass(
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
            **arrays,
        )


class _Stacked(NamedTuple):
    """Gate outputs of all L layers of a flattened pass of N tokens, on the model's device.

    ``experts`` [L, N, k] unsigned; ``gates`` fp16 [L, N, k] before the routed scaling factor;
    ``logits`` fp32 [L, N, E]; ``inputs`` [L, N, H]; ``embedding`` [N, H].
    """

    experts: Tensor
    gates: Tensor
    logits: Tensor | None
    inputs: Tensor | None
    embedding: Tensor | None


def _stack(
    outputs: GateOutputs, embedding: Tensor | None, experts: int, scaling: float
) -> _Stacked:
    return _Stacked(
        experts=to_uint(torch.stack(outputs.topk_idx), experts),
        gates=(torch.stack(outputs.topk_weight) / scaling).half(),
        logits=torch.stack(outputs.logits) if outputs.logits is not None else None,
        inputs=torch.stack(outputs.inputs) if outputs.inputs is not None else None,
        embedding=embedding,
    )


class _EmbeddingTap:
    """A hook on the token embedding; :meth:`take` returns its last output as [N, H]."""

    def __init__(self, model: LLaDA2MoeModelLM) -> None:
        self._module: nn.Module = model.model.word_embeddings
        self._last: Tensor | None = None

    def __enter__(self) -> None:
        self._handle = self._module.register_forward_hook(self._keep)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _keep(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        self._last = output

    def take(self) -> Tensor:
        last, self._last = self._last, None
        assert last is not None  # every pass embeds its tokens
        return last.reshape(-1, last.shape[-1])


def _both(
    first: Callable[[PassRecord], None], second: Callable[[PassRecord], None] | None
) -> Callable[[PassRecord], None]:
    if second is None:
        return first

    def call(record: PassRecord) -> None:
        first(record)
        second(record)

    return call
