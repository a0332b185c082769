"""Block-diffusion generation with a native LLaDA2 model.

B requests start together; every pass advances each unfinished one by its own next pass, of
whatever kind, and finished ones leave. All tokens of a pass are flattened to one sequence, so
nothing is padded and a router sees real tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oled_sim.errors import UsageError
from oled_sim.model.attention import (
    BlockCausalAttention,
    CachedAttention,
    KVCache,
    Segment,
    segment_positions,
)
from oled_sim.model.block_decoder import BlockDecoder, Choice, Outcome, canvas_length
from oled_sim.model.config import LLaDA2Config
from oled_sim.model.decoding import DecodeSettings, Prediction
from oled_sim.model.layers import AttentionBackend
from oled_sim.model.llada2 import LLaDA2MoeModelLM
from oled_sim.trace.schema import Kind


@dataclass(frozen=True, slots=True)
class PassRecord:
    """What one forward pass did to one request. T tokens, in order of position.

    Without a prefix cache a pass runs the whole window again; the record then holds what a
    cached pass would have run (the block, or for the first pass everything).

    Attributes:
        row: index of the request in ``prompts``.
        forward: number of the forward pass in this call of :func:`generate`; the records of a
            forward come together, in order of row.
        kind: prefill, denoise or commit.
        block: index of the block, counted from position 0 of the prompt.
        context: tokens whose keys and values precede this pass.
        positions: int32 [T]. token_ids: int64 [T] at the start of the pass.
        state: uint8 [T], a :class:`~oled_sim.trace.schema.TokenState` at the start of the pass.
        confidence: float32 [T] after the pass: probability of the argmax at masked positions,
            of the token held at the start at others, NaN before the block.
        accepted, edited: bool [T].
        written: int64 [T], token ids after the pass.
        first, last: the T tokens are rows ``first`` to ``last`` (exclusive) of the flattened
            pass, which is what a hook on a router sees.
        time_us: wall time of the forward pass, up to its acceptances, in microseconds; shared
            by all its records.
    """

    row: int
    forward: int
    kind: Kind
    block: int
    context: int
    positions: NDArray[np.int32]
    token_ids: NDArray[np.int64]
    state: NDArray[np.uint8]
    confidence: NDArray[np.float32]
    accepted: NDArray[np.bool_]
    edited: NDArray[np.bool_]
    written: NDArray[np.int64]
    first: int
    last: int
    time_us: float


class Conductor(Protocol):
    """Follows a generation from inside, and may decide in place of the rule."""

    def before_pass(self, row: int, request: BlockDecoder) -> None:
        """Called before each forward pass, once per request in it."""
        ...

    def choose(self, row: int, prediction: Prediction) -> Choice | None:
        """Return the positions of the block to accept and edit, or None to leave it to the rule."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """The result for one prompt.

    Attributes:
        tokens: generated ids up to and including the first end-of-text token.
        ended: whether there is such a token (otherwise ``max_new_tokens`` was reached).
        passes: forward passes the request took part in.
    """

    tokens: tuple[int, ...]
    ended: bool
    passes: int


@torch.inference_mode()
def generate(
    model: LLaDA2MoeModelLM,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_pass: Callable[[PassRecord], None] | None = None,
    *,
    streams: Sequence[int] | None = None,
    conductor: Conductor | None = None,
) -> list[Generation]:
    """Generate for all ``prompts`` (token ids) as one batch.

    Args:
        model: in evaluation mode, on any device.
        prompts: at least one; they may differ in length and be empty.
        settings: the decoding rule and its constants.
        on_pass: called after every forward pass, once per request in it.
        streams: number of each request's random stream (temperature > 0), so that what it
            draws does not depend on the batch it is in; by default its index in ``prompts``.
        conductor: follows every pass from inside.

    Returns:
        One result per prompt, in order.

    Raises:
        UsageError: a prompt does not fit the context or holds an impossible token.
    """
    check_prompts(prompts, settings, model.config)
    if streams is None:
        streams = range(len(prompts))
    batch = _Batch(model, prompts, settings, streams, conductor)
    while active := batch.active():
        for record in batch.step(active):
            if on_pass is not None:
                on_pass(record)
    return [batch.result(row) for row in range(len(prompts))]


def check_prompts(
    prompts: Sequence[Sequence[int]], settings: DecodeSettings, config: LLaDA2Config
) -> None:
    """Check that a model of ``config`` can generate for ``prompts`` (token ids).

    Raises:
        UsageError: no prompt, one that does not fit the context, or an impossible token.
    """
    if not prompts:
        raise UsageError("no prompt to generate from")
    for number, prompt in enumerate(prompts):
        needed = canvas_length(len(prompt), settings)
        if needed > config.max_position_embeddings:
            raise UsageError(
                f"prompt {number} has {len(prompt)} tokens and with {settings.max_new_tokens} new "
                f"ones needs {needed} positions of {config.max_position_embeddings}: shorten the "
                "prompt or generate less"
            )
        if any(not 0 <= token < config.vocab_size for token in prompt):
            raise UsageError(f"prompt {number} holds a token id outside 0..{config.vocab_size - 1}")
        if config.mask_token_id in prompt:
            raise UsageError(f"prompt {number} holds the mask token {config.mask_token_id}")


class _Batch:
    """The requests of one call, and how their passes are run."""

    def __init__(
        self,
        model: LLaDA2MoeModelLM,
        prompts: Sequence[Sequence[int]],
        settings: DecodeSettings,
        streams: Sequence[int],
        conductor: Conductor | None = None,
    ) -> None:
        config = model.config
        self.conductor = conductor
        self.model = model
        self.settings = settings
        ids = (config.mask_token_id, config.eos_token_id)
        self.requests = [BlockDecoder(prompt, settings, *ids) for prompt in prompts]
        self.samplers = [_Sampler(settings, stream, model.device) for stream in streams]
        self.passes = [0] * len(prompts)
        self.forwards = 0
        self.cache = self._make_cache() if settings.prefix_cache else None

    def _make_cache(self) -> KVCache:
        capacity = max(len(request.tokens) for request in self.requests)
        model = self.model
        return KVCache(model.config, len(self.requests), capacity, model.device, model.dtype)

    def active(self) -> list[int]:
        """Return the rows that are not finished."""
        return [row for row, request in enumerate(self.requests) if not request.done]

    def step(self, rows: list[int]) -> list[PassRecord]:
        """Run one forward pass over ``rows`` and advance each."""
        if self.conductor is not None:
            for row in rows:
                self.conductor.before_pass(row, self.requests[row])
        began = time.perf_counter()
        segments = [self._segment(row) for row in rows]
        predictions = self._predict(segments)
        took_us = (time.perf_counter() - began) * 1e6
        ends = accumulate(s.length for s in segments)
        records = [
            self._advance(row, prediction, end, took_us)
            for row, prediction, end in zip(rows, predictions, ends, strict=True)
        ]
        self.forwards += 1
        return records

    def result(self, row: int) -> Generation:
        """Return what a finished row generated."""
        tokens = tuple(self.requests[row].output.tolist())
        ended = self.model.config.eos_token_id in tokens
        return Generation(tokens, ended, self.passes[row])

    def _segment(self, row: int) -> Segment:
        request = self.requests[row]
        start = request.start if self.cache else 0
        return Segment(row, start, request.stop)

    def _attention(self, segments: list[Segment]) -> AttentionBackend:
        if self.cache:
            return CachedAttention(self.cache, segments, self.settings.block_length)
        return BlockCausalAttention(self.settings.block_length, [s.length for s in segments])

    def _predict(self, segments: list[Segment]) -> list[Prediction]:
        """Run the model on ``segments``; the only wait for the device is for the result."""
        device = self.model.device
        ids = [self.requests[s.row].tokens[s.start : s.stop] for s in segments]
        token_ids = torch.from_numpy(np.concatenate(ids)).to(device, non_blocking=True)
        positions = segment_positions(segments).to(device, non_blocking=True)
        length = self.settings.block_length
        ends = accumulate(s.length for s in segments)
        rows = torch.cat([torch.arange(end - length, end) for end in ends])
        rows = rows.to(device, non_blocking=True)
        logits = self.model(token_ids, positions, self._attention(segments), rows)
        logits = logits.view(len(segments), length, -1)
        samplers = [self.samplers[s.row] for s in segments]
        held = token_ids[rows].view(len(segments), length)
        return _judge(logits, held, self._never(), samplers)

    def _never(self) -> list[int]:
        """Return the tokens that are no candidates."""
        config = self.model.config
        return [config.mask_token_id, *[config.eos_token_id] * self.settings.ignore_eos]

    def _advance(self, row: int, prediction: Prediction, end: int, took_us: float) -> PassRecord:
        choice = None if self.conductor is None else self.conductor.choose(row, prediction)
        outcome = self.requests[row].advance(prediction, choice)
        self.passes[row] += 1
        return _record(row, self.forwards, outcome, end, took_us)


class _Sampler:
    """Draws candidates for one request from its own random stream; greedy at temperature 0."""

    def __init__(self, settings: DecodeSettings, stream: int, device: torch.device) -> None:
        self.temperature = settings.temperature
        seed = np.random.SeedSequence((settings.seed, stream)).generate_state(1, np.uint64)[0]
        self._generator = torch.Generator(device)
        self._generator.manual_seed(int(seed))

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose a token for each row of fp32 ``logits`` [L, V]; int64 [L]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        # The argmax of logits / T plus Gumbel noise (-log of an exponential) is a sample of
        # softmax(logits / T).
        noise = torch.empty_like(logits).exponential_(generator=self._generator).log_()
        return (logits / self.temperature - noise).argmax(-1)


def _judge(
    logits: Tensor, held: Tensor, never: Sequence[int], samplers: Sequence[_Sampler]
) -> list[Prediction]:
    """Turn fp32 ``logits`` [B, L, V] into predictions; overwrites logits of ``never``.

    Probabilities are of the whole vocabulary, but tokens of ``never`` (the mask) are no candidates.
    """
    total = logits.logsumexp(-1)
    held_logit = logits.gather(-1, held.unsqueeze(-1)).squeeze(-1)
    for token in never:
        logits[..., token] = -torch.inf
    candidate = torch.stack([draw(row) for draw, row in zip(samplers, logits, strict=True)])
    chosen = logits.gather(-1, candidate.unsqueeze(-1)).squeeze(-1)
    scores = torch.stack((chosen, logits.amax(-1), held_logit)) - total
    # One copy to the host: float64 holds token ids exactly.
    packed = torch.cat((candidate.unsqueeze(0).double(), scores.exp().double())).cpu().numpy()
    return [
        Prediction(ids.astype(np.int64), *(p.astype(np.float32) for p in probabilities))
        for ids, *probabilities in packed.swapaxes(0, 1)
    ]


def _record(row: int, forward: int, outcome: Outcome, end: int, took_us: float) -> PassRecord:
    length = len(outcome.token_ids)
    return PassRecord(
        row=row,
        forward=forward,
        kind=outcome.kind,
        block=outcome.block,
        context=outcome.start,
        positions=np.arange(outcome.start, outcome.start + length, dtype=np.int32),
        token_ids=outcome.token_ids,
        state=outcome.state,
        confidence=outcome.confidence,
        accepted=outcome.accepted,
        edited=outcome.edited,
        written=outcome.written,
        first=end - length,
        last=end,
        time_us=took_us,
    )
