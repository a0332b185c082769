"""One request of a block-diffusion decoder, on its way from live passes to a trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.errors import TraceError
from oled_sim.trace.background import BackgroundRequest

from .canvas import Canvas, CanvasRules, Seen
from .reduction import Reducer, check_confidence, confidence
from .taps import HostCopy

Check = Callable[[NDArray[np.int64]], None]
"""Given all generated tokens, raises if they are not what the caller knows them to be."""


class BlockRun:
    """Takes what every pass was given and returned; nothing here waits for the device.

    The first pass is recorded whole, of a later one the last block: what precedes it, if anything,
    repeats earlier passes.

    Args:
        target: takes the passes.
        rules: of the request.
        reducer: of the request.
        limit: most tokens to count as generated. eos_id: ends them.
        note: called with a sentence about passes that were left out.

    Attributes:
        window: tokens of the pass at work.
        rows: those whose routing counts.
    """

    def __init__(
        self,
        target: BackgroundRequest,
        rules: CanvasRules,
        reducer: Reducer,
        *,
        limit: int,
        eos_id: int | None,
        note: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        self.reducer = reducer
        self.passes = 0
        self.window = 0
        self.rows = slice(0, 0)
        self._target = target
        self._rules = rules
        self._limit, self._eos_id = limit, eos_id
        self._note = note
        self._canvas: Canvas | None = None
        self._held: Tensor | None = None
        self._ids: Tensor | None = None
        self._first: Tensor | int = 0

    @property
    def block_length(self) -> int:
        """Tokens per block."""
        return self._rules.block_length

    def before(self, ids: Tensor, first: Tensor | int = 0, *, cached: bool = False) -> None:
        """Take the input of a pass: int [1, W], and the position of its first token.

        The input is copied: decoders write what they accept into the same tensor. ``cached``:
        what precedes the pass is in a KV cache, so every row counts.

        Raises:
            TraceError: several rows.
        """
        if len(ids) != 1:
            raise TraceError(f"a pass over {len(ids)} rows: this decoder is recorded one at a time")
        self.window = ids.shape[1]
        redundant = 0 if cached or not self.passes else self.window - self._rules.block_length
        self.rows = slice(max(0, redundant), self.window)
        self._held, self._first = ids, first
        self._ids = ids[0].clone()

    def after(self, logits: Tensor, part: dict[str, Tensor]) -> None:
        """Take what the pass returned.

        Args:
            logits: [N, V] of its last positions; those of the last block count.
            part: reduced routing of :attr:`rows`.

        Raises:
            TraceError: the model was not given tokens before.
        """
        ids, first = self._ids, self._first
        if ids is None:
            raise TraceError("the head ran before the model: its logits belong to no pass")
        self._ids = None
        self.passes += 1
        logits = logits[-self._rules.block_length :]
        part["confidence"] = confidence(logits, ids[-len(logits) :], self._rules.mask_id)
        part["ids"] = ids.int()
        if isinstance(first, Tensor):
            part["first"] = first.int()
        copies, skipped = HostCopy(part), self.rows.start

        def add(request: Any) -> None:
            arrays = copies.wait()
            ids, sure = arrays.pop("ids"), arrays.pop("confidence")
            check_confidence(sure[ids[-len(sure) :] == self._rules.mask_id])
            at = int(arrays.pop("first")) if isinstance(first, Tensor) else first
            if self._canvas is None:
                self._canvas = Canvas(request, self._rules)
            self._canvas.add(Seen(ids, at, at + skipped, sure, arrays))

        self._target.put(add)

    def finish(self, output: Tensor | None = None, check: Check | None = None) -> None:
        """Take what the decoder left behind, and end the request.

        Args:
            output: int [S], all tokens from position 0 on, if the caller knows them. Else the
                tensor that the last pass was given shows what it wrote.
            check: called with all generated tokens, those after an end of sequence too.

        Raises:
            TraceError: no pass ran.
        """
        if self._held is None or not self.passes:
            raise TraceError("no pass ran through the model: nothing can be recorded")
        left = {"ids": (self._held[0] if output is None else output).int()}
        if output is None and isinstance(self._first, Tensor):
            left["first"] = self._first.int()
        copies, first = HostCopy(left), 0 if output is not None else self._first
        self._held = None

        def finish(request: Any) -> None:
            assert self._canvas is not None  # a pass came before
            arrays = copies.wait()
            at = int(arrays["first"]) if isinstance(first, Tensor) else first
            self._canvas.show(arrays["ids"], at)
            self._canvas.finish()
            if self._canvas.dropped:
                self._note("passes that an unrolled loop ran after the last mask were left out")
            if check is not None:
                check(self._canvas.generated(self._limit, None))
            tokens = self._canvas.generated(self._limit, self._eos_id)
            request.finish(
                prompt_tokens=self._rules.prompt_tokens,
                output_tokens=len(tokens),
                finish_reason="eos" if self._eos_id in tokens else "length",
            )

        self._target.put(finish)
