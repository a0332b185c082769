"""Requests of an autoregressive decoder, on their way from live passes to a trace.

Words are those of docs/importing.md: the prefill is one pass, every further token another; a
decoded token is masked at the start of its pass and accepted by it, its block has length 1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.errors import TraceError
from oled_sim.trace.background import BackgroundRequest
from oled_sim.trace.manifest import Decode
from oled_sim.trace.schema import Kind, TokenState

from .canvas import Target
from .reduction import Reducer, Stacked, check_confidence
from .taps import HostCopy


class CausalRequest:
    """The passes of one request, those after its end of sequence left out.

    Args:
        target: takes the passes.
        prompt_tokens: of the request.
        eos_ids: tokens that end it.
        redact: write -1 for prompt tokens.
    """

    def __init__(
        self, target: Target, prompt_tokens: int, eos_ids: Collection[int], *, redact: bool
    ) -> None:
        self._target = target
        self._prompt_tokens = prompt_tokens
        self._eos_ids = frozenset(eos_ids)
        self._redact = redact
        self._position = 0
        self._ended = False

    def add(self, ids: NDArray[Any], sure: float, routes: Mapping[str, Any]) -> None:
        """Take the next pass.

        Args:
            ids: int [T], its tokens. sure: probability of the most likely next token.
            routes: ``experts`` [L, T, k] and what else ``add_pass`` takes.

        Raises:
            TraceError: ``sure`` is NaN.
        """
        decoded = self._position >= self._prompt_tokens
        # A row that is done is given its end of sequence and then padding, until the batch is.
        self._ended |= decoded and int(ids[0]) in self._eos_ids
        if self._ended:
            return
        check_confidence(sure)
        position = np.arange(self._position, self._position + len(ids))
        self._position += len(ids)
        confidence = np.full(len(ids), np.nan, np.float32)
        confidence[-1] = sure
        self._target.add_pass(
            kind=Kind.DENOISE if decoded else Kind.PREFILL,
            block=int(position[0]) if decoded else self._prompt_tokens,
            context=int(position[0]),
            token_id=ids if decoded or not self._redact else np.full(len(ids), -1),
            position=position,
            state=np.full(len(ids), TokenState.MASKED if decoded else TokenState.PROMPT),
            confidence=confidence,
            accepted=np.full(len(ids), decoded),
            edited=np.zeros(len(ids), np.bool_),
            **routes,
        )

    def count(self, generated: NDArray[Any]) -> tuple[int, str]:
        """Return how many of the tokens count, and why they end: ``eos`` or ``length``."""
        stops = np.flatnonzero(np.isin(generated, list(self._eos_ids)))
        return (int(stops[0]) + 1, "eos") if len(stops) else (len(generated), "length")


class CausalRow:
    """One row of a causal batch: where its passes go. ``padding``: tokens before its prompt."""

    def __init__(self, target: BackgroundRequest, reducer: Reducer, padding: int) -> None:
        self.target, self.reducer, self.padding = target, reducer, int(padding)
        self.request: CausalRequest | None = None


class CausalRun:
    """One call of ``generate`` of a causal model; every row of the batch is a request.

    Attributes:
        window: tokens of the pass at work, padding included.
    """

    def __init__(
        self, rows: list[CausalRow], prompt_length: int, eos_ids: list[int], redact: bool
    ) -> None:
        self.window = 0
        self._rows = rows
        self._prompt_length = prompt_length
        self._eos_ids = eos_ids
        self._redact = redact
        self._seen = 0
        self._ids: Tensor | None = None

    def before(self, ids: Tensor) -> None:
        """Take the input of a pass, int [B, S].

        Raises:
            TraceError: other rows than prompts, or several tokens after the prompt.
        """
        if len(ids) != len(self._rows):
            raise TraceError(
                f"a pass over {len(ids)} rows for {len(self._rows)} prompts: beams and several"
                " sequences a prompt cannot be recorded"
            )
        if self._seen >= self._prompt_length and ids.shape[1] != 1:
            raise TraceError(
                f"a decoding pass over {ids.shape[1]} tokens: without a KV cache, or with a draft"
                " model, it cannot be recorded"
            )
        self.window = ids.numel()
        self._ids = ids.clone()

    def after(self, logits: Tensor, stacked: Stacked, embedding: Tensor | None) -> None:
        """Take what the pass returned: logits [B, V] of the last token, routing of all rows."""
        ids = self._ids
        if ids is None:
            raise TraceError("the head ran before the model: its logits belong to no pass")
        self._ids = None
        width = ids.shape[1]
        logits = logits.float()
        sure = (logits.amax(-1) - logits.logsumexp(-1)).exp()
        for number, row in enumerate(self._rows):
            padded = max(0, min(width, row.padding - self._seen))
            if padded == width:
                continue
            rows = slice(number * width + padded, (number + 1) * width)
            part = row.reducer(stacked.rows(rows), None if embedding is None else embedding[rows])
            part |= {"ids": ids[number, padded:].int(), "sure": sure[number]}
            row.target.put(partial(self._add, row, HostCopy(part)))
        self._seen += width

    def finish(self, sequences: Tensor) -> None:
        """Take what ``generate`` returned, int [B, P + n].

        Raises:
            TraceError: no pass ran.
        """
        if not self._seen:
            raise TraceError("no pass ran through the model: nothing can be recorded")
        generated = HostCopy({"ids": sequences[:, self._prompt_length :].int()})
        for number, row in enumerate(self._rows):
            row.target.put(partial(self._finish, row, generated, number))

    def _add(self, row: CausalRow, copies: HostCopy, target: Any) -> None:
        arrays = copies.wait()
        ids, sure = arrays.pop("ids"), float(arrays.pop("sure"))
        if row.request is None:
            prompt = self._prompt_length - row.padding
            row.request = CausalRequest(target, prompt, self._eos_ids, redact=self._redact)
        row.request.add(ids, sure, arrays)

    def _finish(self, row: CausalRow, generated: HostCopy, number: int, target: Any) -> None:
        assert row.request is not None  # every row took part in a pass
        tokens, reason = row.request.count(generated.wait()["ids"][number])
        target.finish(
            prompt_tokens=self._prompt_length - row.padding,
            output_tokens=tokens,
            finish_reason=reason,
        )


def _setting(call: dict[str, Any], model: Any, name: str) -> Any:
    """Return a setting of ``generate``: of the call, of its configuration, or of the model's."""
    given = call.get("kwargs", {}).get(name)
    if given is not None:
        return given
    config = call.get("generation_config") or getattr(model, "generation_config", None)
    return getattr(config, name, None)


def eos_ids_of(call: dict[str, Any], model: Any) -> list[int]:
    """Return the tokens that end a request of ``generate``."""
    ids = _setting(call, model, "eos_token_id")
    if ids is None:
        return []
    return [int(i) for i in ids] if isinstance(ids, (list, tuple)) else [int(ids)]


def decode_settings(call: dict[str, Any], model: Any) -> Decode:
    """Return how ``generate`` decodes, given the arguments of its ``call``."""
    sampled = bool(_setting(call, model, "do_sample"))
    return Decode(
        rule="autoregressive",
        block_length=1,
        temperature=float(_setting(call, model, "temperature") or 1.0) if sampled else 0.0,
        max_new_tokens=_setting(call, model, "max_new_tokens"),
    )
