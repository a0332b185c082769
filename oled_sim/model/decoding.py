"""Block-diffusion decoding of one request: settings, acceptance rules, and where it stands.

Nothing here needs torch: a forward pass is a :class:`Prediction` per position of the block, so
the rules can be checked by hand. Sources: ``generate`` of the published LLaDA2.0 and 2.1 remote
code for the rules (argmax at temperature 0, as in 2.1, dInfer and SGLang: the 2.0 original
draws from the distribution even then), dInfer and SGLang 0.5.23 for the commit pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import UsageError
from oled_sim.trace.schema import Kind, TokenState

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSettings:
    """How to generate.

    Attributes:
        block_length: tokens per block L; blocks are counted from position 0 of the prompt.
        max_new_tokens: most tokens to generate.
        steps: denoising passes per block over which rule 2.0 spreads its quota.
        threshold: a masked position is accepted when its confidence is above this.
        minimal_topk: bounds ``steps`` to ``max_new_tokens // minimal_topk`` (rule 2.0).
        rule: ``"2.0"`` (quota per step) or ``"2.1"`` (editing and post steps).
        editing_threshold: rule 2.1 overwrites a decoded token whose position prefers another
            one with more than this probability.
        max_post_steps: rule 2.1 runs at most this many passes on a block without masks.
        num_to_transfer: rule 2.1 accepts at least this many positions per pass.
        temperature: 0 is greedy; above, candidates are sampled from softmax(logits / T).
            Confidence is always taken from the untempered distribution.
        seed: of the sampling; each request draws from its own stream.
        prefix_cache: keep keys and values of finished blocks; without, every pass runs the
            whole window, as the published remote code does.
        eos_early_stop: rule 2.0 stops inside a block once everything before an accepted
            end-of-text token is decoded. A block that holds one always ends the request.

    Raises:
        UsageError: a value is out of range.
    """

    block_length: int = 16
    max_new_tokens: int = 256
    steps: int = 32
    threshold: float = 0.95
    minimal_topk: int = 1
    rule: Literal["2.0", "2.1"] = "2.0"
    editing_threshold: float = 0.9
    max_post_steps: int = 16
    num_to_transfer: int = 1
    temperature: float = 0.0
    seed: int = 0
    prefix_cache: bool = True
    eos_early_stop: bool = False

    def __post_init__(self) -> None:
        for name in ("block_length", "max_new_tokens", "steps", "minimal_topk", "num_to_transfer"):
            _require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}: at least 1")
        for name in ("max_post_steps", "temperature", "seed"):
            _require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}: at least 0")
        for name in ("threshold", "editing_threshold"):
            value = getattr(self, name)
            _require(0.0 <= value <= 1.0, f"{name} is {value}: it lies between 0 and 1")
        _require(self.rule in ("2.0", "2.1"), f"no decoding rule {self.rule!r}: use 2.0 or 2.1")
        _require(
            self.minimal_topk <= self.max_new_tokens,
            f"minimal_topk {self.minimal_topk} exceeds max_new_tokens {self.max_new_tokens}",
        )

    def quota(self, step: int) -> int:
        """Positions that rule 2.0 accepts at least in denoising pass ``step`` of a block.

        Summed over the steps this is ``block_length``, so a block is always finished in time.
        """
        steps = min(self.steps, self.max_new_tokens // self.minimal_topk)
        share, rest = divmod(self.block_length, steps)
        return share + (step < rest)


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise UsageError(otherwise)


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a pass says about the L positions of the block.

    Attributes:
        candidate: int64 [L], the token to write (argmax, or a sample); never the mask token.
        probability: float32 [L], its probability.
        best: float32 [L], probability of the argmax; equal to ``probability`` when greedy.
        held: float32 [L], probability of the token the position held (of no use at a mask).
    """

    candidate: NDArray[np.int64]
    probability: NDArray[np.float32]
    best: NDArray[np.float32]
    held: NDArray[np.float32]


def accept(
    confidence: NDArray[np.float32], masked: Bools, threshold: float, at_least: int
) -> Bools:
    """Choose masked positions to accept: those above the threshold, or the best few.

    Args:
        confidence: [L].
        masked: [L], positions that may be accepted.
        threshold: strict.
        at_least: when fewer positions than this pass the threshold, this many of the most
            confident ones (as far as there are) are accepted instead; ties go to the left.

    Returns:
        [L].
    """
    above = masked & (confidence > np.float32(threshold))
    if np.count_nonzero(above) >= at_least:
        return above
    ranked = np.argsort(np.where(masked, -confidence, np.inf), kind="stable")
    best = np.zeros_like(masked)
    best[ranked[:at_least]] = True
    return best & masked


def edit(
    prediction: Prediction, current: NDArray[np.int64], editable: Bools, threshold: float
) -> Bools:
    """Choose decoded positions to overwrite: another token is preferred above the threshold.

    Args:
        prediction: of the pass.
        current: [L], tokens held.
        editable: [L], neither masked nor part of the prompt.
        threshold: strict.

    Returns:
        [L].
    """
    differs = prediction.candidate != current
    return editable & differs & (prediction.probability > np.float32(threshold))


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
    """

    kind: Kind
    block: int
    start: int
    token_ids: NDArray[np.int64]
    state: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    accepted: Bools
    edited: Bools


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

    def advance(self, prediction: Prediction) -> Outcome:
        """Apply the pass over positions ``start`` to ``stop`` that gave ``prediction``."""
        start, number, skipped = self.start, self.block, self.context - self.start
        before = self.tokens[start : self.stop].copy()
        state = self._state(start)
        masked = before[skipped:] == self.mask_id
        accepted, edited = self._choose(prediction, masked)
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
