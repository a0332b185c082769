"""The lines of a JSON route log as arrays, every line checked.

The format is that of several loggers patched into vLLM: one object a line, ``{"type": "meta",
...}`` at the start of every engine's run and ``{"type": "route", "req_id", "token_idx", "layer",
"topk_ids", "topk_weights"}`` for every token in every logged layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.json as pjson
from numpy.typing import NDArray

from oled_sim.errors import TraceError

from .text_blocks import BLOCK_BYTES, Block, LineReader

ROUTE, META = "route", "meta"


class LogRows(NamedTuple):
    """n routes in the order of the file.

    ``request``: int64 [n], index of the log's own id. ``token``, ``layer``: int32 [n]. ``line``:
    int64 [n]. ``experts``: int32 [n, k]. ``gates``: float32 [n, k], NaN where the line has no
    weights.
    """

    request: NDArray[Any]
    token: NDArray[np.int32]
    layer: NDArray[np.int32]
    line: NDArray[np.int64]
    experts: NDArray[np.int32]
    gates: NDArray[np.float32]

    def take(self, index: Any) -> LogRows:
        """Return the rows that ``index`` selects."""
        return LogRows._make(column[index] for column in self)


class RouteLog:
    """A log of routes.

    Attributes:
        meta: what the file's first ``meta`` line says.
        top_k: experts per token, from there or from the first route; 0 before.
        others: lines of other types so far, which are ignored.
        ids: index by the log's own id of a request, in the order of the file.
    """

    def __init__(self, path: Path, block_bytes: int = BLOCK_BYTES) -> None:
        self.path = path
        self.block_bytes = block_bytes
        self.meta: dict[str, Any] = {}
        self.top_k = 0
        self.others = 0
        self.ids: dict[Any, int] = {}
        self._schema = _schema(self._first_id())

    def rows(self, on_progress: Any = lambda _: None) -> Iterator[tuple[int, LogRows]]:
        """Yield the number of the engine's run and some of its rows.

        Raises:
            TraceError: malformed; names file and line.
        """
        self.others = run = 0
        seen = False
        with LineReader(self.path, self.block_bytes) as reader:
            for block in reader.blocks():
                table = self._parse(block)
                meta, route = _kinds(table)
                for start, stop in _between(np.flatnonzero(meta), len(meta)):
                    if start and meta[start - 1]:
                        self._read_meta(block, start - 1)
                        run += seen
                        seen = False
                    wanted = start + np.flatnonzero(route[start:stop])
                    if len(wanted):
                        seen = True
                        part = table.slice(start, stop - start)
                        part = part if len(wanted) == stop - start else table.take(wanted)
                        yield run, self._checked(part, block.first_line + wanted)
                self.others += int(np.count_nonzero(~(meta | route)))
                on_progress(reader.fraction)

    def _first_id(self) -> Any:
        """Return the id of the first route, whose type all others share."""
        with LineReader(self.path) as reader:
            while line := reader.read_line():
                try:
                    found = json.loads(line)
                except (ValueError, RecursionError):
                    return ""  # parsing the block says what is wrong
                if isinstance(found, dict) and "topk_ids" in found:
                    return found.get("req_id")
        return ""

    def _parse(self, block: Block) -> pa.Table:
        self._check_text(block)
        try:
            table = pjson.read_json(
                pa.BufferReader(block.data),
                pjson.ReadOptions(use_threads=False, block_size=len(block.data) + 1),
                pjson.ParseOptions(
                    explicit_schema=self._schema, unexpected_field_behavior="ignore"
                ),
            )
        except pa.ArrowInvalid as error:
            self._blame(block, str(error))
        if table.num_rows != block.data.count(b"\n"):
            self._blame(block, "it is not one JSON object a line")
        return table.combine_chunks()

    def _check_text(self, block: Block) -> None:
        if block.data.isascii():
            return
        try:
            block.data.decode()
        except UnicodeDecodeError as error:
            line = block.first_line + block.data[: error.start].count(b"\n")
            self._refuse(line, "it is no UTF-8 text")

    def _read_meta(self, block: Block, row: int) -> None:
        found = json.loads(block.data.split(b"\n", row + 1)[row])
        self.meta = self.meta or found
        top_k = found.get("top_k")
        if not isinstance(top_k, int) or top_k < 1:
            return
        if self.top_k not in (0, top_k):
            self._refuse(block.first_line + row, f"top_k is {top_k}, and was {self.top_k} before")
        self.top_k = top_k

    def _checked(self, table: pa.Table, line: NDArray[np.int64]) -> LogRows:
        for name in ("token_idx", "layer", "topk_ids"):
            self._refuse_if(np.asarray(table[name].is_null()), line, f"{name} is missing")
        token, layer = (np.asarray(table[name]) for name in ("token_idx", "layer"))
        for name, values in (("token_idx", token), ("layer", layer)):
            wrong = (values < 0) | (values >= 1 << 31)
            self._refuse_if(wrong, line, f"{name} is negative, or no integer of 32 bits")
        experts = self._matrix(table["topk_ids"], line, "topk_ids", np.int64)
        wrong = (experts < -1) | (experts >= 1 << 16)
        self._refuse_if(wrong.any(axis=1), line, "an id of topk_ids is not within 0..65535")
        return LogRows(
            request=self._request(table["req_id"].combine_chunks()),
            token=token.astype(np.int32),
            layer=layer.astype(np.int32),
            line=line,
            experts=experts.astype(np.int32),
            gates=self._gates(table["topk_weights"], line),
        )

    def _request(self, column: Any) -> NDArray[np.int64]:
        """Return the index of every id; lines without one share another index."""
        codes = column.dictionary_encode(null_encoding="encode")
        known = [self.ids.setdefault(i, len(self.ids)) for i in codes.dictionary.to_pylist()]
        return np.array(known, np.int64)[np.asarray(codes.indices)]

    def _gates(self, column: pa.ChunkedArray, line: NDArray[np.int64]) -> NDArray[np.float32]:
        known = ~np.asarray(column.is_null())
        gates = np.full((len(known), self.top_k), np.nan, np.float32)
        if known.any():
            told = column.filter(pa.array(known))
            gates[known] = self._matrix(told, line[known], "topk_weights", np.float64)
        return gates

    def _matrix(
        self, column: pa.ChunkedArray, line: NDArray[np.int64], name: str, dtype: Any
    ) -> NDArray[Any]:
        """Return a column of lists as [n, k]."""
        lists = column.combine_chunks()
        lengths = np.asarray(lists.value_lengths())
        self.top_k = self.top_k or int(lengths[0])
        wrong = lengths != self.top_k
        if wrong.any():
            held = int(lengths[np.argmax(wrong)])
            self._refuse_if(wrong, line, f"{name} holds {held} values, k is {self.top_k}")
        flat = lists.flatten()
        if flat.null_count:
            empty = np.asarray(flat.is_null()).reshape(-1, self.top_k).any(axis=1)
            self._refuse_if(empty, line, f"{name} holds null")
        return np.asarray(flat).astype(dtype, copy=False).reshape(-1, self.top_k)

    def _refuse_if(self, wrong: Any, line: NDArray[np.int64], problem: str) -> None:
        if wrong.any():
            self._refuse(int(line[np.argmax(wrong)]), problem)

    def _refuse(self, line: int, problem: str) -> NoReturn:
        raise TraceError(f"{self.path}, line {line}: {problem}")

    def _blame(self, block: Block, error: str) -> NoReturn:
        """Complain about the first malformed line."""
        for line, text in enumerate(block.data.splitlines(), block.first_line):
            if problem := _problem(text, self._schema):
                self._refuse(line, problem)
        self._refuse(block.first_line, f"from here on: {error.splitlines()[0]}")


def _schema(request: Any) -> pa.Schema:
    numbered = isinstance(request, int)
    return pa.schema(
        [
            ("type", pa.string()),
            ("req_id", pa.int64() if numbered else pa.string()),
            ("token_idx", pa.int64()),
            ("layer", pa.int64()),
            ("topk_ids", pa.list_(pa.int64())),
            ("topk_weights", pa.list_(pa.float64())),
        ]
    )


def _kinds(table: pa.Table) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which lines are ``meta`` and which are routes, which need not say so."""
    codes = table["type"].combine_chunks().dictionary_encode(null_encoding="encode")
    names, index = codes.dictionary.to_pylist(), np.asarray(codes.indices)

    def lines_of(kind: str | None) -> NDArray[np.bool_]:
        return np.isin(index, [code for code, name in enumerate(names) if name == kind])

    bare = lines_of(None) & np.asarray(table["topk_ids"].is_valid())
    return lines_of(META), lines_of(ROUTE) | bare


def _between(metas: NDArray[np.int64], rows: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the rows before, between and after ``meta`` lines."""
    bounds = [-1, *metas.tolist(), rows]
    for before, after in pairwise(bounds):
        yield before + 1, after


def _problem(text: bytes, schema: pa.Schema) -> str:
    """Return what is wrong with a line; nothing if it is well-formed."""
    if not text.strip():
        return "the line is empty"
    try:
        found = json.loads(text)
    except ValueError as error:
        return f"it is no JSON: {error}"
    except RecursionError:
        return "it is nested too deeply"
    if not isinstance(found, dict):
        return "it is no JSON object"
    for field in schema:
        value = found.get(field.name)
        if value is not None and not _fits(value, field.type):
            shown = json.dumps(value)
            shown = shown if len(shown) <= 40 else shown[:40] + "…"
            return f"{field.name} is {shown}, expected {_wanted(field.type)}"
    return ""


def _fits(value: Any, kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return isinstance(value, list) and all(
            v is None or _fits(v, kind.value_type) for v in value
        )
    if pa.types.is_string(kind):
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if pa.types.is_integer(kind):
        return isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    return isinstance(value, int | float)


def _wanted(kind: pa.DataType) -> str:
    if pa.types.is_list(kind):
        return "a list of integers" if pa.types.is_integer(kind.value_type) else "a list of numbers"
    return "text" if pa.types.is_string(kind) else "an integer"
