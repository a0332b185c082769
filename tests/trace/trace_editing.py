"""Changing traces behind the library's back: edits that keep every checksum right."""

import hashlib
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from oled_sim.trace.files import table_path
from oled_sim.trace.manifest import FileEntry, load_manifest, save_manifest
from oled_sim.trace.tables import Layout, encode_table, schemas


def edit_table(path: Path, table: str, change, *, request: int = 0) -> None:
    """Pass the columns of a table (dict of lists) to ``change``, and write what it left."""
    file = path / table_path(table, request)
    manifest = load_manifest(path)
    layout = Layout(manifest.geometry, frozenset(manifest.signals), manifest.ragged)
    columns = pq.read_table(file).to_pydict()
    change(columns)
    edited = pa.Table.from_pydict(columns, schema=schemas(layout)[table])
    replace_file(path, table, bytes(encode_table(edited, 1)), request=request)


def replace_file(path: Path, table: str, data: bytes, *, request: int = 0) -> None:
    """Replace a file of the trace, and its size and hash in the manifest."""
    relative = table_path(table, request)
    (path / relative).write_bytes(data)
    manifest = load_manifest(path)
    entry = FileEntry(size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
    requests = tuple(
        msgspec.structs.replace(r, files=r.files | {relative: entry}) if r.request == request else r
        for r in manifest.requests
    )
    save_manifest(path, msgspec.structs.replace(manifest, requests=requests))


def edit_manifest(path: Path, **changes) -> None:
    """Change fields of the manifest, and seal it again."""
    save_manifest(path, msgspec.structs.replace(load_manifest(path), **changes))
