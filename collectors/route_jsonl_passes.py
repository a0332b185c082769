"""Which forward passes the rows of a route log belong to, and what they are for.

A log says neither. Its rows stand in the order in which they were computed: layer by layer within
a pass. So a pass ends where the layer goes back, or where ``token_idx`` does not rise within a
layer. ``token_idx`` is the position in the sequence in some logs; in others it counts the tokens of
the engine's batch, and starts anew in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oled_sim.trace.schema import Kind

from .cleaning import PADDING, Cleaning, dummy_tokens
from .recorded import AUTOREGRESSIVE_PREFILL, Place, Recorded, autoregressive


class Passes:
    """Turns the rows of one id of a log into requests.

    Attributes:
        prompt_tokens: as the user says, or None.
        undivided: requests whose prompt could not be told from decoding.
        batches: requests that are whole batches.
    """

    def __init__(self, prompt_tokens: int | None) -> None:
        self.prompt_tokens = prompt_tokens
        self.undivided = 0
        self.batches = 0

    def requests(self, recorded: Recorded, cleaning: Cleaning) -> Iterator[Recorded]:
        """Yield what the rows hold: a request, or one per run of an engine.

        Args:
            recorded: with ``step`` counting passes and ``position`` the log's ``token_idx``.
            cleaning: counts dummies and padding.
        """
        padding = (recorded.experts == PADDING).all(axis=1)
        cleaning.padding += int(np.count_nonzero(padding))
        recorded = recorded.keep(~padding)
        if not len(recorded.step):
            return
        begins = np.diff(recorded.step, prepend=recorded.step[0] - 1) != 0
        dummy = dummy_tokens(recorded, np.ones(len(recorded.token), np.bool_), begins)
        cleaning.dummies += int(np.count_nonzero(dummy))
        # An engine profiles itself when it starts: what follows is another run.
        restart = dummy & ~np.append(True, dummy[:-1])
        run = np.cumsum(restart)
        for number in range(int(run[-1]) + 1):
            mine = (run == number) & ~dummy
            if mine.any():
                part = recorded.keep(mine[recorded.token])
                after_dummies = bool(dummy[run == number].any())
                yield self._with_passes(part, after_dummies)

    def _with_passes(self, recorded: Recorded, after_dummies: bool) -> Recorded:
        if len(np.unique(recorded.position)) < len(recorded.position):
            self.batches += 1
            return _batches(recorded, self.prompt_tokens)
        if after_dummies:  # they were counted too
            recorded = replace(recorded, position=recorded.position - recorded.position.min())
        return self._sequence(recorded)

    def _sequence(self, recorded: Recorded) -> Recorded:
        """Return a request whose ``token_idx`` are positions."""
        if self.prompt_tokens is not None:
            step = autoregressive(recorded.position, self.prompt_tokens)
            return _by_step(recorded, step)
        passes, tokens = np.unique(recorded.step, return_counts=True)
        single = np.flatnonzero(tokens == 1)
        prefill = passes[: single[0]] if len(single) else passes[:0]
        if len(prefill):
            step = np.where(
                np.isin(recorded.step, prefill), AUTOREGRESSIVE_PREFILL, recorded.position
            )
            return _by_step(recorded, step)
        self.undivided += 1
        return _by_step(recorded, recorded.position)


def log_passes(token: NDArray[Any], layer: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number of the pass of every row: int64 [n]."""
    back = np.diff(layer)
    new = (back < 0) | ((back == 0) & (np.diff(token) <= 0))
    return np.concatenate(([0], np.cumsum(new)))


def recorded_log(
    number: int,
    token: NDArray[np.int32],
    layer: NDArray[np.int32],
    experts: NDArray[Any],
    gates: NDArray[Any] | None,
    line: NDArray[np.int64],
    source: Any,
    where: Place,
) -> Recorded:
    """Return the rows of one id of a log with passes numbered."""
    step = log_passes(token, layer)
    wide = int(token.max()) + 1
    keys, index = np.unique(step * wide + token, return_inverse=True)
    return Recorded(
        number=number,
        step=keys // wide,
        position=keys % wide,
        token=index,
        layer=layer,
        experts=experts,
        gates=gates,
        place=line,
        source=source,
        where=where,
    )


def _by_step(recorded: Recorded, step: NDArray[np.int64]) -> Recorded:
    """Return the request with other steps, tokens in their order."""
    order = np.lexsort((recorded.position, step))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return replace(
        recorded,
        step=step[order],
        position=recorded.position[order],
        token=rank[recorded.token],
    )


def _batches(recorded: Recorded, prompt_tokens: int | None) -> Recorded:
    """Return a request whose passes are those of a batch, every token one of its sequences.

    Its prefill are the passes before which there were fewer than ``prompt_tokens`` tokens; by
    default the first passes up to the largest, if the one after that is smaller. The context of a
    decoding pass is the mean over its sequences: tokens so far, by its own.
    """
    start = np.flatnonzero(np.diff(recorded.step, prepend=recorded.step[0] - 1))
    tokens = np.diff(start, append=len(recorded.step))
    if prompt_tokens is not None:
        prefill = start < prompt_tokens
    else:
        largest = int(np.argmax(tokens))
        declines = largest + 1 < len(tokens) and tokens[largest + 1] < tokens[largest]
        prefill = np.arange(len(tokens)) <= (largest if declines else -1)
    kind = np.where(prefill, Kind.PREFILL, Kind.DENOISE)
    context = np.where(prefill, 0, start // tokens)
    block = np.arange(len(tokens))
    per_pass = {"kind": kind, "context": context, "block": block}
    about = {name: np.repeat(values, tokens) for name, values in per_pass.items()}
    about["accepted"] = about["kind"] == Kind.DENOISE
    return replace(recorded, about=about)
