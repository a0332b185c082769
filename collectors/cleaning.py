"""Routes that stand for nothing: padding, layers and shards that were not recorded, dummy batches.

Engines and recorders leave such rows behind: -1 where a slot holds no token, zeros where a layer
has no experts or a shard was not collected, and the batch of equal tokens that vLLM profiles its
memory with, before the first request. Loaded as routes they would make any cache look good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.trace.validate import DUMMY_ROWS, DUMMY_ROWS_WITHOUT_GATES

from .recorded import Recorded

PADDING = -1


@dataclass
class Cleaning:
    """Drops what stands for nothing, and counts it.

    Attributes:
        padding: routes whose ids are all -1. zero_tokens: tokens whose ids are 0 in every layer.
        zero_rows: by layer, other routes whose ids are all 0. rows: by layer, routes that are kept.
        first_zero: by layer, the complaint about the first of ``zero_rows``.
        dummies: tokens of dummy batches.
        exported: the file holds a trace, where what looks like a dummy batch is none.
    """

    exported: bool = False
    padding: int = 0
    zero_tokens: int = 0
    dummies: int = 0
    zero_rows: Counter[int] = field(default_factory=Counter)
    rows: Counter[int] = field(default_factory=Counter)
    first_zero: dict[int, str] = field(default_factory=dict)

    def clean(self, recorded: Recorded, may_start: NDArray[np.bool_] | None = None) -> Recorded:
        """Return the request without padding, unrecorded routes and dummy batches.

        Args:
            recorded: the request.
            may_start: bool [T], tokens with which a dummy batch may begin (None: the first).
        """
        recorded = self._without_padding(recorded, may_start)
        return recorded if len(recorded.step) == 0 else self._without_zeros(recorded)

    def notes(self) -> Iterator[str]:
        """Yield a sentence about everything that was left out.

        Raises:
            TraceError: a layer holds zeros in some tokens only: a shard was not recorded.
        """
        for layer in sorted(self.zero_rows):
            if self.rows[layer]:
                raise TraceError(self.first_zero[layer])
        if self.padding:
            yield f"{self.padding:,} padding routes (ids -1) are left out"
        if self.zero_tokens:
            yield f"{self.zero_tokens:,} padding tokens (ids 0 in every layer) are left out"
        if self.dummies:
            yield (
                f"{self.dummies:,} tokens of an engine's profiling batch (equal routes in sequence)"
                " are left out"
            )
        if self.zero_rows:
            layers = ", ".join(map(str, sorted(self.zero_rows)))
            yield f"layers without experts, or not recorded (all ids 0), are left out: {layers}"

    def _without_padding(self, recorded: Recorded, may_start: NDArray[np.bool_] | None) -> Recorded:
        padding = (recorded.experts == PADDING).all(axis=1)
        self.padding += int(np.count_nonzero(padding))
        if self.exported:
            return recorded.keep(~padding)
        dummy = dummy_tokens(recorded, ~padding, may_start)
        self.dummies += int(np.count_nonzero(dummy))
        return recorded.keep(~padding & ~dummy[recorded.token])

    def _without_zeros(self, recorded: Recorded) -> Recorded:
        if recorded.experts.shape[1] == 1:  # expert 0 is a route like any other
            self._count(recorded)
            return recorded
        zero = ~recorded.experts.any(axis=1)
        if zero.any():
            filled = np.zeros(len(recorded.step), np.bool_)
            filled[recorded.token[~zero]] = True
            self.zero_tokens += int(np.count_nonzero(~filled))
            odd = zero & filled[recorded.token]
            for layer in np.unique(recorded.layer[odd]).tolist():
                self._note_zeros(recorded, odd & (recorded.layer == layer), layer)
            recorded = recorded.keep(~zero)
        self._count(recorded)
        return recorded

    def _note_zeros(self, recorded: Recorded, rows: NDArray[np.bool_], layer: int) -> None:
        self.zero_rows[layer] += int(np.count_nonzero(rows))
        if layer not in self.first_zero:
            where = recorded.where(int(recorded.place[np.argmax(rows)]), layer)
            self.first_zero[layer] = (
                f"{recorded.source}, {where}: the ids are all 0, those of other tokens in the"
                " layer are not: a shard was not recorded"
            )

    def _count(self, recorded: Recorded) -> None:
        layers, counts = np.unique(recorded.layer, return_counts=True)
        self.rows.update(dict(zip(layers.tolist(), counts.tolist(), strict=True)))


def dummy_tokens(
    recorded: Recorded, wanted: NDArray[np.bool_], may_start: NDArray[np.bool_] | None
) -> NDArray[np.bool_]:
    """Return, bool [T], which tokens belong to a dummy batch.

    That is a run of at least ``DUMMY_ROWS`` tokens (``DUMMY_ROWS_WITHOUT_GATES`` without weights)
    whose routes are the same, weights included, in every layer that holds them, from a token on
    with which a batch may begin. Text may repeat itself, but not to the last digit.
    """
    size = len(recorded.step)
    least = DUMMY_ROWS_WITHOUT_GATES if recorded.gates is None else DUMMY_ROWS
    held, dummy = np.zeros(size, np.int64), np.zeros(size, np.int64)
    if size < least:
        return np.zeros(size, np.bool_)
    if may_start is None:
        if not _begins_alike(recorded, wanted, least):
            return np.zeros(size, np.bool_)
        may_start = np.zeros(size, np.bool_)
        may_start[0] = True
    for layer in np.unique(recorded.layer[wanted]):
        rows = np.flatnonzero(wanted & (recorded.layer == layer))
        rows = rows[np.argsort(recorded.token[rows], kind="stable")]
        token = recorded.token[rows]
        held[token] += 1
        dummy[token] += _in_dummy_run(recorded, rows, may_start[token], least)
    return (held > 0) & (held == dummy)


def _begins_alike(recorded: Recorded, wanted: NDArray[np.bool_], least: int) -> bool:
    """Return whether the first tokens have one route in their first layer: a cheap first look.

    It tells where every token has a route in every layer; elsewhere a token may be a dummy by other
    layers alone.
    """
    layers = len(np.unique(recorded.layer[wanted]))
    if np.count_nonzero(wanted) < layers * len(recorded.step):
        return True
    early = np.flatnonzero(wanted & (recorded.token < least))
    ids = recorded.experts[early[recorded.layer[early] == recorded.layer[early[:1]]]]
    return bool((ids == ids[:1]).all())


def _in_dummy_run(
    recorded: Recorded, rows: NDArray[np.int64], may_start: NDArray[np.bool_], least: int
) -> NDArray[np.bool_]:
    same = np.zeros(len(rows), np.bool_)
    same[1:] = (recorded.experts[rows[1:]] == recorded.experts[rows[:-1]]).all(axis=1)
    if recorded.gates is not None:
        same[1:] &= (recorded.gates[rows[1:]] == recorded.gates[rows[:-1]]).all(axis=1)
    start = np.flatnonzero(~same)
    length = np.diff(start, append=len(rows))
    # A run counts from the first token on with which a batch may begin.
    run = np.cumsum(~same) - 1
    first = np.full(len(start), len(rows))
    np.minimum.at(first, run[may_start], np.flatnonzero(may_start))
    long = start + length - first >= least
    return long[run] & (np.arange(len(rows)) >= first[run])
