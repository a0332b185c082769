"""One request on its way through block-diffusion decoding: what to run next, what a pass did.

Sources: ``generate`` of the published LLaDA2.0 and 2.1 remote code for the walk over blocks,
dInfer and SGLang 0.5.23 for the prefix cache and its commit pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oled_sim.model.decoding import Bools, DecodeSettings, Prediction, accept, edit
from oled_sim.trace.schema import Kind, TokenState


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one pass did to the positions it ran, from ``start`` on.

    Attributes:
        kind: what the pass turned out to be.
        block: index of the block.
        start: first position.
        token_ids: int64 [T] at the start of the pass.
        state: uint8 [T], a :class:`TokenState` at the start of the pass.
        confidence: float32 [T]: probability of the argmax at masked positions, of the held
            token at others; NaN before the block.
        accepted, edited: bool [T].
        written: int64 [T], token ids after the pass.
    """

    kind: Kind
    block: int
    start: int
    token_ids: NDArray[np.int64]
    state: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    accepted: Bools
    edited: Bools
    written: NDArray[np.int64]


Choice = tuple[Bools, Bools]
"""Accepted and edited positions of a block, bool [L] each."""


class BlockDecoder:
    """One request on its way: the canvas of tokens, the block at work, the passes so far.

    The first pass covers the prompt and the first block with a mask in it; its acceptances
    count. Later ones cover one block. A block without masks is committed: with a prefix cache
    one more pass writes its keys and values, for rule 2.1 the last pass that changed nothing.

    Attributes:
        tokens: int64 [blocks x L], prompt, decoded tokens and masks.
        block: index of the block at work, counted from position 0.
        done: nothing more to run.
    """

    def __init__(
        self, prompt: Sequence[int], settings: DecodeSettings, mask_id: int, eos_id: int
    ) -> None:
        length = settings.block_length
        self.settings = settings
        self.mask_id = mask_id
        self.eos_id = eos_id
        self.prompt_length = len(prompt)
        self.tokens = np.full(canvas_length(len(prompt), settings), mask_id, dtype=np.int64)
        self.tokens[: len(prompt)] = prompt
        self.block = len(prompt) // length
        self.done = False
        self._prefilled = False
        self._step = 0
        self._post_steps = 0

    @property
    def context(self) -> int:
        """Positions before the block: the length of the committed prefix after prefill."""
        return self.block * self.settings.block_length

    @property
    def stop(self) -> int:
        """Position after the block."""
        return self.context + self.settings.block_length

    @property
    def start(self) -> int:
        """First position that the next pass has to run when a prefix cache is used."""
        return self.context if self._prefilled else 0

    @property
    def output(self) -> NDArray[np.int64]:
        """Generated tokens up to and including the first end-of-text token."""
        end = self.prompt_length + self.settings.max_new_tokens
        generated = self.tokens[self.prompt_length : end]
        stops = np.flatnonzero(generated == self.eos_id)
        return generated[: stops[0] + 1] if len(stops) else generated

    @property
    def next_kind(self) -> Kind:
        """What the next pass will be, as far as its tokens say.

        Without masks it counts as commit, though rule 2.1 may yet edit a token in it.
        """
        return self._kind(self._held == self.mask_id, np.zeros(0, np.bool_))

    def next_state(self) -> NDArray[np.uint8]:
        """Return the state of each position from ``start`` to ``stop``, uint8 [T]."""
        return self._state(self.start)

    def advance(self, prediction: Prediction, choice: Choice | None = None) -> Outcome:
        """Apply the pass over positions ``start`` to ``stop`` that gave ``prediction``.

        ``choice``: positions to accept and edit, in place of what the rule would choose.
        """
        start, number, skipped = self.start, self.block, self.context - self.start
        before = self.tokens[start : self.stop].copy()
        state = self._state(start)
        masked = before[skipped:] == self.mask_id
        accepted, edited = self._choose(prediction, masked) if choice is None else choice
        np.copyto(self._held, prediction.candidate, where=accepted | edited)
        kind = self._kind(masked, edited)
        self._move_on(kind, masked, accepted)
        confidence = np.where(masked, prediction.best, prediction.held)
        return Outcome(
            kind=kind,
            block=number,
            start=start,
            token_ids=before,
            state=state,
            confidence=_pad(confidence, skipped, np.nan),
            accepted=_pad(accepted, skipped, False),
            edited=_pad(edited, skipped, False),
            written=self.tokens[start : start + len(before)].copy(),
        )

    @property
    def _held(self) -> NDArray[np.int64]:
        """Tokens of the block at work (a view)."""
        return self.tokens[self.context : self.stop]

    @property
    def _may_polish(self) -> bool:
        """Whether rule 2.1 may still run a pass on a block without masks to edit it."""
        return self.settings.rule == "2.1" and self._post_steps < self.settings.max_post_steps

    def _state(self, start: int) -> NDArray[np.uint8]:
        ids = self.tokens[start : self.stop]
        state = np.where(ids == self.mask_id, TokenState.MASKED, TokenState.DECODED)
        state[: max(0, self.prompt_length - start)] = TokenState.PROMPT
        return state.astype(np.uint8)

    def _choose(self, prediction: Prediction, masked: Bools) -> tuple[Bools, Bools]:
        """Return accepted and edited positions of the block."""
        settings = self.settings
        if settings.rule == "2.0":
            quota = settings.quota(self._step)
            accepted = accept(prediction.probability, masked, settings.threshold, quota)
            return accepted, np.zeros_like(masked)
        accepted = accept(
            prediction.probability, masked, settings.threshold, settings.num_to_transfer
        )
        if not (masked.any() or self._may_polish):
            return accepted, np.zeros_like(masked)
        generated = np.arange(self.context, self.stop) >= self.prompt_length
        editable = generated & ~masked
        return accepted, edit(prediction, self._held, editable, settings.editing_threshold)

    def _kind(self, masked: Bools, edited: Bools) -> Kind:
        if not self._prefilled:
            return Kind.PREFILL
        return Kind.DENOISE if masked.any() or edited.any() else Kind.COMMIT

    def _move_on(self, kind: Kind, masked: Bools, accepted: Bools) -> None:
        """Decide what follows the pass: more of this block, the next one, or nothing."""
        self._prefilled = True
        self._step += 1
        self._post_steps += not masked.any()
        if self._stops_early(accepted):
            self.done = True
        elif kind is Kind.COMMIT or self._needs_no_commit():
            self._close_block()

    def _stops_early(self, accepted: Bools) -> bool:
        """Rule 2.0: an end-of-text token was accepted, and all before the first is decoded."""
        if not self.settings.eos_early_stop or self.settings.rule != "2.0":
            return False
        if self.eos_id not in self._held[accepted]:
            return False
        return self.mask_id not in self.output

    def _needs_no_commit(self) -> bool:
        """Without a prefix cache a finished block needs no pass that only writes one."""
        unfinished = self.mask_id in self._held or self._may_polish
        return not (self.settings.prefix_cache or unfinished)

    def _close_block(self) -> None:
        generated = self.tokens[max(self.context, self.prompt_length) : self.stop]
        self.done = self.eos_id in generated or self.stop == len(self.tokens)
        self.block += not self.done
        self._step = self._post_steps = 0


def canvas_length(prompt_length: int, settings: DecodeSettings) -> int:
    """Return the positions that prompt and generated tokens take, in whole blocks."""
    total = prompt_length + settings.max_new_tokens
    return -(-total // settings.block_length) * settings.block_length


def _pad(block: NDArray, before: int, value: float | bool) -> NDArray:
    """Prepend ``before`` entries of ``value`` for the positions that precede the block."""
    return np.concatenate((np.full(before, value, block.dtype), block))
