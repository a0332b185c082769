"""The three Parquet tables of a request, and their conversion to and from memory.

``iterations`` has one row per forward pass, ``tokens`` one per pass and position, ``routing`` one
per event. docs/trace-format.md describes every column. Conversion copies no list column: the flat
values of an Arrow list are the memory of the numpy array.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oled_sim.errors import TraceError
from oled_sim.geometry import RoutingGeometry
from oled_sim.trace.builder import offsets
from oled_sim.trace.manifest import expert_dtype
from oled_sim.trace.schema import COSINE_GAPS, SCHEMA_VERSION, TABLES, RequestTrace
from oled_sim.trace.validate import RuleError

_PARQUET_OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "write_statistics": False,
    "write_page_checksum": True,
    "store_schema": False,
    # One page per column: zstd finds a token's route of an earlier pass only within a page.
    "data_page_size": 64 << 20,
    "max_rows_per_page": 1 << 30,
}


class Layout(NamedTuple):
    """What decides the columns: geometry, optional signals, and whether events are ragged."""

    geometry: RoutingGeometry
    signals: frozenset[str]
    ragged: bool


def schemas(layout: Layout) -> dict[str, pa.Schema]:
    """Return the Arrow schema of each table."""
    ids = pa.from_numpy_dtype(expert_dtype(layout.geometry.experts))
    iterations = {
        "request": pa.int32(),
        "iteration": pa.int32(),
        "kind": pa.uint8(),
        "block": pa.int32(),
        "tokens": pa.int32(),
        "accepted": pa.int32(),
        "context": pa.int32(),
        "time_us": pa.float64(),
        "cosines": _list(pa.float16()),
        "embedding": _list(pa.float16()),
    }
    tokens = {
        "request": pa.int32(),
        "iteration": pa.int32(),
        "position": pa.int32(),
        "token_id": pa.int32(),
        "state": pa.uint8(),
        "confidence": pa.float16(),
        "accepted": pa.bool_(),
        "edited": pa.bool_(),
    }
    routing = {
        "request": pa.int32(),
        "iteration": pa.int32(),
        "layer": pa.int16(),
        "token": _list(pa.int32()),
        "experts": _list(ids),
        "gates": _list(pa.float16()),
        "full_gate": _list(pa.float16()),
    }
    absent = {"cosines", "embedding", "gates", "full_gate"} - layout.signals
    absent |= set() if layout.ragged else {"token"}
    tables = (("iterations", iterations), ("tokens", tokens), ("routing", routing))
    return {name: _schema(name, columns, absent) for name, columns in tables}


def to_tables(trace: RequestTrace, layout: Layout) -> dict[str, pa.Table]:
    """Convert a request to its tables (rows and slots in the order they have in memory)."""
    found = schemas(layout)
    builders = {"iterations": _iterations, "tokens": _tokens, "routing": _routing}
    return {name: _table(builders[name](trace, layout), found[name]) for name in TABLES}


class _Place(NamedTuple):
    """Where the rows of a table are in the request, for messages."""

    table: str
    iteration: NDArray[Any]
    layer: NDArray[Any] | None = None

    def of(self, row: int) -> tuple[int, int | None]:
        """Return iteration and layer of a row."""
        return int(self.iteration[row]), None if self.layer is None else int(self.layer[row])


def from_tables(tables: Mapping[str, pa.Table], layout: Layout) -> RequestTrace:
    """Convert the tables of a request to memory; columns that were not read become None.

    Raises:
        RuleError: list lengths, layers or iteration numbers that no request could have.
    """
    _check_numbers(tables)
    iterations, tokens, routing = (tables[name] for name in TABLES)
    geometry, k = layout.geometry, layout.geometry.top_k
    token_offset = offsets(_column(iterations, "tokens"))
    event_pass, layers = _column(routing, "iteration"), _column(routing, "layer")
    passes = _Place("iterations", np.arange(iterations.num_rows))
    events = _Place("routing", event_pass, layers)
    experts, lengths = _lists(routing, "experts")
    event_offset = offsets(_divide(lengths, k, "experts", events))
    return RequestTrace(
        request=int(_column(iterations, "request")[0]),
        kind=_column(iterations, "kind"),
        block=_column(iterations, "block"),
        context=_column(iterations, "context"),
        accepted_count=_column(iterations, "accepted"),
        time_us=_column(iterations, "time_us"),
        token_offset=token_offset,
        position=_column(tokens, "position"),
        token_id=_column(tokens, "token_id"),
        state=_column(tokens, "state"),
        confidence=_column(tokens, "confidence").astype(np.float32),
        accepted=_column(tokens, "accepted"),
        edited=_column(tokens, "edited"),
        event_pass=event_pass,
        event_layer=_layer_index(layers, geometry, events),
        event_offset=event_offset,
        experts=experts.reshape(-1, k),
        gates=_matrix(routing, "gates", k, events),
        row_token=_row_tokens(routing, token_offset, event_pass, event_offset),
        full_gate=_matrix(routing, "full_gate", geometry.experts, events),
        embedding=_matrix(iterations, "embedding", None, passes),
        cosines=_float32(_matrix(iterations, "cosines", COSINE_GAPS, passes)),
    )


def encode_table(table: pa.Table, compression_level: int) -> pa.Buffer:
    """Return the bytes of a Parquet file: one row group, zstd, page checksums."""
    split = [path for path, kind in _leaves(table.schema) if _varied(path, kind)]
    rest = [path for path, _ in _leaves(table.schema) if path not in split]
    options: dict[str, Any] = {
        "use_dictionary": rest,
        "use_byte_stream_split": split,
        "compression_level": compression_level,
    }
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(sink, table.schema, **_PARQUET_OPTIONS, **options) as writer:
        writer.write_table(table, row_group_size=max(1, table.num_rows))
        writer.add_key_value_metadata(table.schema.metadata)
    return sink.getvalue()


def decode_table(data: Any, name: str, expected: pa.Schema, columns: Collection[str]) -> pa.Table:
    """Read ``columns`` of a Parquet file in memory, page checksums verified.

    Raises:
        pa.ArrowException, OSError: not Parquet, truncated, or damaged.
        TraceError: Parquet, but not this table.
    """
    file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    if (file.metadata.metadata or {}).get(b"oled_sim.table") != name.encode():
        raise TraceError(f"it is Parquet but not an oled-sim {name!r} table")
    _check_columns(file.schema_arrow, expected)
    # Threads gain nothing on tables of one request, and Arrow's pool can abort a process that ends
    # soon after it was started ("terminate called without an active exception").
    table = file.read(columns=[c for c in expected.names if c in columns], use_threads=False)
    for column in table.column_names:
        if table[column].null_count:
            raise TraceError(f"column {column!r} holds nulls")
    return table


def _check_columns(found: pa.Schema, expected: pa.Schema) -> None:
    for field in expected:
        if field.name not in found.names:
            raise TraceError(f"column {field.name!r} is missing")
        if not found.field(field.name).type.equals(field.type):
            kind = found.field(field.name).type
            raise TraceError(f"column {field.name!r} is {kind}, expected {field.type}")


def _schema(name: str, columns: Mapping[str, pa.DataType], absent: Collection[str]) -> pa.Schema:
    fields = [pa.field(c, t, nullable=False) for c, t in columns.items() if c not in absent]
    metadata = {"oled_sim.table": name, "oled_sim.schema_version": str(SCHEMA_VERSION)}
    return pa.schema(fields, metadata=metadata)


def _list(values: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", values, nullable=False))


def _leaves(schema: pa.Schema) -> list[tuple[str, pa.DataType]]:
    lists = pa.types.is_list
    return [
        (f"{f.name}.list.element", f.type.value_type) if lists(f.type) else (f.name, f.type)
        for f in schema
    ]


def _varied(path: str, kind: pa.DataType) -> bool:
    """Return whether whole values hardly repeat, so that byte planes beat a dictionary."""
    return path.endswith(".element") or path == "token_id" or pa.types.is_floating(kind)


def _table(columns: Mapping[str, Any], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_arrays([_array(columns[f.name], f.type) for f in schema], schema=schema)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_list(kind):
        return _wrap(values, kind)
    flat, rows = values
    items = _wrap(flat, kind.value_type)
    return pa.ListArray.from_arrays(_wrap(rows, pa.int32()), items, type=kind)


def _wrap(values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return an Arrow array over numpy memory (`pa.array` would copy, and import pandas)."""
    if pa.types.is_boolean(kind):
        data = np.packbits(values, bitorder="little")
    else:
        data = np.ascontiguousarray(values, dtype=kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def _iterations(trace: RequestTrace, layout: Layout) -> dict[str, Any]:
    passes = trace.passes
    events = np.searchsorted(trace.event_pass, np.arange(passes + 1))
    return {
        "request": np.full(passes, trace.request),
        "iteration": np.arange(passes),
        "kind": trace.kind,
        "block": trace.block,
        "tokens": np.diff(trace.token_offset),
        "accepted": trace.accepted_count,
        "context": trace.context,
        "time_us": trace.time_us,
        "cosines": _flat(trace.cosines, events, np.float16),
        "embedding": _flat(trace.embedding, np.arange(passes + 1), np.float16),
    }


def _tokens(trace: RequestTrace, layout: Layout) -> dict[str, Any]:
    return {
        "request": np.full(len(trace.position), trace.request),
        "iteration": np.repeat(np.arange(trace.passes), np.diff(trace.token_offset)),
        "position": trace.position,
        "token_id": trace.token_id,
        "state": trace.state,
        "confidence": trace.confidence.astype(np.float16),
        "accepted": trace.accepted,
        "edited": trace.edited,
    }


def _routing(trace: RequestTrace, layout: Layout) -> dict[str, Any]:
    rows, layers = trace.event_offset, np.asarray(layout.geometry.layers)
    first = np.repeat(trace.token_offset[trace.event_pass], np.diff(rows))
    every = np.arange(trace.events + 1)
    return {
        "request": np.full(trace.events, trace.request),
        "iteration": trace.event_pass,
        "layer": layers[trace.event_layer],
        "token": (trace.row_token - first, rows),
        "experts": _flat(trace.experts, rows, expert_dtype(layout.geometry.experts)),
        "gates": _flat(trace.gates, rows, np.float16),
        "full_gate": _flat(trace.full_gate, every, np.float16),
    }


def _flat(
    values: NDArray[Any] | None, rows: NDArray[Any], dtype: Any
) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return a matrix as the flat values and offsets of a list column."""
    if values is None:
        return None
    return values.astype(dtype, copy=False).ravel(), rows * values.shape[1]


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    return _unwrap(_chunk(table, name))


def _chunk(table: pa.Table, name: str) -> Any:
    column = table[name]
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _unwrap(array: Any) -> NDArray[Any]:
    """Return the memory of an Arrow array without nulls (`to_numpy` would import pandas)."""
    if len(array) == 0:
        return np.empty(0, array.type.to_pandas_dtype())
    data, start, stop = array.buffers()[1], array.offset, array.offset + len(array)
    if pa.types.is_boolean(array.type):
        bits = np.unpackbits(np.frombuffer(data, np.uint8), count=stop, bitorder="little")
        return bits[start:].astype(np.bool_)
    return np.frombuffer(data, array.type.to_pandas_dtype())[start:stop]


def _lists(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the flat values and the lengths of a list column."""
    lists = _chunk(table, name)
    lengths = np.diff(_unwrap(lists.offsets)).astype(np.int64)
    return _unwrap(lists.flatten()), lengths


def _matrix(table: pa.Table, name: str, width: int | None, place: _Place) -> NDArray[Any] | None:
    """Return a list column as rows of ``width`` values (None: as many as its first row has)."""
    if name not in table.column_names:
        return None
    flat, lengths = _lists(table, name)
    width = int(lengths[0]) if width is None else width
    _divide(lengths, width, name, place)
    return flat.reshape(-1, width)


def _divide(lengths: NDArray[np.int64], width: int, name: str, place: _Place) -> NDArray[np.int64]:
    """Return ``lengths / width``, which must be whole."""
    wrong = lengths % width != 0 if width else np.ones(len(lengths), np.bool_)
    if wrong.any():
        row = int(np.argmax(wrong))
        problem = f"{lengths[row]} values of {name!r} are no multiple of {width}"
        raise RuleError(place.table, problem, *place.of(row))
    return lengths // width


def _float32(values: NDArray[Any] | None) -> NDArray[np.float32] | None:
    return None if values is None else values.astype(np.float32)


def _layer_index(
    layers: NDArray[Any], geometry: RoutingGeometry, place: _Place
) -> NDArray[np.int16]:
    known = np.asarray(geometry.layers)
    index = np.minimum(np.searchsorted(known, layers), len(known) - 1)
    wrong = known[index] != layers
    if wrong.any():
        problem = f"the model's recorded layers are {known.tolist()}"
        raise RuleError(place.table, problem, *place.of(int(np.argmax(wrong))))
    return index.astype(np.int16)


def _row_tokens(
    routing: pa.Table,
    token_offset: NDArray[np.int64],
    event_pass: NDArray[np.int32],
    event_offset: NDArray[np.int64],
) -> NDArray[np.int32]:
    """Return the token of each routing row: as stored, else the pass's tokens in order."""
    rows = np.diff(event_offset)
    first = token_offset[event_pass]
    if "token" not in routing.column_names:
        within = np.arange(event_offset[-1]) - np.repeat(event_offset[:-1], rows)
    else:
        within, lengths = _lists(routing, "token")
        if not np.array_equal(lengths, rows):
            raise RuleError("routing", "the columns 'token' and 'experts' differ in length")
    return (np.repeat(first, rows) + within).astype(np.int32)


def _check_numbers(tables: Mapping[str, pa.Table]) -> None:
    """Check the numbers that conversion indexes with; finer rules are in ``validate``."""
    iterations = tables["iterations"]
    passes = iterations.num_rows
    if passes == 0 or not np.array_equal(_column(iterations, "iteration"), np.arange(passes)):
        raise RuleError("iterations", "iterations are not numbered 0, 1, 2, ...")
    for name in ("tokens", "routing"):
        _check_iterations(name, _column(tables[name], "iteration"), passes)
    stated = _column(iterations, "tokens")
    found = np.bincount(_column(tables["tokens"], "iteration"), minlength=passes)
    if (wrong := stated != found).any():
        i = int(np.argmax(wrong))
        raise RuleError("tokens", f"{found[i]} tokens, the pass has {stated[i]}", i)
    numbers = np.concatenate([_column(tables[name], "request") for name in TABLES])
    if (numbers != numbers[0]).any():
        raise RuleError("iterations", "the tables hold rows of several requests")


def _check_iterations(table: str, numbers: NDArray[np.int32], passes: int) -> None:
    descends = np.diff(numbers) < 0
    if descends.any():
        iteration = int(numbers[1:][descends][0])
        raise RuleError(table, "the iteration comes after a later one", iteration)
    if len(numbers) and not 0 <= numbers[0] <= numbers[-1] < passes:
        iteration = int(numbers[0] if numbers[0] < 0 else numbers[-1])
        raise RuleError(table, "the iteration is not in the table 'iterations'", iteration)
