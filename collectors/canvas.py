"""From what the passes of a block-diffusion decoder were given to what they did.

A decoder says nothing about acceptance: it writes tokens over masks, and the next pass is given
the result. So a pass is put away until one shows what became of its positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.trace.schema import Kind, TokenState

UNKNOWN = -1
"""Token id of a position that no pass has shown yet."""


class Target(Protocol):
    """Takes the passes of one request; an ``OpenRequest`` or a ``RequestBuilder``."""

    @property
    def add_pass(self) -> Callable[..., None]:
        """Add one pass; see :meth:`oled_sim.trace.builder.RequestBuilder.add_pass`."""
        ...


class Seen(NamedTuple):
    """One pass as it was observed.

    Attributes:
        ids: int [W], tokens given to the pass.
        first: position of the first of them.
        start: first position whose routing counts; those before are redundant.
        confidence: float [B] of the last B positions, B ≤ W - (start - first).
        routes: ``experts`` [L, T, k] of the T positions from ``start`` on, and what else
            ``add_pass`` takes.
    """

    ids: NDArray[Any]
    first: int
    start: int
    confidence: NDArray[Any]
    routes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CanvasRules:
    """How to read the passes of a request.

    Attributes:
        prompt_tokens: positions that are prompt.
        mask_id: token of a masked position.
        block_length: tokens per block, counted from position 0.
        redact: write -1 for prompt tokens.
        unrolled: the decoder runs passes ahead of knowing whether masks are left; of several in
            sequence over the same positions without a mask only the first, the commit, counts.
    """

    prompt_tokens: int
    mask_id: int
    block_length: int
    redact: bool = False
    unrolled: bool = False


class Canvas:
    """The tokens of one request as its passes show them, and the passes on their way to a trace.

    Passes before the first one with a mask in it are prefill; so is the first pass of all. A later
    pass without masks that edits nothing is a commit. A token that is masked again, as by an edit
    whose most likely token is the mask, counts as edited.

    Attributes:
        dropped: passes that an unrolled loop ran in excess.
    """

    def __init__(self, target: Target, rules: CanvasRules) -> None:
        self.rules = rules
        self._target = target
        self._tokens = np.full(0, UNKNOWN, np.int64)
        self._waiting: Seen | None = None
        self.dropped = 0
        self._passes = 0
        self._denoised = False

    @property
    def passes(self) -> int:
        """Passes seen so far."""
        return self._passes + (self._waiting is not None)

    def add(self, seen: Seen) -> None:
        """Take the next pass; the one before it is complete now.

        Raises:
            TraceError: a token of the prompt changed.
        """
        self.show(seen.ids, seen.first)
        if self._in_excess(seen):
            self.dropped += 1
            return
        self._settle()
        self._waiting = seen

    def show(self, ids: NDArray[Any], first: int) -> None:
        """Take note of the tokens that positions from ``first`` on hold by now.

        Raises:
            TraceError: a token of the prompt changed.
        """
        end = first + len(ids)
        if end > len(self._tokens):
            more = np.full(end - len(self._tokens), UNKNOWN, np.int64)
            self._tokens = np.concatenate((self._tokens, more))
        held = self._tokens[first:end]
        prompt = np.arange(first, end) < self.rules.prompt_tokens
        other = prompt & (ids != held) & (held != UNKNOWN)
        if other.any():
            raise TraceError(
                f"pass {self.passes}: position {first + int(np.argmax(other))} of the prompt holds"
                " another token than before: passes of several requests are mixed"
            )
        held[:] = ids

    def finish(self) -> NDArray[np.int64]:
        """Write the last pass; return all tokens, which :meth:`show` must have brought up to date.

        Returns:
            int64 [positions], UNKNOWN where no pass came by.

        Raises:
            TraceError: no pass held a mask.
        """
        self._settle()
        if not self._denoised:
            raise TraceError(
                f"no pass holds the mask token {self.rules.mask_id}: is it that of another model?"
            )
        return self._tokens

    def generated(self, limit: int, eos_id: int | None) -> NDArray[np.int64]:
        """Return up to ``limit`` generated tokens, up to and including the first ``eos_id``."""
        start = self.rules.prompt_tokens
        tokens = self._tokens[start : start + limit]
        stops = np.flatnonzero(tokens == (UNKNOWN if eos_id is None else eos_id))
        return tokens[: stops[0] + 1] if len(stops) else tokens

    def _in_excess(self, seen: Seen) -> bool:
        """Whether a pass repeats the commit that waits."""
        commit = self._waiting
        if not self.rules.unrolled or commit is None or not self._denoised:
            return False
        if self.rules.mask_id in seen.ids:
            return False
        return commit.first == seen.first and np.array_equal(commit.ids, seen.ids)

    def _settle(self) -> None:
        if self._waiting is None:
            return
        seen, self._waiting = self._waiting, None
        rules = self.rules
        before = seen.ids[seen.start - seen.first :].astype(np.int64)
        end = seen.start + len(before)
        after = self._tokens[seen.start : end]
        position = np.arange(seen.start, end)
        masked = before == rules.mask_id
        accepted = masked & (after != rules.mask_id)
        edited = ~masked & (after != before)
        kind = self._kind(masked, edited)
        prompt = position < rules.prompt_tokens
        confidence = np.full(len(before), np.nan, np.float32)
        if len(seen.confidence):
            confidence[-len(seen.confidence) :] = seen.confidence
        self._target.add_pass(
            kind=kind,
            block=(end - 1) // rules.block_length,
            context=seen.start,
            token_id=np.where(rules.redact & prompt, UNKNOWN, before),
            position=position,
            state=np.where(
                masked, TokenState.MASKED, np.where(prompt, TokenState.PROMPT, TokenState.DECODED)
            ),
            confidence=confidence,
            accepted=accepted,
            edited=edited,
            **seen.routes,
        )
        self._passes += 1

    def _kind(self, masked: NDArray[np.bool_], edited: NDArray[np.bool_]) -> Kind:
        self._denoised |= bool(masked.any())
        if self._passes == 0 or not self._denoised:
            return Kind.PREFILL
        return Kind.DENOISE if masked.any() or edited.any() else Kind.COMMIT
