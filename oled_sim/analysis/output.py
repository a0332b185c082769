"""The analysis as files and JSON. Same tables, same bytes."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from oled_sim.errors import UsageError
from oled_sim.trace.files import write_atomic

TABLES = (
    "traces",
    "paper",
    "footprint",
    "block_footprint",
    "locality",
    "activation_ratio",
    "reuse_distance",
    "lru_hits",
    "popularity",
    "entropy",
    "confidence_bins",
    "confidence_joint",
    "confidence_correlation",
)
"""Every table, and the name of its file; the last three only where a trace has confidence."""

FIGURES = ("footprint", "locality", "activation", "confidence", "reuse", "popularity")
"""Every figure, and the name of its file."""


def refuse_existing(folder: Path, *, force: bool) -> None:
    """Refuse to write where files of ours stand already, before any work is done.

    Raises:
        UsageError: ``folder`` is a file, or holds such files and ``force`` is false.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give a folder to write to")
    if (found := _ours(folder)) and not force:
        raise UsageError(
            f"{folder} holds {found[0].name} already: give another folder, or --force to replace"
            " what an earlier analyze wrote there"
        )


def write_tables(
    folder: Path, tables: dict[str, pd.DataFrame], *, force: bool = False
) -> list[Path]:
    """Write one Parquet file per table and return the files; ``folder`` is created.

    With ``force`` all tables and figures of an earlier analysis go first, so that no figure of
    another trace is left beside these tables. Files of other names are never touched.

    Raises:
        UsageError: files of ours stand there and ``force`` is false, or nothing can be created.
        TraceError: a file cannot be written.
    """
    refuse_existing(folder, force=force)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in _ours(folder):
            old.unlink()
    except OSError as error:
        raise UsageError(f"cannot write to {folder}: {error.strerror}") from None
    files = {folder / f"{name}.parquet": table for name, table in tables.items()}
    for file, table in files.items():
        write_atomic(file, parquet_bytes(table))
    return list(files)


def write_figures(folder: Path, tables: dict[str, pd.DataFrame]) -> list[Path]:
    """Draw every figure that the tables allow, one PNG each, and return the files.

    Raises:
        TraceError: a file cannot be written.
    """
    from oled_sim.plotting import save
    from oled_sim.plotting.locality import draw_all

    files = {folder / f"{name}.png": figure for name, figure in draw_all(tables).items()}
    for file, figure in files.items():
        save(figure, file)
    return list(files)


def parquet_bytes(table: pd.DataFrame) -> bytes:
    """Return a table as a Parquet file (zstd, page checksums)."""
    buffer = io.BytesIO()
    content = pa.Table.from_pandas(table, preserve_index=False)
    pq.write_table(content, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


def encode_json(tables: dict[str, pd.DataFrame]) -> bytes:
    """Return ``{"tables": {name: {column: [values]}}}``; what is unknown is null.

    ``pandas.DataFrame(found["tables"]["paper"])`` gives a table back.
    """
    columns = {
        name: {column: _values(table[column]) for column in table} for name, table in tables.items()
    }
    return msgspec.json.encode({"tables": columns})


def _values(column: pd.Series) -> list[object]:
    return column.astype(object).where(column.notna(), None).tolist()


def _ours(folder: Path) -> list[Path]:
    names = [f"{t}.parquet" for t in TABLES] + [f"{f}.png" for f in FIGURES]
    return [folder / name for name in names if (folder / name).exists()]
