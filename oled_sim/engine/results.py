"""Results as files: one row per counted request, or one row per event, both Parquet."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from oled_sim.engine.batch import Batch
from oled_sim.engine.output import NewFile
from oled_sim.engine.runner import Contender, Result
from oled_sim.engine.simulation import GroupRecord
from oled_sim.engine.state import EVENT_COUNTS, EVENT_TIMES, PASS_COUNTS, PASS_TIMES, Course
from oled_sim.trace.schema import Kind

METADATA_KEY = "oled_sim.run"


class ParquetFile(NewFile):
    """A Parquet file that appears under its name only once it is whole; rows come as they may."""

    def __init__(self, path: Path, metadata: dict[str, Any]) -> None:
        super().__init__(path)
        self._metadata = {METADATA_KEY: json.dumps(metadata, sort_keys=True)}
        self._writer: pq.ParquetWriter | None = None

    def write(self, table: pa.Table) -> None:
        """Append rows; all tables have the columns of the first."""
        try:
            if self._writer is None:
                schema = table.schema.with_metadata(self._metadata)
                self._writer = pq.ParquetWriter(
                    self.temporary, schema, compression="zstd", write_page_checksum=True
                )
            self._writer.write_table(table)
        except OSError as error:
            raise self.refused(error) from error

    def finish(self) -> None:
        """Write the footer."""
        if self._writer is not None:
            self._writer.close()


def request_table(results: Sequence[Result], trace: str) -> pa.Table:
    """Return one row per policy, budget and counted request.

    Columns: trace, policy, cache, cache_bytes, link_gb_s, scope, batch, batch_mode, confidence,
    causal, then those of :class:`~oled_sim.engine.request_figures.RequestFigures`, then
    peak_gpu_bytes. ``trace``: what to call the trace.
    """
    rows = [
        {
            "trace": trace,
            "policy": result.spec,
            "cache": result.budget.cache,
            "cache_bytes": result.budget.size_bytes,
            "link_gb_s": result.link_gb_s,
            "scope": result.rules.scope,
            "batch": result.rules.batch,
            "batch_mode": result.rules.batch_mode,
            "confidence": result.rules.confidence,
            "causal": result.causal,
            **asdict(figures),
            "peak_gpu_bytes": result.summary.peak_gpu_bytes,
        }
        for result in results
        for figures in result.requests
    ]
    table = pa.Table.from_pylist(rows)
    for name in ("cache", "cache_bytes"):  # a column of nulls alone has no type yet
        i = table.schema.get_field_index(name)
        table = table.set_column(i, name, table[name].cast(pa.int64()))
    return table


def write_table(path: Path, table: pa.Table, metadata: dict[str, Any]) -> None:
    """Write a table as Parquet, or as CSV if the name ends in ``.csv``.

    Parquet holds ``metadata`` in the schema's metadata, under ``oled_sim.run`` as JSON.

    Raises:
        UsageError: it cannot be written there.
    """
    if path.suffix == ".csv":
        with NewFile(path) as file:
            try:
                pa_csv.write_csv(table, file.temporary)
            except OSError as error:
                raise file.refused(error) from error
        return
    with ParquetFile(path, metadata) as file:
        file.write(table)


def about_policies(results: Iterable[Result]) -> dict[str, Any]:
    """Return metadata: every policy's parameters by its name, and what each has to say."""
    policies: dict[str, Any] = {}
    notes: dict[str, list[str]] = {}
    for result in results:
        policies[result.spec] = result.parameters
        for note in result.notes:
            said = notes.setdefault(result.spec, [])
            said += [note] if note not in said else []
    return {"policies": policies, "notes": notes}


class EventFile(ParquetFile):
    """One row per event of every run: what happened at each gate, and when; see docs/events.md.

    Args:
        path: the file.
        layers: the model's own indices of the MoE layers.
        metadata: what the file says about the run.
    """

    def __init__(self, path: Path, layers: Sequence[int], metadata: dict[str, Any]) -> None:
        super().__init__(path, metadata)
        self._layers = np.array(layers, np.int16)

    def add(self, contender: Contender, record: GroupRecord) -> None:
        """Append the events of a group. Events of a batch carry its first request's number."""
        course, batch = record.course, record.batch
        events, of_pass = len(course.event_layer), course.event_pass
        columns: dict[str, Any] = {
            "policy": pa.array([contender.spec] * events).dictionary_encode(),
            "cache": pa.array([contender.budget.cache] * events, pa.int64()),
            "cache_bytes": pa.array([contender.budget.size_bytes] * events, pa.int64()),
            "split": pa.array([record.group.split] * events).dictionary_encode(),
            "request": np.full(events, batch.traces[0].request, np.int32),
            "requests": _requests_present(batch),
            "pass": (batch.start + of_pass).astype(np.int32),
            "kind": _kinds(batch.kind[of_pass]),
            "block": batch.block[of_pass],
            "layer": self._layers[course.event_layer],
        }
        columns |= zip(EVENT_COUNTS, course.counts.T, strict=True)
        columns |= zip(EVENT_TIMES, course.times.T, strict=True)
        columns |= _pass_columns(course)
        self.write(pa.table(columns))


def _pass_columns(course: Course) -> dict[str, NDArray[Any]]:
    """Return what was measured of each event's pass, the same for all its events."""
    measured = (*course.pass_counts.T, *course.pass_times.T)
    names = (*PASS_COUNTS, *PASS_TIMES)
    return {
        f"pass_{name}": values[course.event_pass]
        for name, values in zip(names, measured, strict=True)
    }


def _requests_present(batch: Batch) -> NDArray[np.int32]:
    """Return how many requests have tokens in each event, int32 [V]. Rows are sorted by request."""
    new = np.ones(len(batch.owner), np.int32)
    new[1:] = np.diff(batch.owner) != 0
    new[batch.rows[:-1]] = 1
    return np.add.reduceat(new, batch.rows[:-1]) if len(new) else new


def _kinds(kind: NDArray[np.uint8]) -> pa.Array:
    names = [k.name.lower() for k in Kind]
    return pa.DictionaryArray.from_arrays(pa.array(kind.astype(np.int8)), names)
