"""The course of a request: passes, confidence, acceptance and editing, before any routing.

It follows ``BlockDecoder``: the prefill covers the prompt and the first block and may accept; a
block is denoised until no mask is left; one more pass commits it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oled_sim.engine.jit import kernel, merged
from oled_sim.synthesis.parameters import Confidence, Moments
from oled_sim.synthesis.random import normal, streams, uniform
from oled_sim.trace.schema import Kind, TokenState

# ruff: noqa: ANN001, ANN202

MASKED, DECODED, PROMPT = (int(s) for s in TokenState)
PREFILL, DENOISE, COMMIT = (int(k) for k in Kind)

MAX_POST_STEPS = 16
"""Passes that rule 2.1 may spend on editing a block without masks, as ``collect`` has it."""


class Dynamics(NamedTuple):
    """:class:`~oled_sim.synthesis.parameters.Confidence` as kernels read it."""

    masked_mean: float
    depth: float
    reach: float
    shrink: float
    neighbour_gain: float
    block_spread: float
    token_spread: float
    pass_spread: float
    stretch: float
    word_mean: float
    word_spread: float
    word_pass_spread: float
    threshold: float
    edit_rate: float


class Course(NamedTuple):
    """A request without routes: I passes, T token rows.

    Attributes:
        kind, block, start, accepted_count: [I]; ``start`` is the first position of the pass.
        token_offset: int64 [I + 1].
        position, state, accepted, edited: [T]. confidence: float32 [T], NaN before the block.
        z: float32 [T], confidence in standard deviations from the mean of its kind, within ±3.
    """

    kind: NDArray[np.uint8]
    block: NDArray[np.int32]
    start: NDArray[np.int32]
    accepted_count: NDArray[np.int32]
    token_offset: NDArray[np.int64]
    position: NDArray[np.int32]
    state: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    accepted: NDArray[np.bool_]
    edited: NDArray[np.bool_]
    z: NDArray[np.float32]


def make_course(
    seed: tuple[int, ...],
    prompt: int,
    output: int,
    block_length: int,
    confidence: Confidence,
    moments: Moments,
    *,
    edits: bool = False,
) -> Course:
    """Return the course of a request of ``prompt`` and ``output`` tokens.

    Args:
        seed: keys of the random stream.
        prompt, output: tokens.
        block_length: tokens per block.
        confidence: its parameters. moments: what ``z`` is relative to.
        edits: rule 2.1, whose passes may replace words.
    """
    dynamics = Dynamics(
        **{n: float(getattr(confidence, n)) for n in Dynamics._fields if n != "edit_rate"},
        edit_rate=confidence.edit_rate if edits else 0.0,
    )
    first, last = prompt // block_length, -(-(prompt + output) // block_length)
    passes = 1 + (last - first) * (block_length + 1 + (MAX_POST_STEPS if edits else 0))
    rows = (first + 1) * block_length + passes * block_length
    per_pass = np.zeros((4, passes), np.int32)
    marks, sure = np.zeros((3, rows), np.uint8), np.empty((1, rows), np.float32)
    passes, rows = _walk(
        streams(*seed, count=1)[0], prompt, first, last, block_length, edits, dynamics,
        per_pass, marks, sure,
    )  # fmt: skip
    kind, block, start, accepted_count = per_pass[:, :passes]
    tokens = (block + 1) * block_length - start
    offset = np.concatenate(([0], np.cumsum(tokens, dtype=np.int64)))
    state, accepted, edited = marks[:, :rows]
    position = np.arange(rows) - np.repeat(offset[:-1] - start, tokens)
    confidence_after = sure[0, :rows]
    z = _standardised(state, accepted, confidence_after, moments)
    return Course(
        kind.astype(np.uint8), block, start, accepted_count, offset, position.astype(np.int32),
        state, confidence_after, accepted.view(np.bool_), edited.view(np.bool_), z,
    )  # fmt: skip


def _standardised(
    state: NDArray[np.uint8],
    accepted: NDArray[np.uint8],
    confidence: NDArray[np.float32],
    moments: Moments,
) -> NDArray[np.float32]:
    kinds = np.where(state != MASKED, 2, accepted)
    table = np.array([moments.masked, moments.accepted, moments.decoded], np.float32)
    z = (confidence - table[kinds, 0]) / table[kinds, 1]
    return np.clip(np.nan_to_num(z), -3, 3)


@merged
def _sigmoid(x):
    return 1.0 / (1.0 + math.exp(-x))


@merged
def _word(rng, about):
    """Return the lasting part of a word's logit."""
    return about.word_mean + about.word_spread * normal(rng)


@merged
def _mask(rng, easy, level, masks, beside, about):
    """Return the logit of a mask.

    Args:
        easy: its lasting part, in standard deviations. level: of its block, a logit.
        masks: masks to its left in the block. beside: whether its left neighbour is a word.
    """
    away = 1.0 - math.exp(-masks / about.reach)
    spread = about.token_spread * easy + about.pass_spread * normal(rng)
    x = level - about.depth * away + (1.0 - about.shrink * away) * spread
    x += about.neighbour_gain if beside else 0.0
    return x * about.stretch if x > 0 else x


@kernel
def _walk(rng, prompt, first, last, length, edits, about, per_pass, marks, sure):
    """Fill the course; return the number of passes and of token rows.

    Args:
        about: :class:`Dynamics`. per_pass: int32 [4, I]: kind, block, start, accepted count.
        marks: uint8 [3, T]: state, accepted, edited. sure: float32 [1, T]: confidence.
    """
    lasting, now = np.empty(length), np.empty(length)
    state, chosen = np.empty(length, np.uint8), np.empty(length, np.bool_)
    i, row = 0, 0
    for block in range(first, last):
        begin = block * length
        level = about.masked_mean + about.block_spread * normal(rng)
        for t in range(length):
            in_prompt = begin + t < prompt
            state[t] = PROMPT if in_prompt else MASKED
            lasting[t] = _word(rng, about) if in_prompt else normal(rng)
        post = 0
        while True:
            masks, best = 0, -1
            for t in range(length):
                chosen[t] = False
                if state[t] != MASKED:
                    now[t] = _sigmoid(lasting[t] + about.word_pass_spread * normal(rng))
                    continue
                beside = t == 0 or state[t - 1] != MASKED
                now[t] = _sigmoid(_mask(rng, lasting[t], level, masks, beside, about))
                chosen[t] = now[t] > about.threshold
                masks += 1
                if best < 0 or now[t] > now[best]:
                    best = t
            if best >= 0:
                chosen[best] = True
            start = 0 if i == 0 else begin
            per_pass[1, i], per_pass[2, i] = block, start
            for _ in range(begin - start):
                marks[0, row], sure[0, row] = PROMPT, np.nan
                row += 1
            replaced = 0
            polish = edits and (masks > 0 or post < MAX_POST_STEPS)
            for t in range(length):
                edit = polish and state[t] == DECODED and uniform(rng) < about.edit_rate
                replaced += int(edit)
                marks[0, row], marks[1, row], marks[2, row] = state[t], chosen[t], edit
                sure[0, row] = now[t]
                per_pass[3, i] += int(chosen[t])
                if chosen[t] or edit:
                    state[t], lasting[t] = DECODED, _word(rng, about)
                row += 1
            done = masks == 0 and replaced == 0 and i > 0
            post += int(masks == 0)
            per_pass[0, i] = PREFILL if i == 0 else (COMMIT if done else DENOISE)
            i += 1
            if done:
                break
    return i, row
