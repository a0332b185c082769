"""Exporting a table of routes, one line per token and layer, which ``oled-sim import csv`` reads.

The first line is a comment with the trace's manifest, so that a table that comes back is the trace
it was. The second names the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
from numpy.typing import NDArray

from oled_sim.exporting import exported_manifest, note_missing_signals
from oled_sim.plugin_options import takes
from oled_sim.trace.manifest import encode_manifest
from oled_sim.trace.reader import Trace
from oled_sim.trace.schema import RequestTrace

MANIFEST_PREFIX = "# oled-sim-trace "
"""Begins the comment line that holds a manifest."""

PASS_COLUMNS = ("kind", "block", "context", "time_us")
TOKEN_COLUMNS = ("token_id", "state", "confidence", "accepted", "edited")

_ROWS_AT_ONCE = 1 << 16


@takes(examples=("oled-sim export csv nano-gsm8k --out routes.csv.gz",))
def export_csv(
    trace: Trace,
    file: IO[bytes],
    *,
    on_progress: Callable[[float], None] = lambda _: None,
    on_note: Callable[[str], None] = lambda _: None,
) -> Mapping[str, int]:
    """Write the table; an :class:`oled_sim.exporting.Exporter`. Returns the number of ``rows``."""
    note_missing_signals(trace, on_note)
    manifest = exported_manifest(trace)
    file.write(MANIFEST_PREFIX.encode() + encode_manifest(manifest, indent=0))
    rows, lonely, names = 0, 0, list[str]()
    for done, number in enumerate(trace.requests, 1):
        request = trace.read(number, signals=manifest.signals)
        columns = _columns(request, trace, manifest.signals)
        if not names:
            names = list(columns)
            file.write((",".join(names) + "\n").encode())
        _write(file, columns, len(request.experts))
        rows += len(request.experts)
        lonely += len(request.position) - len(np.unique(request.row_token))
        on_progress(done / len(trace))
    if lonely:
        on_note(f"{lonely:,} tokens without any route are left out")
    return {"rows": rows}


def _columns(
    request: RequestTrace, trace: Trace, signals: tuple[str, ...]
) -> dict[str, NDArray[Any]]:
    """Return the columns by name, one value per routing row."""
    counts = np.diff(request.event_offset)
    owner = np.repeat(request.event_pass, counts)
    layers = np.asarray(trace.geometry.layers, np.int32)
    rows = len(owner)
    left_out = {"confidence"} - set(signals)
    columns: dict[str, NDArray[Any]] = {
        "request": np.full(rows, request.request, np.int32),
        "iteration": owner,
        "layer": np.repeat(layers[request.event_layer], counts),
        "token": request.position[request.row_token],
    }
    for slot in range(request.experts.shape[1]):
        columns[f"expert_{slot}"] = request.experts[:, slot]
    if request.gates is not None:
        for slot in range(request.gates.shape[1]):
            columns[f"gate_{slot}"] = request.gates[:, slot]
    for name in PASS_COLUMNS:
        columns[name] = getattr(request, name)[owner]
    for name in TOKEN_COLUMNS:
        if name not in left_out:
            columns[name] = getattr(request, name)[request.row_token]
    return columns


def _write(file: IO[bytes], columns: Mapping[str, NDArray[Any]], rows: int) -> None:
    options = pcsv.WriteOptions(include_header=False)
    for start in range(0, rows, _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        arrays = [pa.array(_printable(values[part])) for values in columns.values()]
        pcsv.write_csv(pa.table(arrays, names=list(columns)), file, options)


def _printable(values: NDArray[Any]) -> NDArray[Any]:
    """Return values of a type that is written as a number; float32 holds float16 exactly."""
    if values.dtype == np.bool_:
        return values.astype(np.uint8)
    return values.astype(np.float32) if values.dtype == np.float16 else values
