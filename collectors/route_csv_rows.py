"""The rows of a route CSV as tokens, turn by turn, every row checked.

A row is one expert of one token in one layer; k rows in succession, slots 0 to k - 1, are the
token's route in that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.trace.manifest import expert_dtype

from .route_csv_header import Header, read_header
from .text_blocks import BLOCK_BYTES, LineReader, parse_columns

PREFILL, DECODE = 0, 1
"""Values of the column ``phase``."""

PADDING = -1
"""Expert id of a row that stands for nothing."""

TOKEN_KEY = ("turn", "phase", "step", "layer")
"""Columns that the k rows of a token in a layer share."""

COLUMN_TYPES: dict[str, pa.DataType] = {
    **{name: pa.int32() for name in (*TOKEN_KEY, "slot", "expert")},
    "weight": pa.float64(),
}
"""Columns that a trace is made of; the others of a file are ignored."""

Columns = dict[str, NDArray[Any]]
"""The columns of :data:`COLUMN_TYPES` and ``line``, the number of each row's line."""


class Tokens(NamedTuple):
    """Routes of n tokens in their layers, in file order.

    ``turn``, ``phase``, ``step``, ``layer``: int32 [n]. ``line``: int64 [n], of the first row.
    ``experts``: uint8 or uint16 [n, k]. ``gates``: float16 [n, k], weights renormalised over the
    k, NaN where one is unknown.
    """

    turn: NDArray[np.int32]
    phase: NDArray[np.int32]
    step: NDArray[np.int32]
    layer: NDArray[np.int32]
    line: NDArray[np.int64]
    experts: NDArray[Any]
    gates: NDArray[np.float16]

    def take(self, index: Any) -> Tokens:
        """Return the tokens that ``index`` selects."""
        return Tokens._make(column[index] for column in self)

    def split_turns(self) -> list[Tokens]:
        """Return runs of tokens of one turn."""
        cuts = np.flatnonzero(np.diff(self.turn)) + 1
        bounds = [0, *cuts.tolist(), len(self.turn)]
        return [self.take(slice(a, b)) for a, b in pairwise(bounds)]


def join(parts: list[Tokens]) -> Tokens:
    """Return tokens that follow each other as one."""
    return Tokens._make(np.concatenate(columns) for columns in zip(*parts, strict=True))


class RouteCsv:
    """An open route CSV; a context manager.

    Args:
        path: the file, plain, xz or gzip.
        on_progress: called with the share of the file that has been read.
        block_bytes: about how much text is held at a time.

    Attributes:
        header: what the file says before its rows.
        padding_rows: rows of expert -1 that were left out so far.
        unknown_weights: rows whose weight is nan so far.

    Raises:
        TraceError: the header is malformed; names file and line.
    """

    def __init__(
        self,
        path: Path,
        on_progress: Callable[[float], None] = lambda _: None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.path = path
        self.on_progress = on_progress
        self.padding_rows = 0
        self.unknown_weights = 0
        self._reader = LineReader(path, block_bytes)
        try:
            self.header: Header = read_header(self._reader, COLUMN_TYPES)
        except TraceError:
            self._reader.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def turns(self) -> Iterator[Tokens]:
        """Yield the tokens of each turn; only that turn is in memory.

        Raises:
            TraceError: malformed; names file and line.
        """
        held: list[Tokens] = []
        for part in self._parts():
            if held and held[-1].turn[0] != part.turn[0]:
                self._refuse_if(part.turn < held[-1].turn[0], part.line, "the turn is over already")
                turn, held = join(held), []
                yield self._checked_turn(turn)
            held.append(part)
        if not held:
            raise TraceError(f"{self.path} holds no route: there is nothing to import")
        turn, held = join(held), []
        yield self._checked_turn(turn)

    def _parts(self) -> Iterator[Tokens]:
        """Yield runs of tokens of one turn; the last token of a block waits for its other rows."""
        rest: Columns = {}
        for block in self._reader.blocks():
            columns = parse_columns(block, self.path, self.header.columns, COLUMN_TYPES)
            columns["line"] = block.first_line + np.arange(len(columns["turn"]))
            columns = self._checked_rows(columns)
            if rest:
                columns = {name: np.append(rest[name], columns[name]) for name in columns}
            starts = _token_starts(columns)
            last = int(starts[-1]) if len(starts) else 0
            rest = {name: values[last:] for name, values in columns.items()}
            if last:
                whole = {name: values[:last] for name, values in columns.items()}
                yield from self._tokens(whole, starts[:-1]).split_turns()
            self.on_progress(self._reader.fraction)
        if rest and len(rest["turn"]):
            yield self._tokens(rest, np.zeros(1, np.int64))

    def _checked_rows(self, columns: Columns) -> Columns:
        """Leave out padding, and check every other row for itself."""
        real = columns["expert"] != PADDING
        self.padding_rows += int(np.count_nonzero(~real))
        columns = {name: values[real] for name, values in columns.items()}
        header, line, phase = self.header, columns["line"], columns["phase"]
        for name in ("turn", "step"):
            self._refuse_if(columns[name] < 0, line, f"the {name} is negative")
        self._refuse_if((phase != PREFILL) & (phase != DECODE), line, "the phase is not 0 or 1")
        unknown = ~np.isin(columns["layer"], list(header.expert_bytes))
        problem = "the header gives no expert_bytes for layer {layer}"
        self._refuse_if(unknown, line, problem, columns)
        outside = (columns["expert"] < 0) | (columns["expert"] >= header.experts)
        problem = f"expert {{expert}} is not within 0..{header.experts - 1}"
        self._refuse_if(outside, line, problem, columns)
        wrong = (columns["weight"] < 0) | np.isinf(columns["weight"])
        self._refuse_if(wrong, line, "weight {weight} is negative or infinite", columns)
        self.unknown_weights += int(np.count_nonzero(np.isnan(columns["weight"])))
        return columns

    def _tokens(self, columns: Columns, starts: NDArray[np.int64]) -> Tokens:
        """Put the rows of each token side by side."""
        k, line = self.header.top_k, columns["line"]
        self._check_lengths(starts, columns)
        slot = columns["slot"].reshape(-1, k)
        wrong = (slot != np.arange(k)).ravel()
        problem = f"slot {{slot}} is out of turn: those of a token are 0 to {k - 1} in succession"
        self._refuse_if(wrong, line, problem, columns)
        experts = columns["expert"].reshape(-1, k)
        repeated = _repeats(experts).ravel()
        problem = "expert {expert} occurs twice in the token's top-k"
        self._refuse_if(repeated, line, problem, columns)
        weight = columns["weight"].reshape(-1, k)
        total = weight.sum(axis=1, keepdims=True)
        self._refuse_if(total[:, 0] == 0, line[::k], "the token's weights are all 0")
        return Tokens(
            # Copies: views would keep the whole block in memory.
            *(columns[name][::k].copy() for name in (*TOKEN_KEY, "line")),
            experts=experts.astype(expert_dtype(self.header.experts)),
            gates=(weight / total).astype(np.float16),
        )

    def _check_lengths(self, starts: NDArray[np.int64], columns: Columns) -> None:
        length = np.diff(starts, append=len(columns["turn"]))
        wrong = length != self.header.top_k
        if wrong.any():
            token = int(np.argmax(wrong))
            self._refuse(
                int(columns["line"][starts[token]]),
                f"the token has {length[token]} experts in this layer,"
                f" n_expert_used is {self.header.top_k}",
            )

    def _checked_turn(self, turn: Tokens) -> Tokens:
        """Check how the tokens of a turn follow each other."""
        late = np.diff(turn.phase, prepend=PREFILL) < 0
        self._refuse_if(late, turn.line, "prefill follows decoding in one turn")
        prompt = int(np.count_nonzero(turn.phase == PREFILL))
        place = turn.step.astype(np.int64) * self.header.total_layers + turn.layer
        twice = "the token is there twice in this layer"
        order = np.argsort(place[:prompt], kind="stable")
        again = np.zeros(prompt, np.bool_)
        again[order] = np.diff(place[:prompt][order], prepend=-1) == 0
        self._refuse_if(again, turn.line, twice)
        move = np.diff(place[prompt:], prepend=-1)
        self._refuse_if(move == 0, turn.line[prompt:], twice)
        back = "decoding goes back to an earlier step or layer"
        self._refuse_if(move < 0, turn.line[prompt:], back)
        return turn

    def _refuse_if(
        self,
        wrong: NDArray[np.bool_],
        line: NDArray[np.int64],
        problem: str,
        columns: Columns | None = None,
    ) -> None:
        """Raise for the first True of ``wrong``; ``problem`` may name values of its row."""
        if wrong.any():
            row = int(np.argmax(wrong))
            values = {name: column[row] for name, column in (columns or {}).items()}
            self._refuse(int(line[row]), problem.format(**values))

    def _refuse(self, line: int, problem: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {line}: {problem}")


def _token_starts(columns: Columns) -> NDArray[np.int64]:
    """Return the first row of each run of rows that share :data:`TOKEN_KEY`."""
    rows = len(columns["turn"])
    new = np.zeros(rows, np.bool_)
    new[:1] = True
    for name in TOKEN_KEY:
        new[1:] |= columns[name][1:] != columns[name][:-1]
    return np.flatnonzero(new)


def _repeats(experts: NDArray[Any]) -> NDArray[np.bool_]:
    """Return, [n, k], which ids stand in an earlier slot too."""
    found = np.zeros(experts.shape, np.bool_)
    for slot in range(1, experts.shape[1]):
        found[:, slot] = (experts[:, :slot] == experts[:, slot : slot + 1]).any(axis=1)
    return found
